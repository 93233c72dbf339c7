"""Where servers are put: deep folders, full disks, read-only roots, users without a name."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import StartServer
from tests.e2e.server import ECHO, PID, eventually, handler


def can_mount() -> bool:
    """Whether a mount namespace of our own can be made, and mounted in."""
    words = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs mount namespaces")


def mounted(script: str) -> tuple[str, ...]:
    """Words before a command that run it after these mounts."""
    return ("unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh")


@needs_mounts
def test_a_full_disk_is_our_fault_and_says_which(start_server: StartServer, home: Path) -> None:
    tmp = home / "s0" / "tmp"
    server = start_server(prefix=mounted(f"mount -t tmpfs -o size=2m tmpfs {tmp}"))
    large = server.add("large", PID, {"weights.bin": os.urandom(8_000_000)})
    reply = server.register(large, initial_workers=1)
    assert reply.status == 500
    assert "No space left" in reply.message and str(tmp) in reply.message
    server.load(server.add("small", PID))  # what the failure wrote is gone again
    assert server.predict("small").status == 200


@needs_mounts
def test_a_read_only_root_is_enough(start_server: StartServer, home: Path) -> None:
    """Only the temporary folder can be written, and there is no home."""
    place = home / "s0"
    script = (
        f"mount --rbind / /mnt && mount -o remount,ro,bind /mnt"
        f" && mount --bind {place}/tmp /mnt{place}/tmp"
    )
    server = start_server(
        prefix=("unshare", "--mount", "sh", "-c", f'{script} && exec chroot /mnt "$@"', "sh"),
        archives={"m": PID},
        env={"HOME": None, "LOG_LOCATION": "/logs", "METRICS_LOCATION": "/logs"},
    )
    server.load("m.mar")
    assert server.predict("m").status == 200
    server.saw("/predictions/m")  # the access log goes to standard output instead


def test_a_deep_temporary_folder_is_fine(start_server: StartServer, home: Path) -> None:
    deep = home / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True)
    server = start_server(env=dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(deep)))
    server.load(server.add("m", PID))
    assert server.predict("m").status == 200


def test_a_narrow_locale_does_not_narrow_requests(start_server: StartServer) -> None:
    source = handler("print(b); print('\\udcff'); return [b['s']]")
    narrow = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    server = start_server(env=narrow)
    server.load(server.add("m", source))
    reply = server.predict("m", '{"s": "你好"}', "application/json")
    assert (reply.status, reply.text) == (200, "你好")


def test_handlers_may_have_the_names_of_our_modules(start_server: StartServer) -> None:
    """`service.py` is every handler here; these are beside it, and are imported by it.

    `gettext` is one that the process which forks workers holds.
    """
    names = (
        "context",
        "metrics",
        "utils",
        "wire",
        "runtime",
        "workers",
        "errors",
        "tqdm",
        "gettext",
    )
    setup = "\n".join(f"import {name}; assert {name}.mine, {name}" for name in names)
    server = start_server()
    files = {f"{name}.py": "mine = True\n" for name in names}
    server.load(server.add("m", handler(setup=setup), files))
    assert server.predict("m").text == "ok"


def test_requirements_of_an_archive_are_not_installed(start_server: StartServer) -> None:
    """As under Multi Model Server: what a handler needs belongs into the image."""
    server = start_server()
    server.load(server.add("m", ECHO, {"requirements.txt": "no-such-package-anywhere==1\n"}))
    assert server.predict("m", "x").text == "x"


def test_variables_reach_workers_unless_they_are_withheld(start_server: StartServer) -> None:
    source = handler("return [f\"{os.environ.get('OPEN_ONE')} {os.environ.get('SECRET_ONE')}\"]")
    server = start_server(
        blacklist_env_vars="SECRET_.*", env={"OPEN_ONE": "yes", "SECRET_ONE": "hush"}
    )
    server.load(server.add("m", source))
    assert server.predict("m").text == "yes None"


def test_output_of_every_kind_neither_blocks_nor_breaks_anything(
    start_server: StartServer,
) -> None:
    source = handler(
        r"""
        sys.stdout.write("x\n" * 500_000)
        os.write(1, b"\xff\x00\x1b[31m" * 100_000)
        subprocess.run(["sh", "-c", "yes no | head -c 300000"])
        print("[METRICS]Forged.Milliseconds:1|#Level:Model|#hostname:h,1,")
        sys.stderr.write("y" * 1_000_000)
        return ["ok"]
        """
    )
    server = start_server()
    server.load(server.add("m", source))
    for _ in range(3):
        assert server.predict("m").text == "ok"
    log = server.logs / "model_log.log"
    eventually(lambda: "[cut after" in log.read_text(), what="the endless line is shown, cut")
    eventually(lambda: "of output dropped" in log.read_text(), what="the rest is told of")
    lines = log.read_text().splitlines()
    assert any(" W-m-1-stdout " in line and line.endswith(" - x") for line in lines)
    assert any(" W-m-1-stderr " in line and "[cut after" in line for line in lines)
    assert max(map(len, lines)) < 20_000 and len(lines) < 100_000
