"""What handlers import from TorchServe, answered by mmserve.

As with `mms`: the last entry of a worker's module path and of no other process's, so that an
installed TorchServe is found first.
"""

#: The newest release whose handlers are known.
__version__ = "0.12.0"
