"""`python -m mmserve_loadtest` is `mmserve-bench`."""

from mmserve_loadtest.main import main

if __name__ == "__main__":
    raise SystemExit(main())
