"""A small server with the command line and the routes of Multi Model Server; loads nothing.

It leaves a process in a session of its own that ignores SIGTERM. `GET` says what the server was
started with. `POST /models` and `PUT` start one more worker, a process that does nothing; who
answers a prediction is one of them, in turn; `DELETE` ends them all.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

IGNORES_SIGTERM = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", IGNORES_SIGTERM], start_new_session=True)

flags = dict(itertools.pairwise(sys.argv[1:]))
with open(flags["--mms-config"]) as config:
    settings = dict(line.split("=", 1) for line in config.read().split())
workers: list[subprocess.Popen[bytes]] = []
turns = itertools.count()
told = {
    "child": child.pid,
    "store": flags["--model-store"],
    "settings": settings,
    "env": dict(os.environ),
    "cwd": str(Path.cwd()),
    "argv": sys.argv[1:],
}


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status = {"/broken": 500, "/ping": int(os.environ.get("STAND_IN_PING", 200))}
        self._answer(status.get(self.path, 200), told)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.startswith("/predictions/"):
            self._answer(200, {"pid": workers[next(turns) % len(workers)].pid})
            return
        if self.path.startswith("/models") and "STAND_IN_PING" in os.environ:
            time.sleep(0.3)  # a load that pings may fall into
        workers.append(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]))
        self._answer(200, {"status": "done"})

    do_PUT = do_POST  # noqa: N815 - the base class calls it by this name

    def do_DELETE(self) -> None:
        while workers:
            worker = workers.pop()
            worker.kill()
            worker.wait()
        self._answer(200, {"status": "done"})

    def _answer(self, status: int, body: object) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    wbufsize = -1  # head and body in one packet

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


for key in ("inference_address", "management_address"):
    port = int(settings[key].rpartition(":")[2])
    served = Server(("127.0.0.1", port), Answers)
    threading.Thread(target=served.serve_forever).start()
