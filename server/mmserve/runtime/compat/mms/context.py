"""`mms.context`."""

from mmserve.runtime.context import Context, RequestProcessor

__all__ = ["Context", "RequestProcessor"]
