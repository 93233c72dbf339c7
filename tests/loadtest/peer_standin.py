"""A small server of its own kind: the model answers `POST /ask`, at the port that is given."""

from __future__ import annotations

import http.server
import sys

from bench_model import load  # type: ignore[import-not-found]  # written beside it

model = load("")
served = 0


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_POST(self) -> None:
        global served
        served += 1
        body = self.rfile.read(int(self.headers["content-length"]))
        good = self.path == "/ask" and served <= int(sys.argv[2])
        reply = model([body])[0].encode() if good else b"no"
        self.send_response(200 if good else 500)
        self.send_header("content-length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128


if not int(sys.argv[2]):
    raise RuntimeError("it does not want to")
Server(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
