"""Sockets: binding, letting in, draining."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from mmserve.config.addresses import Address
from mmserve.errors import ConfigurationError
from mmserve.frontend.edge import Limits
from mmserve.frontend.http import Exchange, Response
from mmserve.frontend.listener import Listener, install_exception_handler, peer_text

if TYPE_CHECKING:
    from conftest import House, Inbox

GET = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


def show_peer(exchange: Exchange) -> None:
    exchange.reply(Response(200, exchange.request.peer.encode()))


def unix(path: Path) -> Address:
    return Address("unix", path=str(path))


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a socket: short, whatever TMPDIR is."""
    folder = Path(os.path.relpath(tmp_path_factory.mktemp("s")))
    yield folder / "s"


# Binding


def test_port_0_is_any_and_the_listener_says_which(house: House, kit: ModuleType) -> None:
    first, second = house.open(show_peer), house.open(show_peer)
    assert first.port != second.port
    for listener in (first, second):
        with kit.Client(listener) as client:
            host, port = client.socket.getsockname()
            assert client.ask(GET).body.decode() == f"{host}:{port}"


def test_a_taken_port_is_an_error_that_names_key_and_address(house: House) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError) as caught:
            house.open(
                show_peer, address=Address("http", "127.0.0.1", port), key="management_address"
            )
    message = str(caught.value)
    assert message.startswith(f"management_address: cannot listen on 127.0.0.1:{port}: ")
    assert "in use" in message
    assert f"errno {errno.EADDRINUSE}" in message
    advice = "; stop what listens there, or give management_address another port"
    assert message.endswith(advice)


@pytest.mark.parametrize(
    "address",
    [Address("http", "192.0.2.1", 0), Address("http", "name.invalid", 8080)],
    ids=["not ours", "unknown name"],
)
def test_an_address_that_is_not_ours_is_an_error(house: House, address: Address) -> None:
    with pytest.raises(ConfigurationError, match=r"^inference_address: cannot listen on \S+: \w"):
        house.open(show_peer, address=address)


@needs_ipv6
@pytest.mark.parametrize("host", ["::", "::1"])
def test_ipv6_can_be_bound(house: House, kit: ModuleType, host: str) -> None:
    listener = house.open(show_peer, address=Address("http", host, 0))
    with kit.Client(socket.create_connection(("::1", listener.port))) as client:
        port = client.socket.getsockname()[1]
        assert client.ask(GET).body.decode() == f"[::1]:{port}"


@needs_ipv6
def test_the_ipv6_wildcard_takes_ipv4_clients_too(house: House, kit: ModuleType) -> None:
    listener = house.open(show_peer, address=Address("http", "::", 0))
    with kit.Client(listener.port) as client:
        port = client.socket.getsockname()[1]
        assert client.ask(GET).body.decode() == f"127.0.0.1:{port}"


def test_a_name_is_bound_on_all_its_addresses(house: House, kit: ModuleType) -> None:
    listener = house.open(show_peer, address=Address("http", "localhost", 0))
    with kit.Client(listener) as client:
        assert client.ask(GET).status == 200


# Unix sockets


