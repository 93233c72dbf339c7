"""A front that serves nothing, for tests of the launcher: `standin.py BEHAVIOUR WORDS…`.

It has the front's command line, pid file and ready word. Behaviours: `ready` says it is, then waits
for SIGTERM and ends with 0; `slow` never is; `stubborn` ignores SIGTERM; `fails` ends with 3;
`crashes` ends by SIGKILL; `echo` prints what it was given and ends with 7; `chatty` prints much and
ends with 7.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from mmserve.config import launch


def main(behaviour: str) -> int:
    words = sys.argv[sys.argv.index(launch.SERVER_WORD) :]
    arguments = launch.parse_arguments(words)
    if behaviour == "fails":
        return 3
    if behaviour == "crashes":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "chatty":
        print(*(f"line {number}" for number in range(4000)), sep="\n")
        return 7
    if behaviour == "echo":
        with open(f"/proc/{os.getppid()}/cmdline") as file:
            parent = file.read()
        given = {name: getattr(arguments, name) for name in arguments.__slots__}
        print(json.dumps({"given": given, "pid": os.getpid(), "parent": parent}))
        return 7
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    if behaviour in ("ready", "stubborn"):
        launch.announce_ready(arguments.ready_fd)
    print("started", os.getpid(), flush=True)
    while signal.sigwait(stops) and behaviour == "stubborn":
        pass
    launch.remove_own_pid_file(os.environ)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
