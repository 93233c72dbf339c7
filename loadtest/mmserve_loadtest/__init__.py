"""mmserve-bench: load generation and comparison over HTTP."""
