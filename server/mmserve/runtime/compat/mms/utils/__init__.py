"""`mms.utils`."""
