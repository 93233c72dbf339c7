"""The release whose contract is kept."""

from mmserve import MMS_VERSION

__version__ = MMS_VERSION
