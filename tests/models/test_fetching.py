"""The fetcher as the front sees it: a real process, real archives, a real web server."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gzip
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest

import mmserve
from mmserve.errors import (
    BadRequest,
    ConfigurationError,
    DownloadFailed,
    InvalidModel,
    ServeError,
    SourceNotFound,
    StorageFailed,
)
from mmserve.models.fetching import Fetched
from mmserve.models.folder import stale
from mmserve.models.limits import DownloadLimits, Limits
from tests.models.workshop import (
    SERVICE,
    Shop,
    Web,
    below,
    manifest,
    model,
    open_shop,
    open_web,
    run,
    tar_of,
    write_tree,
    zip_of,
)


@pytest.fixture
def web() -> Iterator[Web]:
    with open_web() as web:
        yield web


async def said(shop: Shop, url: str, kind: type[ServeError], **asked: str) -> str:
    """What a fetch that must fail says. It leaves nothing."""
    before = shop.on_disk()
    with pytest.raises(kind) as caught:
        await shop.fetcher.fetch(url, **asked)
    assert type(caught.value) is kind
    assert shop.on_disk() == before
    return str(caught.value)


def exists(fetched: Fetched) -> bool:
    """Whether its files are there."""
    return Path(fetched.directory, "service.py").exists()


def fetcher_pid(parent: int | None = None) -> int:
    """The fetcher process below this one, found as anybody would find it."""
    pid = parent or os.getpid()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"mmserve.models.fetcher" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise AssertionError("no fetcher runs")


# From the model store


@pytest.mark.parametrize("data", [zip_of(model()), tar_of(model()), tar_of(model(), "w")])
def test_an_archive_is_unpacked_and_described(data: bytes, tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            fetched = await shop.fetcher.fetch(shop.add("m.mar", data))
            assert (fetched.name, fetched.handler, fetched.runtime) == (
                "m",
                "service:handle",
                "python",
            )
            assert json.loads(fetched.manifest_text) == json.loads(manifest())
            assert below(Path(fetched.directory))["service.py"] == SERVICE.encode()
            assert fetched.size_bytes == len(SERVICE) + len(manifest())
            assert fetched.top_names == ["service"]
            await fetched.lease.release()

    run(test)


def test_a_directory_is_used_in_place_and_never_removed(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            files = model() | {"lib/__init__.py": "", "data/x.txt": "", "code/extra.py": ""}
            tree = write_tree(shop.store / "zh", files)
            before = below(tree)
            fetched = await shop.fetcher.fetch("zh")
            assert fetched.directory == str(tree)
            assert fetched.digest is None
            assert fetched.top_names == ["lib", "service"]
            assert fetched.code_names == ["extra"]
            await fetched.lease.release(keep=False)
            assert below(tree) == before

    run(test)


@pytest.mark.parametrize("form", ["zip", "tar.gz", "directory"])
@pytest.mark.parametrize(
    "name", ["MAR-INF/MANIFEST.json", "MANIFEST.json"], ids=["manifest 1.0", "manifest 0.x"]
)
def test_one_wrapping_folder_is_looked_through(form: str, name: str, tmp_path: Path) -> None:
    text = manifest() if "MAR" in name else '{"Model": {"Model-Name": "m", "Service": "s.py"}}'
    files = {f"wrap/{name}": text, "wrap/service.py": SERVICE}

    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            if form == "directory":
                write_tree(shop.store / "m", files)
            else:
                shop.add("m", zip_of(files) if form == "zip" else tar_of(files))
            fetched = await shop.fetcher.fetch("m")
            assert fetched.name == "m"
            assert fetched.directory.endswith("/wrap")
            assert fetched.top_names == ["service"]
            await fetched.lease.release()

    run(test)


def test_a_legacy_archive_is_read(tmp_path: Path) -> None:
    legacy = {"Model": {"Model-Name": "old", "Service": "s.py"}, "Engine": {"MXNet": 0.11}}

    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            shop.add("old.model", zip_of({"MANIFEST.json": json.dumps(legacy), "s.py": ""}))
            fetched = await shop.fetcher.fetch("old.model")
            assert (fetched.name, fetched.handler) == ("old", "s.py")
            assert (fetched.version, fetched.engine) == ("snapshot", "MXNet")
            await fetched.lease.release()

    run(test)


def test_without_a_manifest_name_and_handler_come_from_elsewhere(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            bare = shop.add("bare.mar", zip_of({"service.py": SERVICE}))
            assert await said(shop, bare, InvalidModel) == "Model name is not defined."
            assert (
                await said(shop, bare, InvalidModel, model_name="b")
                == "Model handler is not defined."
            )
            fetched = await shop.fetcher.fetch(bare, model_name="b", handler="service:handle")
            assert (fetched.name, fetched.manifest_text) == ("b", "")
            await fetched.lease.release()
            fetched = await shop.fetcher.fetch(
                bare, default_name="bare", default_handler="service:handle"
            )
            assert (fetched.name, fetched.handler) == ("bare", "service:handle")
            await fetched.lease.release()
        async with open_shop(tmp_path, default_service_handler="d:d") as shop:
            assert (await shop.fetcher.fetch(bare, model_name="b")).handler == "d:d"

    run(test)


def test_what_is_wrong_is_told_as_multi_model_server_does(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            for url in ("missing.mar", "s3://b/k.mar", "file:///etc/passwd", "ftp://h/m.mar", "."):
                text = await said(shop, url, SourceNotFound)
                assert text == f"Model not found in model store: {url}"
            for url in ("../m.mar", "a..b"):
                text = await said(shop, url, SourceNotFound)
                assert text == f"Relative path is not allowed in url: {url}"
            text = await said(shop, "http://u:p@h:99999/m", SourceNotFound)
            assert text == "Invalid model url: http://h:99999/m"
            for url in ("http://", "http://h:0/m.mar"):
                text = await said(shop, url, DownloadFailed)
                assert text == f"Failed to download model from: {url}"
            assert await said(shop, "", BadRequest) == "Parameter url is required."
            await said(shop, "x" * 5000, SourceNotFound)
            await said(shop, "\udc80", BadRequest)
            bad = shop.add("bad.mar", zip_of({"MAR-INF/MANIFEST.json": "{"}))
            assert await said(shop, bad, InvalidModel) == "Failed to parse signature.json."
            huge = shop.add("huge.mar", zip_of({"MAR-INF/MANIFEST.json": " " * 2_000_000}))
            assert "larger than 1048576 bytes" in await said(shop, huge, InvalidModel)
        async with open_shop(tmp_path, model_store=None) as shop:
            text = await said(shop, "m.mar", SourceNotFound)
            assert text == "Model store has not been configured."

    run(test)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"<!doctype html><title>m</title>", "it is an HTML page"),
        (b"", "the file is empty"),
        (zip_of(model())[:150], "cut off"),
        (zip_of({"../up": "x"}), "out of the model's folder"),
    ],
)
def test_what_is_no_archive_is_refused_and_named(
    content: bytes, found: str, tmp_path: Path, web: Web
) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            web.pages["/m.mar"] = content
            for url in (shop.add("m.mar", content), f"{web.url}/m.mar"):
                text = await said(shop, url, InvalidModel, model_name="m", handler="s:h")
                assert text.startswith(f"{url}: ")
                assert found in text

    run(test)


def test_a_link_that_leaves_the_store_is_not_followed(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            (tmp_path / "secret.mar").write_bytes(zip_of(model()))
            write_tree(tmp_path / "secret", model())
            (shop.store / "a.mar").symlink_to("../secret.mar")
            (shop.store / "b").symlink_to("../secret")
            (shop.store / "loop").symlink_to("loop")
            for url in ("a.mar", "b", "loop"):
                assert "not found in model store" in await said(shop, url, SourceNotFound)
            shop.add("real.mar", zip_of(model()))
            (shop.store / "c.mar").symlink_to("real.mar")
            await (await shop.fetcher.fetch("c.mar")).lease.release()
            write_tree(shop.store / "d", {"service.py": ""})
            (shop.store / "d/MAR-INF").symlink_to("../../secret/MAR-INF")
            assert "leads out of the model store" in await said(shop, "d", InvalidModel)
        async with open_shop(tmp_path, model_store="/") as shop:
            for url in (f"{tmp_path}/store/a.mar", f"{tmp_path}/store/b"):
                await (await shop.fetcher.fetch(url)).lease.release()

    run(test)


def test_a_pipe_in_the_store_is_no_model(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            os.mkfifo(shop.store / "pipe")
            assert "neither a file nor" in await said(shop, "pipe", SourceNotFound)
            write_tree(shop.store / "d", model())
            os.mkfifo(shop.store / "d" / "pipe.py")  # which nobody will ever write to
            assert (await shop.fetcher.fetch("d")).names_libraries

    run(test)


# The cache


def test_the_same_archive_under_two_names_is_unpacked_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            url = shop.add("m.mar", zip_of(model()))
            shop.add("copy.mar", zip_of(model()))
            first = await shop.fetcher.fetch(url, model_name="a")
            again = await asyncio.gather(
                *(shop.fetcher.fetch(each) for each in (url, "copy.mar", url))
            )
            assert {fetched.directory for fetched in again} == {first.directory}
            for fetched in again:
                await fetched.lease.release(keep=False)
            assert exists(first)
            await first.lease.release(keep=False)
            await first.lease.released()
            assert not exists(first)

    run(test)


def test_a_large_archive_is_known_by_its_digest_in_the_end(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path, options={"idle_s": 60.0}) as shop:
            weights = {"weights.bin": random.Random(0).randbytes(17 << 20)}
            data = zip_of(model() | weights, zipfile.ZIP_STORED)
            first = await shop.fetcher.fetch(shop.add("m.mar", data))
            assert first.digest is None
            await until(lambda: any("/sha256-" in name for name in shop.on_disk()))
            again = await shop.fetcher.fetch(shop.add("copy.mar", data))
            assert again.directory == first.directory
            assert again.digest is not None

    run(test)


def test_an_archive_that_was_released_is_not_unpacked_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path, options={"idle_s": 0.0}) as shop:
            url = shop.add("m.mar", zip_of(model()))
            first = await shop.fetcher.fetch(url)
            await first.lease.release()
            again = await shop.fetcher.fetch(url)  # by another process
            assert again.directory == first.directory
            shop.add("m.mar", zip_of(model(handler="other")))
            changed = await shop.fetcher.fetch(url)
            assert changed.directory != first.directory
            assert exists(first)

    run(test)


def test_an_archive_whose_modules_are_compiled_anew_is_not_unpacked_again(tmp_path: Path) -> None:
    compiled = f"__pycache__/service.{sys.implementation.cache_tag}.pyc"

    def compiled_anew(directory: str) -> bytes:
        worker = [sys.executable, "-c", "import service"]
        subprocess.run(worker, cwd=directory, env={}, check=True)
        return Path(directory, compiled).read_bytes()

    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            url = shop.add("m.mar", zip_of(model() | {compiled: "of another source"}))
            first = await shop.fetcher.fetch(url)
            assert compiled_anew(first.directory) != b"of another source"
            await first.lease.release()
            again = await shop.fetcher.fetch(url)
            assert again.directory == first.directory

    run(test)


def test_a_failure_leaves_no_file_and_a_stop_leaves_no_folder(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            url = shop.add("m.mar", zip_of(model()))
            before = shop.on_disk()
            fetched = await shop.fetcher.fetch(url)
            await fetched.lease.release(keep=False)
            assert shop.on_disk() == before
            await shop.fetcher.fetch(url)
        assert list((tmp_path / "temp").iterdir()) == []

    run(test)


def test_a_given_cache_outlives_the_server(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")

    async def test() -> None:
        async with open_shop(tmp_path, archive_cache_dir=cache) as shop:
            url = shop.add("m.mar", zip_of(model()))
            first = await shop.fetcher.fetch(url)
            await first.lease.release()
            async with open_shop(tmp_path, archive_cache_dir=cache) as other:
                same = await other.fetcher.fetch(url)
                assert same.directory == first.directory
        async with open_shop(tmp_path, archive_cache_dir=cache) as shop:
            again = await shop.fetcher.fetch(url)
            assert again.directory == first.directory
            assert len(list((tmp_path / "cache/users").iterdir())) == 1
        assert list((tmp_path / "cache/users").iterdir()) == []
        assert exists(first)

    run(test)


OWNER = """
import asyncio, sys
from mmserve.config.settings import Settings
from mmserve.models.fetching import open_fetcher

