"""`ts.metrics`."""
