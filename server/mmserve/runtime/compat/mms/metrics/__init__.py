"""`mms.metrics`."""