async def main():
    settings = Settings(model_store=sys.argv[1])
    async with open_fetcher(settings, sys.argv[2], idle_s=60) as fetcher:
        print((await fetcher.fetch("m.mar")).directory, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


def start_owner(store: Path, temp: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A process that fetches m.mar and waits, and the directory it got."""
    command = [sys.executable, "-c", OWNER, str(store), str(temp)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().decode().strip())


def test_a_start_clears_what_a_killed_server_left_but_nothing_else(tmp_path: Path) -> None:
    store, temp = tmp_path / "store", tmp_path / "temp"
    store.mkdir()
    (store / "m.mar").write_bytes(zip_of(model()))
    killed, left = start_owner(store, temp)
    alive, kept = start_owner(store, temp)
    with killed, alive:
        its_fetcher = os.pidfd_open(fetcher_pid(killed.pid))
        killed.kill()
        wait_for_end(its_fetcher)  # it ends by itself
        assert left.exists()

        async def test() -> None:
            # The kernel lets a killed process's locks go a moment after its files.
            await until(lambda: left.parents[2] in stale(temp))
            async with open_shop(tmp_path):
                assert (left.exists(), kept.exists()) == (False, True)

        run(test)
    assert list(temp.iterdir()) == []


def wait_for_end(pidfd: int) -> None:
    ready, _, _ = select.select([pidfd], [], [], 30)
    os.close(pidfd)
    assert ready, "the process still runs"


# Downloads


def test_a_download_is_unpacked_and_its_file_removed(tmp_path: Path, web: Web) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            web.pages["/a dir/m.mar"] = web.pages["/n.mar"] = zip_of(model())
            web.pages["/a%20dir/m.mar"] = zip_of(model())
            first = await shop.fetcher.fetch(f"{web.url}/a dir/m.mar?x=1")
            second = await shop.fetcher.fetch(f"{web.url.replace('http', 'HTTP')}/n.mar")
            assert first.directory == second.directory
            assert first.digest == second.digest is not None
            await first.lease.release()
            await second.lease.release(keep=False)
            assert not any("download" in name for name in shop.on_disk())

    run(test)


def test_what_the_other_end_does_wrong_is_a_failed_download(tmp_path: Path, web: Web) -> None:
    def cut_off(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 10)

    def nonsense(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"hello\r\n\r\n")

    def bad_chunk(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc")

    web.pages.update({"/cut": cut_off, "/nonsense": nonsense, "/chunk": bad_chunk})

    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            for path, tail in (
                ("/absent", ", code: 404"),
                ("/cut", " (it was cut off after 10 of 1000 bytes)"),
                ("/nonsense", " (BadStatusLine)"),
                ("/chunk", " (it was cut off)"),
            ):
                text = await said(shop, web.url + path, DownloadFailed)
                assert text == f"Failed to download model from: {web.url}{path}{tail}"
            text = await said(shop, "http://127.0.0.1:1/m.mar", DownloadFailed)
            assert text == (
                "Failed to download model from: http://127.0.0.1:1/m.mar (Connection refused)"
            )

    run(test)


def test_credentials_are_used_and_never_told(tmp_path: Path, web: Web) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            web.pages["/m.mar"] = zip_of(model())
            url = web.url.replace("//", "//user:secret@")
            text = await said(shop, f"{url}/absent?token=secret", DownloadFailed)
            assert "secret" not in text
            await (await shop.fetcher.fetch(f"{url}/m.mar")).lease.release()
            assert web.headers[-1]["Authorization"] == "Basic dXNlcjpzZWNyZXQ="

    run(test)


def test_redirects_are_followed_and_each_is_checked(tmp_path: Path, web: Web) -> None:
    with open_web() as other:
        other.pages["/m.mar"] = web.pages["/m.mar"] = zip_of(model())
        web.redirect("/near", "/m.mar")
        web.redirect("/far", f"{other.url}/m.mar")
        web.redirect("/file", "file:///etc/passwd")
        web.redirect("/told", f"{other.url.replace('//', '//u:hush@')}/hush?x=hush#hush")
        web.redirect("/bad", "http://h:0/")
        web.redirect("/loop", "/loop")
        rules = f"{web.url}/.*".replace(".", r"\.", 3)

        async def test() -> None:
            async with open_shop(tmp_path) as shop:
                for path in ("/near", "/far"):
                    await (await shop.fetcher.fetch(web.url + path)).lease.release()
                text = await said(shop, f"{web.url}/file", DownloadFailed)
                assert "whose scheme is not allowed" in text
                assert "malformed" in await said(shop, f"{web.url}/bad", DownloadFailed)
                assert "redirects" in await said(shop, f"{web.url}/loop", DownloadFailed)
                with_login = web.url.replace("//", "//u:p@")
                await (await shop.fetcher.fetch(f"{with_login}/far")).lease.release()
                assert "Authorization" not in other.headers[-1]
            async with open_shop(tmp_path, allowed_urls=rules) as shop:
                await (await shop.fetcher.fetch(f"{web.url}/near")).lease.release()
                before = len(other.requests)
                text = await said(shop, f"{web.url}/far", DownloadFailed)
                assert "allowed_urls does not allow" in text
                text = await said(shop, f"{web.url}/told", DownloadFailed)
                assert f"it redirects to {other.url}/…," in text
                assert "hush" not in text
                text = await said(shop, f"{other.url}/m.mar", SourceNotFound)
                assert "allowed_urls does not allow" in text
                assert len(other.requests) == before
            async with open_shop(tmp_path, allowed_url_schemes="https") as shop:
                text = await said(shop, f"{web.url}/m.mar", SourceNotFound)
                assert text == f"Model not found in model store: {web.url}/m.mar"

        run(test)


class Dripping:
    """A page that sends a byte now and then and never ends, until the client has gone."""

    def __init__(self, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n") -> None:
        self.head = head
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        try:
            handler.wfile.write(self.head)
            while not self.ended.wait(0.02):
                handler.wfile.write(b"x")
                self.started.set()
        except OSError:
            self.ended.set()


def test_a_download_that_never_ends_is_ended(tmp_path: Path, web: Web) -> None:
    async def test() -> None:
        limits = DownloadLimits(total_s=0.3)
        async with open_shop(tmp_path, options={"download_limits": limits}) as shop:
            body, head = Dripping(), Dripping(b"HTTP/1.1 200 OK\r\nX: ")
            web.pages.update({"/body": body, "/head": head})
            for path, page in (("/body", body), ("/head", head)):
                text = await said(shop, web.url + path, DownloadFailed)
                assert text.endswith(" (it took more than 0.3 s)")
                if page.started.is_set():
                    assert await asyncio.to_thread(page.ended.wait, 30)

    run(test)


def test_a_silent_server_is_given_up(tmp_path: Path, web: Web) -> None:
    release = threading.Event()

    def silent(_: BaseHTTPRequestHandler) -> None:
        release.wait(30)

    web.pages["/m.mar"] = silent

    async def test() -> None:
        limits = DownloadLimits(silence_s=0.2)
        async with open_shop(tmp_path, options={"download_limits": limits}) as shop:
            text = await said(shop, f"{web.url}/m.mar", DownloadFailed)
            assert "timed out" in text

    try:
        run(test)
    finally:
        release.set()


def test_a_download_that_is_too_large_is_refused(tmp_path: Path, web: Web) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                handler.wfile.write(b"x" * 10_000)

    def declared(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(10 << 40))
        handler.end_headers()

    web.pages.update({"/endless": endless, "/declared": declared})

    async def test() -> None:
        limits = DownloadLimits(max_bytes=100_000)
        async with open_shop(tmp_path, options={"download_limits": limits}) as shop:
            for path in ("/endless", "/declared"):
                text = await said(shop, web.url + path, DownloadFailed)
                assert text.endswith(" (it is larger than 100000 bytes)")
        limits = DownloadLimits(max_bytes=1 << 60)
        async with open_shop(tmp_path, options={"download_limits": limits}) as shop:
            text = await said(shop, f"{web.url}/declared", StorageFailed)
            assert "(ENOSPC, errno 28)" in text

    run(test)


def test_a_hanging_download_holds_up_nobody(tmp_path: Path, web: Web) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            url = shop.add("m.mar", zip_of(model()))
            before = shop.on_disk()
            pages = [Dripping() for _ in range(3)]
            for number, page in enumerate(pages):
                web.pages[f"/{number}"] = page
            hanging = [
                asyncio.create_task(shop.fetcher.fetch(f"{web.url}/{number}"))
                for number in range(3)
            ]
            for page in pages:
                assert await asyncio.to_thread(page.started.wait, 30)
            fetched = await shop.fetcher.fetch(url)
            await fetched.lease.release(keep=False)
            for task, page in zip(hanging, pages, strict=True):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                assert await asyncio.to_thread(page.ended.wait, 30)
            await until(lambda: shop.on_disk() == before)

    run(test)


async def until(question: Callable[[], bool]) -> None:
    """Returns once the answer is yes: files appear and go without telling anybody."""
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(question):  # noqa: ASYNC110 - nothing to wait for
            await asyncio.sleep(0.01)


def test_whoever_gives_up_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            data = random.Random(0).randbytes(3_000_000)
            url = shop.add("m.mar", zip_of(model() | {"weights.bin": data}))
            before = shop.on_disk()
            for turns in range(12):
                task = asyncio.create_task(shop.fetcher.fetch(url))
                for _ in range(turns):
                    await asyncio.sleep(0.002)
                if not task.cancel():
                    await (await task).lease.release(keep=False)
                    continue
                with contextlib.suppress(asyncio.CancelledError):
                    await (await task).lease.release(keep=False)
            await until(lambda: shop.on_disk() == before)

    run(test)


# Elsewhere


def test_a_file_url_is_followed_where_the_owner_allows_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path, allowed_url_schemes="http,file") as shop:
            (tmp_path / "m.mar").write_bytes(zip_of(model()))
            fetched = await shop.fetcher.fetch(f"file://{tmp_path}/m.mar")
            assert fetched.name == "m"
            await said(shop, "file:///nowhere", SourceNotFound)
        async with open_shop(tmp_path, allowed_url_schemes="ftp") as shop:
            assert "no way to fetch" in await said(shop, "ftp://h/m.mar", SourceNotFound)

    run(test)


def test_an_s3_object_is_fetched_where_the_owner_allows_it(
    tmp_path: Path, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3")
    for name, value in {
        "AWS_ENDPOINT_URL": web.url,
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "eu-north-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
    }.items():
        monkeypatch.setenv(name, value)
    web.pages["/bucket/dir/m.mar"] = zip_of(model())

    def absent(handler: BaseHTTPRequestHandler) -> None:
        body = b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>"
        handler.send_response(404)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    web.pages["/bucket/absent"] = absent

    async def test() -> None:
        async with open_shop(tmp_path, allowed_url_schemes="http,https,s3") as shop:
            fetched = await shop.fetcher.fetch("s3://bucket/dir/m.mar")
            assert (fetched.name, fetched.top_names) == ("m", ["service"])
            text = await said(shop, "s3://bucket/absent", DownloadFailed)
            assert text.startswith("Failed to download model from: s3://bucket/absent, code: 404")
            await said(shop, "s3://bucket", SourceNotFound)

    run(test)


# What start-up wants to know


def test_the_store_is_listed_for_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            shop.add("b.mar", b"")
            shop.add("notes.txt", b"")
            (shop.store / "a").mkdir()
            assert await shop.fetcher.startup_models("all") == [(None, "a"), (None, "b.mar")]
            assert await shop.fetcher.startup_models("x=b.mar") == [("x", "b.mar")]
            assert not caplog.records
            missing = str(tmp_path / "missing")
            assert await shop.fetcher.startup_models("ALL", missing) == []
            assert await shop.fetcher.startup_models("ALL", None) == []
            assert "No such file or directory" in caplog.records[0].message
            assert "no model_store" in caplog.records[1].message

    run(test)


def test_libraries_named_in_the_sources_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = {"plain_handler.py": SERVICE, "torch_handler.py": "import torch"}
    write_tree(tmp_path / "elsewhere", elsewhere | {"package/__init__.py": ""})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "elsewhere"))
    uses = {"service.py": "from sub import x", "sub/x.py": "import torch"}

    async def test() -> None:
        async with open_shop(tmp_path, preload_imports="torch,numpy.linalg") as shop:
            write_tree(shop.store / "plain", {"service.py": SERVICE, "code/other.py": ""})
            write_tree(shop.store / "uses", uses)
            for directory, handler, expected in (
                ("plain", "service:handle", False),
                ("plain", "other:handle", False),
                ("uses", "service:handle", True),
                ("plain", "plain_handler:handle", False),
                ("plain", "torch_handler:handle", True),
                ("plain", "package.part:handle", True),
                ("plain", "nowhere:handle", False),
                ("plain", f"{tmp_path}/elsewhere/plain_handler.py:handle", False),
                ("plain", f"{tmp_path}/elsewhere/torch_handler.py:handle", True),
            ):
                fetched = await shop.fetcher.fetch(directory, model_name="m", handler=handler)
                assert fetched.names_libraries is expected, handler

    run(test)


def test_the_handlers_own_folder_is_on_its_path(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            write_tree(shop.store / "m", {"a.py": "", "src/service.py": "", "src/tqdm.py": ""})
            fetched = await shop.fetcher.fetch("m", model_name="m", handler="src/service.py:f")
            assert fetched.top_names == ["a", "service", "tqdm"]

    run(test)


# Trouble of our own


def test_a_fetcher_that_is_killed_is_replaced(tmp_path: Path, web: Web) -> None:
    async def test() -> None:
        async with open_shop(tmp_path, options={"idle_s": 60.0}) as shop:
            url = shop.add("m.mar", zip_of(model()))
            kept = await shop.fetcher.fetch(url)
            page = Dripping()
            web.pages["/m.mar"] = page
            task = asyncio.create_task(shop.fetcher.fetch(f"{web.url}/m.mar"))
            assert await asyncio.to_thread(page.started.wait, 30)
            page.started.clear()
            web.pages["/m.mar"] = zip_of(model("n"))
            os.kill(fetcher_pid(), signal.SIGKILL)
            assert (await task).name == "n"  # tried again
            assert exists(kept)
            await kept.lease.release(keep=False)
            assert not exists(kept)

    run(test)


@pytest.mark.skipif(sys.platform != "linux", reason="takes the fetcher's socket by pidfd_getfd")
@pytest.mark.parametrize("nonsense", [b"\xff" * 8, b"\0\0\0\x01\xc1"])
def test_a_fetcher_that_talks_nonsense_is_replaced(tmp_path: Path, nonsense: bytes) -> None:
    def say(pid: int) -> None:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        process = os.pidfd_open(pid)
        fd = ctypes.CDLL(None, use_errno=True).syscall(438, process, int(words[-2]), 0)
        os.close(process)
        if fd < 0:
            pytest.skip("this system does not let us take the fetcher's socket")
        with socket.socket(fileno=fd) as sock:
            sock.sendall(nonsense)

    async def test() -> None:
        async with open_shop(tmp_path, options={"idle_s": 60.0}) as shop:
            first = await shop.fetcher.fetch(shop.add("m.mar", zip_of(model())))
            pid = fetcher_pid()
            say(pid)
            again = await shop.fetcher.fetch("m.mar")
            assert again.directory == first.directory
            assert fetcher_pid() != pid

    run(test, limit_s=15)


def test_an_archive_that_kills_the_fetcher_twice_is_a_storage_failure(
    tmp_path: Path, web: Web
) -> None:
    def kill(handler: BaseHTTPRequestHandler) -> None:
        os.kill(fetcher_pid(), signal.SIGKILL)
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")

    async def test() -> None:
        async with open_shop(tmp_path) as shop:
            web.pages["/m.mar"] = kill
            with pytest.raises(StorageFailed, match="ended before it was done"):
                await shop.fetcher.fetch(f"{web.url}/m.mar")
            assert len(web.requests) == 2
            await (await shop.fetcher.fetch(shop.add("m.mar", zip_of(model())))).lease.release()

    run(test)


def test_a_temporary_folder_that_cannot_be_made_spares_directories(tmp_path: Path) -> None:
    async def test() -> None:
        blocked = tmp_path / "file"
        blocked.write_text("in the way")
        async with open_shop(tmp_path, temp=blocked / "temp") as shop:
            url = shop.add("m.mar", zip_of(model()))
            write_tree(shop.store / "m", model())
            with pytest.raises(StorageFailed, match=r"file/temp: Not a directory \(ENOTDIR, errno"):
                await shop.fetcher.fetch(url)
            await (await shop.fetcher.fetch("m")).lease.release()
            blocked.unlink()
            await (await shop.fetcher.fetch(url)).lease.release()

    run(test)


def test_settings_that_cannot_work_are_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def test() -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"allowed_urls": "["}, "allowed_urls: '\\['"),
            ({"archive_cache_dir": str(tmp_path / "file/x")}, "archive_cache_dir: Failed to"),
        ]
        for settings, text in cases:
            with pytest.raises(ConfigurationError, match=text):
                async with open_shop(tmp_path, **settings):
                    pass

    run(test)


def test_limits_reach_the_fetcher(tmp_path: Path) -> None:
    async def test() -> None:
        limits = Limits(free_bytes=1 << 20)
        async with open_shop(tmp_path, options={"limits": limits}) as shop:
            bomb = shop.add("m.mar", zip_of(model() | {"z": bytes(8 << 20)}))
            assert "would unpack to more than" in await said(shop, bomb, InvalidModel)
            packed = shop.add("m.tgz", gzip.compress(bytes(8 << 20)))
            await said(shop, packed, InvalidModel)

    run(test)


def test_no_process_and_no_descriptor_is_left(tmp_path: Path) -> None:
    async def test() -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))  # noqa: ASYNC240 - not a disk
        for _ in range(3):
            async with open_shop(tmp_path, options={"idle_s": 60.0}) as shop:
                await shop.fetcher.fetch(shop.add("m.mar", zip_of(model())))
                pid = fetcher_pid()
            assert not Path(f"/proc/{pid}").exists()  # noqa: ASYNC240 - not a disk
        assert len(list(Path("/proc/self/fd").iterdir())) <= before  # noqa: ASYNC240 - as above

    run(test)


def test_the_fetcher_is_nice_and_bounded(tmp_path: Path) -> None:
    async def test() -> None:
        async with open_shop(tmp_path, options={"idle_s": 60.0}) as shop:
            await shop.fetcher.fetch(shop.add("m.mar", zip_of(model())))
            pid = fetcher_pid()
            assert os.getpriority(os.PRIO_PROCESS, pid) >= 5
            limits = Path(f"/proc/{pid}/limits").read_text()  # noqa: ASYNC240 - not a disk
            rows = {line[:26].strip(): line[26:].split() for line in limits.splitlines()}
            assert rows["Max core file size"][0] == "0"
            assert rows["Max address space"][0] != "unlimited"
            os.kill(pid, signal.SIGTERM)  # of a supervisor, to the whole group
            await shop.fetcher.fetch("m.mar")
            assert fetcher_pid() == pid

    run(test)


def test_a_front_needs_no_heavy_module_to_ask() -> None:
    code = "import sys, mmserve.models.fetching as f; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"zipfile", "tarfile", "http.client", "isal", "boto3"} & set(loaded)


def test_a_fetcher_starts_where_the_server_is_installed_for_one_user(tmp_path: Path) -> None:
    python = getattr(sys, "_base_executable", sys.executable)  # a venv has no user's packages
    environ = {"HOME": str(tmp_path)}

    def ask(*words: str) -> str:
        command = [python, *words]
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    if ask("-c", "import site; print(site.ENABLE_USER_SITE)") != "True":
        pytest.skip("this Python has no packages of the user's own")
    site = Path(ask("-c", "import site; print(site.getusersitepackages())"))
    for package in (mmserve, msgspec):
        source = Path(package.__file__ or "").parent
        shutil.copytree(source, site / source.name)
    store = write_tree(tmp_path / "store", {"m.mar": zip_of(model("mine"))})
    code = (
        "import asyncio\n"
        "from mmserve.config.settings import Settings\n"
        "from mmserve.models.fetching import open_fetcher\n"
        "async def main():\n"
        f"    settings = Settings(model_store={str(store)!r})\n"
        f"    async with open_fetcher(settings, {str(tmp_path)!r}) as fetcher:\n"
        "        print((await fetcher.fetch('m.mar')).name)\n"
        "asyncio.run(main())\n"
    )
    assert ask("-c", code) == "mine"
