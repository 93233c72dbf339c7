"""There is no equal for `ts.torch_handler.text_classifier`."""

from mmserve.runtime.torchserve import UNSERVED

raise ImportError(
    f"ts.torch_handler.text_classifier is not served here: {UNSERVED['text_classifier']}."
)
