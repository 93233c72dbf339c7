"""What handlers import from Multi Model Server, answered by mmserve.

The directory above is the last entry of a worker's module path, and of no other process's: where
Multi Model Server is installed, its own package is found first.
"""

from mmserve import MMS_VERSION

__version__ = MMS_VERSION
