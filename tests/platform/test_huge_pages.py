"""Memory in huge pages is the memory it was."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import hashlib, os
from mmserve import platform

kept = [os.urandom(1 << 20) for _ in range(16)] + [bytes(range(256)) * 64 for _ in range(500)]
digest = [hashlib.sha1(one).digest() for one in kept]
steps = sum(1 for _ in platform.into_huge_pages())
assert [hashlib.sha1(one).digest() for one in kept] == digest
pid = os.fork()
if not pid:
    kept[0] = b""
    os._exit([hashlib.sha1(one).digest() for one in kept[1:]] != digest[1:])
assert os.waitpid(pid, 0)[1] == 0
assert [hashlib.sha1(one).digest() for one in kept] == digest
print(steps)
"""


def test_moving_into_huge_pages_changes_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 0
