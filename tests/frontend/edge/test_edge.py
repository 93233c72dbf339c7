"""The edge on real sockets, on both event loops."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
import struct
import threading
import zlib
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from mmserve.frontend.edge import CLIENT_LEFT, Limits
from mmserve.frontend.http import Exchange, Response

if TYPE_CHECKING:
    from conftest import House, Inbox, Observed

GET = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


def echo(exchange: Exchange) -> None:
    """The body; of a request without one, what it asked for."""
    request = exchange.request
    asked = json.dumps([request.method, request.path, request.query, request.headers])
    exchange.reply(Response(200, request.body or asked.encode()))


def post(body: bytes, *fields: bytes, size: int | None = None) -> bytes:
    length = b"Content-Length: %d" % (len(body) if size is None else size)
    return b"\r\n".join((b"POST /p HTTP/1.1", length, *fields, b"", body))


# One connection, many requests


def test_one_connection_carries_many_requests(house: House, kit: ModuleType) -> None:
    with kit.Client(house.open(echo)) as client:
        for number in range(50):
            reply = client.ask(post(b"%d" % number))
            assert (reply.status, reply.body) == (200, b"%d" % number)
            assert reply.headers["connection"] == "keep-alive"


def test_a_pipelined_request_waits_for_the_one_before(
    house: House, kit: ModuleType, inbox: Inbox
) -> None:
    with kit.Client(house.open(inbox)) as client:
        client.send(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nGET /3 HTTP/1.1\r\n\r\n")
        for number in (1, 2, 3):
            exchange = inbox.next()
            assert exchange.request.path == f"/{number}"
            assert inbox.is_empty()
            inbox.answer(exchange, Response(200, b"%d" % number))
            assert client.reply().body == b"%d" % number


def test_a_client_that_pipelines_without_reading_is_held_back(
    house: House, kit: ModuleType
) -> None:
    """Three times 4 MB in, three times 4 MB out, on sockets that hold far less."""
    limits = Limits(max_body_bytes=5_000_000)
    bodies = [bytes([number]) * 4_000_000 for number in range(3)]
    with kit.Client(house.open(echo, limits=limits)) as client:
        data = b"".join(post(body) for body in bodies)
        sender = threading.Thread(target=client.send, args=(data,))
        sender.start()
        for body in bodies:
            assert client.reply().body == body
        sender.join()


@pytest.mark.parametrize(
    ("request_head", "connection"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "keep-alive"),
        (b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n", "close"),
        (b"GET / HTTP/1.0\r\n\r\n", "close"),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "keep-alive"),
    ],
)
def test_a_client_that_asks_for_close_gets_it(
    house: House, kit: ModuleType, request_head: bytes, connection: str
) -> None:
    with kit.Client(house.open(echo)) as client:
        reply = client.ask(request_head)
        assert reply.status == 200
        assert reply.head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert reply.headers["connection"] == connection
        if connection == "close":
            assert client.is_closed()
        else:
            assert client.ask(request_head).status == 200


def test_an_error_closes_the_connection_and_says_so(house: House, kit: ModuleType) -> None:
    listener = house.open(lambda exchange: exchange.reply(Response(404, b"gone")))
    with kit.Client(listener) as client:
        reply = client.ask(GET)
        assert (reply.status, reply.body, reply.headers["connection"]) == (404, b"gone", "close")
        assert client.is_closed()


# What the application sees


def seen(house: House, kit: ModuleType, request: bytes) -> list[object]:
    with kit.Client(house.open(echo)) as client:
        found: list[object] = json.loads(client.ask(request).body)
        return found


@pytest.mark.parametrize(
    ("line", "method", "path", "query"),
    [
        (b"GET /a%2Fb?c=d HTTP/1.1", "GET", "/a%2Fb", "c=d"),
        (b"GET http://h:80/a?b HTTP/1.1", "GET", "/a", "b"),
        (b"OPTIONS * HTTP/1.1", "OPTIONS", "*", ""),
        (b"CONNECT h:1 HTTP/1.1", "CONNECT", "h:1", ""),
        (b"GET /u HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket", "GET", "/u", ""),
        (b"PATCH /x HTTP/1.1", "PATCH", "/x", ""),
    ],
)
def test_every_form_of_request_reaches_the_application(
    house: House, kit: ModuleType, line: bytes, method: str, path: str, query: str
) -> None:
    assert seen(house, kit, line + b"\r\n\r\n")[:3] == [method, path, query]


def test_requests_carry_who_asked_and_when(house: House, kit: ModuleType, inbox: Inbox) -> None:
    with kit.Client(house.open(inbox)) as client:
        client.send(GET)
        request = inbox.next().request
        host, port = client.socket.getsockname()
        assert request.peer == f"{host}:{port}"
        assert request.http_version == "1.1"
        assert request.target == "/ping"
        assert len(request.id) == 36
        assert request.received > 0


def test_headers_of_a_remembered_head_are_not_shared(house: House, kit: ModuleType) -> None:
    def spoil(exchange: Exchange) -> None:
        size = len(exchange.request.headers)
        exchange.request.headers.append(("X", "y"))
        exchange.reply(Response(200, b"%d" % size))

    with kit.Client(house.open(spoil)) as client:
        assert client.ask(GET).body == client.ask(GET).body == b"2"


def test_a_chunked_body_arrives_whole_and_its_trailers_are_dropped(
    house: House, kit: ModuleType, inbox: Inbox
) -> None:
    with kit.Client(house.open(inbox)) as client:
        client.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n")
        client.send(b"3;x=y\r\nabc\r\n")
        client.send(b"2\r\nde\r\n0\r\nA: c\r\n\r\n" + GET)
        exchange = inbox.next()
        assert exchange.request.body == b"abcde"
        assert exchange.request.headers == [("A", "b"), ("content-length", "5")]
        inbox.answer(exchange, Response(200))
        assert client.reply().status == 200
        assert inbox.next().request.path == "/ping"


@pytest.mark.parametrize("coding", [b"gzip", b"x-gzip", b"GZIP"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_gzip_body_is_undone(
    house: House, kit: ModuleType, inbox: Inbox, coding: bytes, is_chunked: bool
) -> None:
    text = b'{"a": 1}' * 100
    packed = gzip.compress(text)
    field = b"Content-Encoding: " + coding
    if is_chunked:
        request = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n%s\r\n\r\n%x\r\n%s\r\n" % (
            *(field, len(packed), packed),
        )
        request += b"0\r\n\r\n"
    else:
        request = post(packed, field)
    with kit.Client(house.open(inbox)) as client:
        client.send(request)
        request_seen = inbox.next().request
    assert request_seen.body == text
    assert request_seen.headers == [("content-length", "800")]


def test_identity_is_no_coding_and_no_body_needs_no_inflating(
    house: House, kit: ModuleType
) -> None:
    with kit.Client(house.open(echo)) as client:
        assert client.ask(post(b"plain", b"Content-Encoding: identity")).body == b"plain"
        assert client.ask(b"GET / HTTP/1.1\r\nContent-Encoding: gzip\r\n\r\n").status == 200


# Bodies that are refused


def test_a_body_of_exactly_the_limit_is_taken(house: House, kit: ModuleType) -> None:
    listener = house.open(echo, limits=Limits(max_body_bytes=1000))
    with kit.Client(listener) as client:
        assert client.ask(post(b"x" * 1000)).body == b"x" * 1000
        chunk = b"%x\r\n%s\r\n" % (500, b"x" * 500)
        reply = client.ask(
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk * 2 + b"0\r\n\r\n"
        )
        assert reply.body == b"x" * 1000


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"", size=1001),
        post(b"x" * 1001),
        post(b"", b"Expect: 100-continue", size=1001),
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n",
        post(gzip.compress(b"x" * 1001), b"Content-Encoding: gzip"),
    ],
)
def test_a_body_over_the_limit_is_413_before_it_is_read(
    house: House, kit: ModuleType, inbox: Inbox, request_bytes: bytes
) -> None:
    with kit.Client(house.open(inbox, limits=Limits(max_body_bytes=1000))) as client:
        reply = client.ask(request_bytes)
        assert (reply.status, reply.reason) == (413, "Request Entity Too Large")
        assert "1000 bytes" in reply.error()[1]
        assert reply.headers["connection"] == "close"
        assert client.is_closed()
        assert inbox.is_empty()


def test_a_client_that_sends_all_before_it_reads_can_read_why(
    house: House, kit: ModuleType
) -> None:
    with kit.Client(house.open(echo)) as client:
        assert client.ask(post(bytes(20_000_000))).status == 413
        assert client.is_closed()


def test_a_bomb_is_413(house: House, kit: ModuleType) -> None:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    bomb = b"".join([packer.compress(bytes(1 << 20)) for _ in range(50)]) + packer.flush()
    with kit.Client(house.open(echo)) as client:
        assert client.ask(post(bomb, b"Content-Encoding: gzip")).status == 413


@pytest.mark.parametrize(
    ("request_bytes", "status", "kind"),
    [
        (post(b"no gzip", b"Content-Encoding: gzip"), 400, "BadRequestException"),
        (post(b"x", b"Content-Encoding: br"), 415, "UnsupportedMediaTypeException"),
        (post(b"x", b"Content-Encoding: deflate"), 415, "UnsupportedMediaTypeException"),
        (post(b"x", b"Content-Encoding: gzip, gzip"), 415, "UnsupportedMediaTypeException"),
        (post(b"x", b"Expect: 200-ok"), 417, "ExpectationFailedException"),
        (
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            400,
            "BadRequestException",
        ),
    ],
)
def test_what_cannot_be_undone_or_met_is_refused(
    house: House, kit: ModuleType, request_bytes: bytes, status: int, kind: str
) -> None:
    with kit.Client(house.open(echo)) as client:
        reply = client.ask(request_bytes)
        assert (reply.status, reply.error()[0]) == (status, kind)
        assert client.is_closed()


def test_100_continue_comes_before_the_body_and_only_then(house: House, kit: ModuleType) -> None:
    with kit.Client(house.open(echo)) as client:
        interim = client.ask(post(b"", b"Expect: 100-continue", size=5))
        assert (interim.status, interim.head) == (100, b"HTTP/1.1 100 Continue")
        assert client.ask(b"hello").body == b"hello"
        assert client.ask(post(b"hasty", b"Expect: 100-continue")).status == 200
        old = b"POST / HTTP/1.0\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
        client.send(old)
        assert client.ask(b"old").status == 200


# What is no HTTP


@pytest.mark.parametrize(
    "rubbish",
    [
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET / HTTP/1.1\r\nA : b\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0\0\0\0",
        b"GET /" + b"a" * 5000,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 2000,
        b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000_000,
    ],
)
def test_what_is_no_http_gets_a_readable_400(
    house: House, kit: ModuleType, inbox: Inbox, rubbish: bytes
) -> None:
    with kit.Client(house.open(inbox)) as client:
        reply = client.ask(rubbish)
        kind, message = reply.error()
        assert (reply.status, kind) == (400, "BadRequestException")
        assert message.startswith("Invalid HTTP message.")
        assert reply.headers["x-request-id"]
        assert client.is_closed()
        assert inbox.is_empty()


def test_a_bad_request_behind_a_good_one_waits_its_turn(
    house: House, kit: ModuleType, inbox: Inbox
) -> None:
    with kit.Client(house.open(inbox)) as client:
        client.send(GET + b"rubbish\r\n\r\n")
        inbox.answer(inbox.next(), Response(200, b"good"))
        assert client.reply().body == b"good"
        assert client.reply().status == 400


# Replies


def test_a_reply_is_what_multi_model_server_sends(house: House, kit: ModuleType) -> None:
    headers = [("X-A", "b"), ("Connection", "upgrade"), ("content-length", "99")]
    listener = house.open(lambda exchange: exchange.reply(Response(200, b"ok", headers)))
    with kit.Client(listener) as client:
        reply = client.ask(GET)
    request_id = reply.headers["x-request-id"]
    assert reply.head.decode() == (
        "HTTP/1.1 200 OK\r\n"
        "X-A: b\r\n"
        f"x-request-id: {request_id}\r\n"
        "Pragma: no-cache\r\n"
        "Cache-Control: no-cache; no-store, must-revalidate, private\r\n"
        "Expires: Thu, 01 Jan 1970 00:00:00 UTC\r\n"
        "content-length: 2\r\n"
        "connection: keep-alive"
    )


def test_head_is_answered_without_its_body(house: House, kit: ModuleType) -> None:
    listener = house.open(lambda exchange: exchange.reply(Response(200, b"x" * 100_000)))
    with kit.Client(listener) as client:
        reply = client.ask(b"HEAD / HTTP/1.1\r\n\r\n", has_body=False)
        assert reply.headers["content-length"] == "100000"
        assert client.ask(GET).body == b"x" * 100_000


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_has_none(house: House, kit: ModuleType, status: int) -> None:
    listener = house.open(lambda exchange: exchange.reply(Response(status, b"no body of mine")))
    with kit.Client(listener) as client:
        for _ in range(2):
            reply = client.ask(GET)
            assert (reply.status, reply.body) == (status, b"")
            assert "content-length" not in reply.headers


@pytest.mark.parametrize(
    "response",
    [
        Response(200, b"", [("X-A", "b\r\nX-Evil: 1\r\n\r\nevil")]),
        Response(200, b"", [("X-A\r\nX-Evil", "1")]),
        Response(42),
        Response(1000),
        Response(100),
    ],
)
def test_a_reply_that_is_no_http_becomes_503(
    house: House, kit: ModuleType, response: Response
) -> None:
    with kit.Client(house.open(lambda exchange: exchange.reply(response))) as client:
        reply = client.ask(GET)
        kind, message = reply.error()
        assert (reply.status, kind) == (503, "InternalServerException")
        assert message.startswith("The model's reply cannot be sent: the ")
        assert "x-evil" not in reply.headers
        assert client.is_closed()


@pytest.mark.parametrize("wrap", [bytes, memoryview], ids=["bytes", "memoryview"])
def test_a_large_reply_arrives_whole(
    house: House, kit: ModuleType, wrap: type[bytes] | type[memoryview]
) -> None:
    body = os.urandom(3_000_000)
    listener = house.open(lambda exchange: exchange.reply(Response(200, wrap(body))))
    with kit.Client(listener) as client:
        client.send(GET + GET)
        assert client.reply().body == body
        assert client.reply().body == body


def test_cors_headers_are_on_every_reply(house: House, kit: ModuleType) -> None:
    cors = (("access-control-allow-origin", "*"),)
    listener = house.open(echo, cors=cors)
    for request in (GET, b"rubbish\r\n\r\n"):
        with kit.Client(listener) as client:
            assert client.ask(request).headers["access-control-allow-origin"] == "*"


def test_an_error_in_the_application_is_500_and_stays_secret(
    house: House, kit: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(exchange: Exchange) -> None:
        raise RuntimeError("a secret")

    with kit.Client(house.open(broken)) as client:
        reply = client.ask(GET)
        assert reply.status == 500
        assert b"secret" not in reply.body
        assert client.is_closed()
    assert "a secret" in caplog.text


def test_a_second_reply_is_dropped(house: House, kit: ModuleType) -> None:
    def twice(exchange: Exchange) -> None:
        exchange.reply(Response(200, b"first"))
        exchange.reply(Response(200, b"second"))

    with kit.Client(house.open(twice)) as client:
        assert client.ask(GET).body == b"first"
        assert client.ask(GET).body == b"first"


# Time


def test_an_idle_connection_is_closed(house: House, kit: ModuleType) -> None:
    with kit.Client(house.open(echo, limits=Limits(idle_s=0.05))) as client:
        assert client.ask(GET).status == 200
        assert client.is_closed()


def test_a_client_that_says_nothing_is_closed(house: House, kit: ModuleType) -> None:
    with kit.Client(house.open(echo, limits=Limits(idle_s=0.05))) as client:
        assert client.is_closed()


def test_a_head_that_does_not_end_is_408(house: House, kit: ModuleType) -> None:
    with kit.Client(house.open(echo, limits=Limits(header_s=0.05))) as client:
        reply = client.ask(b"GET /slow HTTP/1.1\r\nHost")
        kind, message = reply.error()
        assert (reply.status, kind) == (408, "RequestTimeoutException")
        assert "header_timeout_seconds" in message
        assert client.is_closed()


@pytest.mark.parametrize("begun", [post(b"abc", size=5), post(b"", size=5)])
def test_a_body_that_does_not_come_is_408(house: House, kit: ModuleType, begun: bytes) -> None:
    with kit.Client(house.open(echo, limits=Limits(body_s=0.05))) as client:
        reply = client.ask(begun)
        assert (reply.status, reply.error()[0]) == (408, "RequestTimeoutException")
        assert client.is_closed()


def test_the_application_may_take_its_time(house: House, kit: ModuleType, inbox: Inbox) -> None:
    short = Limits(idle_s=0.02, header_s=0.02, body_s=0.02, write_s=0.02)
    listener = house.open(inbox, limits=short)
    with kit.Client(listener) as client, kit.Client(listener) as other:
        client.send(GET)
        exchange = inbox.next()
        assert other.is_closed()  # a longer time than any limit has passed
        inbox.answer(exchange, Response(200, b"at last"))
        assert client.reply().body == b"at last"


def test_a_client_that_does_not_take_its_reply_is_cut(
    house: House, kit: ModuleType, observed: Observed
) -> None:
    body = bytes(30_000_000)
    listener = house.open(
        lambda exchange: exchange.reply(Response(200, body)),
        limits=Limits(write_s=0.05),
        observer=observed,
    )
    with kit.Client(listener) as client:
        client.send(GET)
        kit.eventually(lambda: len(observed.lines) == 1 and listener.connections == 0)


# Clients that leave


def test_the_application_hears_once_that_a_client_left(
    house: House, kit: ModuleType, inbox: Inbox, observed: Observed
) -> None:
    listener = house.open(inbox, observer=observed)
    with kit.Client(listener) as client:
        client.send(GET)
        exchange = inbox.next()
    assert inbox.gone.get(timeout=kit.PATIENCE_S) is exchange
    inbox.answer(exchange, Response(200, b"too late"))
    kit.eventually(lambda: listener.connections == 0)
    assert inbox.gone.empty()
    assert observed.lines == [("GET", "/ping", CLIENT_LEFT, 0)]


def test_an_answered_request_is_never_called_off(
    house: House, kit: ModuleType, inbox: Inbox
) -> None:
    listener = house.open(inbox)
    with kit.Client(listener) as client:
        client.send(GET)
        inbox.answer(inbox.next(), Response(200))
        client.reply()
    kit.eventually(lambda: listener.connections == 0)
    assert inbox.gone.empty()


def test_an_error_while_a_request_is_called_off_is_logged(
    house: House, kit: ModuleType, inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("of ours")

    listener = house.open(inbox)
    with kit.Client(listener) as client:
        client.send(GET)
        inbox.next().on_gone = broken
    kit.eventually(lambda: listener.connections == 0)
    assert "of ours" in caplog.text


@pytest.mark.parametrize(
    "said",
    [b"", b"GET", b"\0\0\0\0", b"\x16\x03\x01", GET, post(b"half", size=9), GET + b"GET", GET * 40],
)
def test_tcp_probes_leave_no_trace_in_the_log(
    house: House, kit: ModuleType, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    listener = house.open(echo)
    for _ in range(20):
        client = kit.Client(listener)
        client.send(said)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.close()  # by a reset
    with kit.Client(listener) as client:
        assert client.ask(GET).status == 200
    kit.eventually(lambda: listener.connections == 0)
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []


# The observer


def test_the_observer_hears_of_every_exchange_once(
    house: House, kit: ModuleType, observed: Observed
) -> None:
    listener = house.open(echo, observer=observed, limits=Limits(max_body_bytes=10))
    sizes = []
    for request in (GET, post(b"abc"), post(b"x" * 11), b"\0", b"GET /a b HTTP/1.1\r\n\r\n"):
        with kit.Client(listener) as client:
            reply = client.ask(request)
            sizes.append(len(reply.head) + 4 + len(reply.body))
    kit.eventually(lambda: listener.connections == 0)
    lines = [("GET", "/ping", 200), ("POST", "/p", 200), ("POST", "/p", 413), ("-", "-", 400)]
    assert [line[:3] for line in observed.lines] == [*lines, ("-", "-", 400)]
    assert [line[3] for line in observed.lines] == sizes
