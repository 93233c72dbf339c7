"""There is no equal for `ts.torch_handler.image_segmenter`."""

from mmserve.runtime.torchserve import UNSERVED

raise ImportError(
    f"ts.torch_handler.image_segmenter is not served here: {UNSERVED['image_segmenter']}."
)
