"""There is no equal for `ts.torch_handler.text_handler`."""

from mmserve.runtime.torchserve import UNSERVED

raise ImportError(f"ts.torch_handler.text_handler is not served here: {UNSERVED['text_handler']}.")
