"""Peers, installed where they are missing and started with one workload."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from mmserve_loadtest.client import BadReply, NoReply, call
from mmserve_loadtest.models import ModelsMissing, site_packages
from mmserve_loadtest.peers import Peer, Place, Request, Workload
from mmserve_loadtest.servers import (
    START_LIMIT_S,
    ServerFailed,
    Started,
    free_ports,
    has_java,
    installed_version,
)

#: What a folder of a peer is installed with: another list is another installation.
MARK = ".installed"
#: Loading torch on two busy cores takes its time, and so does a first JVM.
PEER_START_LIMIT_S = 2 * START_LIMIT_S


class PeerMissing(Exception):
    """A peer cannot be installed or started here; the message says why, in a line.

    Attributes:
        output: the end of what it said itself.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


def last_words(output: str) -> str:
    """Why a program ended, most likely: the line of its first exception, else its last one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = (line for line in lines if re.search(r"\w(Error|Exception): ", line))
    return next(errors, lines[-1] if lines else "it said nothing")[:500]


def install(peer: Peer, folder: Path, say: Callable[[str], None]) -> Path:
    """The virtual environment of the peer, `folder`/NAME; made with pip where it is not there.

    Raises:
        PeerMissing: something it needs is not to be had.
    """
    if peer.needs_java and not has_java():
        raise PeerMissing("it needs Java; there is none on PATH or in JAVA_HOME")
    venv = folder.absolute() / peer.name
    wanted = "".join(f"{word}\n" for word in (*peer.requirements, *peer.alone))
    mark = venv / MARK
    if mark.is_file() and mark.read_text(encoding="utf-8") == wanted:
        return venv
    say(f"installing {peer.title} into {venv}")
    shutil.rmtree(venv, ignore_errors=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(venv / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check"]
    _carry_out([sys.executable, "-m", "venv", str(venv)])
    if peer.requirements:
        _carry_out([*pip, *peer.requirements])
    if peer.alone:
        _carry_out([*pip, "--no-deps", *peer.alone])
    mark.write_text(wanted, encoding="utf-8")
    return venv


def _carry_out(command: list[str]) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        said = done.stdout.decode(errors="replace").strip().splitlines() or ["nothing was said"]
        errors = [line for line in said if line.startswith("ERROR:")]
        raise PeerMissing(
            f"it cannot be installed: {(errors or said)[-1]}", "\n".join(said)[-3000:]
        )


class PeerServer(Started):
    """A running peer that has one workload."""

    def __init__(self, peer: Peer, workload: Workload, place: Place) -> None:
        setup = peer.setup(workload, place)
        for path, content in setup.files.items():
            file = place.home / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        for path, target in setup.links.items():
            if not target.exists():
                raise PeerMissing(f"its installation has no {target.relative_to(place.venv)}")
            link = place.home / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        self.url = f"http://127.0.0.1:{place.ports[0]}"
        self.request: Request = peer.request(workload)
        command = (str(place.venv / "bin/python"), "-m", "pip")  # for its version only
        version = installed_version(command, peer.distribution.replace("-", "_"))
        super().__init__(peer.title, version, place.home, setup.command, setup.env)

    def answers(self) -> bool:
        """It has the model, which is more than being up."""
        with contextlib.suppress(OSError, NoReply, BadReply):
            request = self.request
            reply = call(
                "POST", self.url + request.path, request.body, request.headers, timeout_s=5
            )
            return reply.status < 300
        return False


@contextlib.contextmanager
def running_peer(
    peer: Peer, venv: Path, workload: Workload, *, limit_s: float = PEER_START_LIMIT_S
) -> Iterator[PeerServer]:
    """The peer with the workload, answering it; stopped at the end.

    Raises:
        PeerMissing: it does not come up.
    """
    home = Path(tempfile.mkdtemp(prefix="mmsb-", dir="/tmp" if Path("/tmp").is_dir() else None))
    try:
        try:
            libraries = site_packages() if peer.borrows else ""
        except ModelsMissing as missing:
            raise PeerMissing(f"it imports torch: {missing}") from missing
        place = Place(
            venv=venv,
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            home=home,
            ports=tuple(free_ports(peer.ports)),
            libraries=libraries,
            path=os.environ.get("PATH", os.defpath),
        )
        try:
            server = PeerServer(peer, workload, place)
        except OSError as failed:
            raise PeerMissing(f"it cannot be started: {failed}") from failed
        try:
            try:
                server.wait_until_ready(limit_s)
            except ServerFailed as failed:
                output = server.output()
                told = str(failed).partition("\n")[0]
                raise PeerMissing(f"{told} {last_words(output)}", output[-3000:]) from failed
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home, ignore_errors=True)
