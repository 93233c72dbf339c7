"""What the tests of this room share: archives, a web server, a fetcher in a temporary folder."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mmserve.config.settings import Settings
from mmserve.models.fetching import Fetcher, open_fetcher

Files = Mapping[str, str | bytes]
SERVICE = "def handle(data, context):\n    return ['ok']\n"


def manifest(name: str = "m", handler: str = "service:handle") -> str:
    fields = {"runtime": "python", "model": {"modelName": name, "handler": handler}}
    return json.dumps(fields)


def model(name: str = "m", handler: str = "service:handle") -> dict[str, str | bytes]:
    """Files of a small, sound model."""
    return {"MAR-INF/MANIFEST.json": manifest(name, handler), "service.py": SERVICE}


def as_bytes(content: str | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.encode()


def zip_of(files: Files, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip with exactly these names, checked by nobody."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            info = zipfile.ZipInfo("x")
            info.filename, info.compress_type = name, method
            info.external_attr = 0o644 << 16
            archive.writestr(info, as_bytes(content))
    return buffer.getvalue()


def tar_of(files: Files, mode: str = "w:gz", *more: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload] # any
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(as_bytes(content))
            archive.addfile(info, io.BytesIO(as_bytes(content)))
        for info in more:
            archive.addfile(info)
    return buffer.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def write_tree(path: Path, files: Files) -> Path:
    for name, content in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(as_bytes(content))
    return path


def below(path: Path) -> dict[str, bytes]:
    """Every file below a folder, by its relative name."""
    return {
        entry.relative_to(path).as_posix(): entry.read_bytes()
        for entry in sorted(path.rglob("*"))
        if entry.is_file()
    }


class Shop:
    """A fetcher, its model store and its temporary folder."""

    def __init__(self, fetcher: Fetcher, store: Path, temp: Path) -> None:
        self.fetcher, self.store, self.temp = fetcher, store, temp

    def add(self, name: str, content: bytes) -> str:
        (self.store / name).write_bytes(content)
        return name

    def on_disk(self) -> set[str]:
        """Everything below the temporary folder."""
        return {path.relative_to(self.temp).as_posix() for path in self.temp.rglob("*")}


@contextlib.asynccontextmanager
async def open_shop(
    place: Path, *, temp: Path | None = None, options: Mapping[str, Any] | None = None, **more: Any
) -> AsyncIterator[Shop]:
    """Keyword arguments are settings; `options` go to `open_fetcher`."""
    store, temp = place / "store", temp or place / "temp"
    store.mkdir(exist_ok=True)
    settings = Settings(**{"model_store": str(store)} | more)
    async with open_fetcher(settings, temp, **options or {}) as fetcher:
        yield Shop(fetcher, store, temp)


def run(test: Callable[[], Coroutine[Any, Any, None]], *, limit_s: float = 60) -> None:
    """Runs a test's coroutine."""

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            await test()

    asyncio.run(limited())


Answer = Callable[[BaseHTTPRequestHandler], None]


class Web:
    """A loopback web server. `pages[path]` is a body, or a function that answers."""

    def __init__(self) -> None:
        self.pages: dict[str, bytes | Answer] = {}
        self.requests: list[str] = []
        self.headers: list[Mapping[str, str]] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.requests.append(self.path)
                web.headers.append(dict(self.headers))
                page = web.pages.get(self.path.partition("?")[0])
                if callable(page):
                    page(self)
                    return
                self.send_response(200 if page is not None else 404)
                self.send_header("Content-Length", str(len(page or b"")))
                self.end_headers()
                self.wfile.write(page or b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def redirect(self, path: str, to: str) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(302)
            handler.send_header("Location", to)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        self.pages[path] = answer


@contextlib.contextmanager
def open_web() -> Iterator[Web]:
    web = Web()
    thread = threading.Thread(target=web.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield web
    finally:
        web.server.shutdown()
        thread.join()
        web.server.server_close()