def test_a_unix_socket_serves_its_group_and_goes_with_the_listener(
    house: House, kit: ModuleType, path: Path
) -> None:
    listener = house.open(show_peer, address=unix(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with kit.Client(listener) as client:
        assert client.ask(GET).body == b"0.0.0.0"
    assert listener.port == 0
    house.run(listener.drain(time.monotonic()))
    assert not path.exists()


def test_a_stale_socket_is_replaced(house: House, kit: ModuleType, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with kit.Client(house.open(show_peer, address=unix(path))) as client:
        assert client.ask(GET).status == 200


def test_a_regular_file_is_kept(house: House, path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match=r"inference_address: .* no socket; remove it"):
        house.open(show_peer, address=unix(path))
    assert path.read_text() == "precious"


def test_a_live_listener_is_left_alone(house: House, kit: ModuleType, path: Path) -> None:
    listener = house.open(show_peer, address=unix(path))
    with pytest.raises(ConfigurationError, match="another process listens"):
        house.open(show_peer, address=unix(path))
    with kit.Client(listener) as client:
        assert client.ask(GET).status == 200


def test_a_listener_whose_queue_is_full_is_alive_too(house: House, path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy, socket.socket(socket.AF_UNIX) as waiting:
        busy.bind(str(path))
        busy.listen(0)
        waiting.connect(str(path))
        with pytest.raises(ConfigurationError, match="another process listens"):
            house.open(show_peer, address=unix(path))
    assert path.exists()


def test_the_socket_of_a_successor_is_not_removed(house: House, path: Path) -> None:
    listener = house.open(show_peer, address=unix(path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as successor:
        successor.bind(str(path))
        house.run(listener.drain(time.monotonic()))
        assert path.exists()


def test_a_folder_that_is_missing_is_an_error(house: House, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        house.open(show_peer, address=unix(tmp_path / "nowhere" / "s"))


# Letting in


def descriptors() -> list[int]:
    return [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]


def test_accepting_pauses_while_descriptors_are_short(
    house: House, kit: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    listener = house.open(show_peer)
    with kit.Client(listener) as old:
        assert old.ask(GET).status == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        client = socket.socket()
        client.settimeout(kit.PATIENCE_S)
        used = descriptors()
        hoard = [os.dup(0) for _ in range(max(used) + 4 - len(used))]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(used) + 1, hard))
        try:
            client.connect(("127.0.0.1", listener.port))
            kit.eventually(lambda: "cannot accept" in caplog.text)
            assert old.ask(GET).status == 200  # the loop is free
            assert [record.levelno for record in caplog.records] == [logging.WARNING]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in hoard:
                os.close(descriptor)
        with kit.Client(client) as new:
            assert new.ask(GET).status == 200


def test_many_clients_at_once_are_let_in(house: House, kit: ModuleType) -> None:
    listener = house.open(show_peer)
    clients = [kit.Client(listener) for _ in range(200)]
    for client in clients:
        client.send(GET)
    for client in clients:
        assert client.reply().status == 200
        client.socket.close()
    kit.eventually(lambda: listener.connections == 0)


@pytest.mark.parametrize(
    ("family", "address", "text"),
    [
        (socket.AF_INET, ("10.0.0.1", 5), "10.0.0.1:5"),
        (socket.AF_INET6, ("::1", 5, 0, 0), "[::1]:5"),
        (socket.AF_INET6, ("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1:5"),
        (socket.AF_INET6, ("::ffff:abcd", 5, 0, 0), "[::ffff:abcd]:5"),
        (socket.AF_UNIX, "", "0.0.0.0"),
    ],
)
def test_peers_are_shown_as_in_the_access_log(family: int, address: object, text: str) -> None:
    assert peer_text(family, address) == text


# The end


def drain(house: House, listener: Listener, seconds: float) -> asyncio.Future[None]:
    """Starts draining; the future is done with it."""

    async def begin() -> asyncio.Future[None]:
        task = asyncio.ensure_future(listener.drain(time.monotonic() + seconds))
        await asyncio.sleep(0)
        return task

    return house.run(begin())


def is_refused(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_drain_lets_running_requests_finish(house: House, kit: ModuleType, inbox: Inbox) -> None:
    listener = house.open(inbox)
    with kit.Client(listener) as busy, kit.Client(listener) as idle, kit.Client(listener) as half:
        idle.send(GET)
        inbox.answer(inbox.next(), Response(200))
        idle.reply()
        busy.send(GET)
        exchange = inbox.next()
        half.send(b"POST /half HTTP/1.1\r\nContent-Length: 4\r\n\r\nab")
        kit.eventually(lambda: listener.connections == 3)
        house.call(lambda: None)  # what was sent has been read
        done = drain(house, listener, kit.PATIENCE_S)

        assert is_refused(listener.port)
        assert idle.is_closed()
        half.send(b"cd")
        second = inbox.next()
        assert second.request.body == b"abcd"
        assert not done.done()
        for one, asked in ((busy, exchange), (half, second)):
            inbox.answer(asked, Response(200, b"done"))
            reply = one.reply()
            assert (reply.body, reply.headers["connection"]) == (b"done", "close")
            assert one.is_closed()
        house.run(wait_for(done))
    assert listener.connections == 0


async def wait_for(future: asyncio.Future[None]) -> None:
    await future


def test_a_drain_ends_at_its_deadline(house: House, kit: ModuleType, inbox: Inbox) -> None:
    listener = house.open(inbox)
    with kit.Client(listener) as client:
        client.send(GET)
        exchange = inbox.next()
        house.run(wait_for(drain(house, listener, 0.05)))
        assert client.is_closed()
        assert inbox.gone.get(timeout=kit.PATIENCE_S) is exchange
    assert listener.connections == 0


def test_a_request_that_comes_during_a_drain_is_503(
    house: House, kit: ModuleType, inbox: Inbox
) -> None:
    listener = house.open(inbox)
    with kit.Client(listener) as client:
        client.send(GET)
        exchange = inbox.next()
        client.send(b"GET /half HTT")  # behind it
        with kit.Client(listener) as begun:
            begun.send(b"GET /late HTTP/1.1\r\n")
            kit.eventually(lambda: listener.connections == 2)
            house.call(lambda: None)  # what was sent has been read
            done = drain(house, listener, kit.PATIENCE_S)
            begun.send(b"\r\n")
            reply = begun.reply()
            assert (reply.status, reply.headers["connection"]) == (503, "close")
            assert reply.error()[0] == "ServiceUnavailableException"
            assert begun.is_closed()
        inbox.answer(exchange, Response(200, b"in time"))
        assert client.reply().body == b"in time"
        assert client.is_closed()
        house.run(wait_for(done))
    assert inbox.is_empty()


def test_a_client_in_the_queue_is_answered_when_a_drain_begins(
    house: House, kit: ModuleType, inbox: Inbox
) -> None:
    listener = house.open(inbox)
    clients = []

    async def connect_and_drain() -> None:
        # The loop is busy here: the connections below wait to be accepted.
        for _ in range(3):
            client = kit.Client(listener)
            client.send(GET)
            clients.append(client)
        silent = kit.Client(listener)
        clients.append(silent)
        await listener.drain(time.monotonic() + kit.PATIENCE_S)

    house.run(connect_and_drain())
    *asking, silent = clients
    for client in asking:
        assert client.reply().status == 503
        assert client.is_closed()
        client.socket.close()
    assert silent.is_closed()
    silent.socket.close()


def test_leaving_the_block_cuts_what_is_open(house: House, kit: ModuleType, inbox: Inbox) -> None:
    listener = house.open(inbox)
    client = kit.Client(listener)
    client.send(GET)
    inbox.next()
    house.close()
    assert client.is_closed()
    client.socket.close()
    assert is_refused(listener.port)


def test_limits_are_kept_while_draining(house: House, kit: ModuleType) -> None:
    listener = house.open(show_peer, limits=Limits(header_s=0.05))
    with kit.Client(listener) as client:
        client.send(b"GET")
        kit.eventually(lambda: listener.connections == 1)
        house.run(wait_for(drain(house, listener, kit.PATIENCE_S)))
        assert client.reply().status == 408


# What the loop reports


class Transport:
    """Stands in a loop's report for the transport that failed."""


@pytest.mark.parametrize(
    ("context", "is_told"),
    [
        ({"exception": OSError(110, "timed out"), "transport": Transport()}, False),
        ({"exception": ConnectionResetError(), "protocol": object()}, False),
        ({"exception": OSError(5, "disk"), "future": object()}, True),
        ({"exception": ValueError("ours"), "transport": Transport()}, True),
    ],
)
def test_failures_of_clients_sockets_are_no_errors_of_ours(
    house: House,
    caplog: pytest.LogCaptureFixture,
    context: dict[str, object],
    is_told: bool,
) -> None:
    house.call(install_exception_handler, house.loop)
    house.call(house.loop.call_exception_handler, {"message": "m", **context})
    levels = [record.levelno for record in caplog.records]
    assert levels == ([logging.ERROR] if is_told else [])
