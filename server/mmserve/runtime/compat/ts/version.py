"""`ts.version`."""

__version__ = "0.12.0"
