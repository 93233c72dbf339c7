"""There is no equal for `ts.torch_handler.object_detector`."""

from mmserve.runtime.torchserve import UNSERVED

raise ImportError(
    f"ts.torch_handler.object_detector is not served here: {UNSERVED['object_detector']}."
)
