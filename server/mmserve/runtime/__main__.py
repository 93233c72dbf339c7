"""`python -I -m mmserve.runtime --fd N`: a worker in a fresh interpreter.

Environment and working directory come from whoever starts it; N is our end of the socket pair.
"""

import sys

from mmserve.runtime.worker import run_worker

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] != "--fd" or not sys.argv[2].isdecimal():
        sys.exit("usage: python -I -m mmserve.runtime --fd N")
    run_worker(int(sys.argv[2]), start="fresh")
