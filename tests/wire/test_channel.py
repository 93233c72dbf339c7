"""The worker's blocking end, over real socket pairs."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.wire.channel import ROOM, Channel
from mmserve.wire.framing import Decoder, encode
from mmserve.wire.messages import Hello, Item, Parameter, Predict, Replies, ToFront


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Channel]]:
    front, worker = socket.socketpair()
    front.settimeout(30)
    channel = Channel(worker)
    with front, worker:
        yield front, channel


def frame(batch_id: int, payload: bytes) -> bytes:
    item = Item("id", [], [Parameter("body", len(payload))])
    return b"".join(encode(Predict(batch_id, [item]), [payload]))


def test_batches_sent_in_advance_are_received_one_by_one(
    pair: tuple[socket.socket, Channel],
) -> None:
    front, channel = pair
    front.sendall(frame(1, b"one") + frame(2, b"two") + frame(3, b""))
    for number, expected in ((1, b"one"), (2, b"two"), (3, b"")):
        received = channel.recv()
        assert received is not None
        batch, payload = received
        assert (batch.batch_id, bytes(payload)) == (number, expected)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 300), st.integers(ROOM - 200, ROOM + 200), st.just(3 * ROOM)),
        max_size=6,
    ),
    st.integers(500, 70_000),
)
def test_frames_of_any_size_arrive_however_they_are_written(sizes: list[int], step: int) -> None:
    front, worker = socket.socketpair()
    payloads = [os.urandom(size) for size in sizes]
    stream = b"".join(frame(number, payload) for number, payload in enumerate(payloads))

    def write() -> None:
        for at in range(0, len(stream), step):
            front.sendall(stream[at : at + step])
        front.shutdown(socket.SHUT_WR)

    with front, worker:
        channel = Channel(worker)
        writer = threading.Thread(target=write)
        writer.start()
        got = []
        while (received := channel.recv()) is not None:
            got.append((received[0].batch_id, bytes(received[1])))
        writer.join()
    assert got == list(enumerate(payloads))


def test_a_large_payload_comes_as_a_bytearray_of_the_callers_own(
    pair: tuple[socket.socket, Channel],
) -> None:
    front, channel = pair
    stream = frame(1, b"a" * (2 * ROOM)) + frame(2, b"small")
    writer = threading.Thread(target=front.sendall, args=(stream,))
    writer.start()
    first, second = channel.recv(), channel.recv()
    writer.join()
    assert first is not None and second is not None
    assert type(first[1]) is bytearray and first[1] == b"a" * (2 * ROOM)
    assert bytes(second[1]) == b"small"


@pytest.mark.parametrize("broken_off", [b"", b"\x01", frame(1, b"body")[:-1]])
def test_the_peers_end_is_the_end_also_within_a_frame(
    pair: tuple[socket.socket, Channel], broken_off: bytes
) -> None:
    front, channel = pair
    front.sendall(broken_off)
    front.close()
    assert channel.recv() is None
    assert channel.recv() is None


@pytest.mark.parametrize("sizes", [[], [3], [5000, 5000], [1 << 20, 0, 1 << 20], [700] * 3000])
def test_replies_of_any_shape_are_sent_whole(
    pair: tuple[socket.socket, Channel], sizes: list[int]
) -> None:
    front, channel = pair
    bodies = [os.urandom(size) for size in sizes]
    sender = threading.Thread(
        target=channel.send, args=(Replies(5, [], [], 0.0), [memoryview(body) for body in bodies])
    )
    sender.start()
    decoder: Decoder[Replies] = Decoder(ToFront)
    frames: list[tuple[Replies, memoryview]] = []
    while not frames:
        frames = decoder.feed(front.recv(1 << 16))
    sender.join()
    assert bytes(frames[0][1]) == b"".join(bodies)


def test_sending_to_a_front_that_is_gone_is_an_error_and_no_signal(
    pair: tuple[socket.socket, Channel],
) -> None:
    front, channel = pair
    front.close()
    with pytest.raises(ConnectionError):
        channel.send(Hello(1, "fork"))


def test_a_fork_lets_go_of_the_channel(pair: tuple[socket.socket, Channel]) -> None:
    front, channel = pair
    channel.close_in_children()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # lives until the test has seen that it does not hold the channel
        os._exit(0)
    os.close(read)
    channel.socket.close()
    assert front.recv(1) == b""
    os.close(write)
    assert os.waitpid(child, 0)[1] == 0


def test_the_descriptor_is_not_inherited_by_programs(pair: tuple[socket.socket, Channel]) -> None:
    _, channel = pair
    assert not channel.socket.get_inheritable()


def test_a_frame_that_comes_while_it_is_awake_is_received(
    pair: tuple[socket.socket, Channel],
) -> None:
    front, channel = pair
    channel.awake_s = 60.0  # it would look for so long, and a test ends sooner
    sender = threading.Timer(0.05, front.sendall, [frame(1, b"late")])
    sender.start()
    received = channel.recv()
    sender.join()
    assert received is not None
    assert bytes(received[1]) == b"late"


def test_it_sleeps_where_nothing_comes_and_is_woken(pair: tuple[socket.socket, Channel]) -> None:
    front, channel = pair
    channel.awake_s = 1e-6
    for number in range(5):
        sender = threading.Timer(0.02, front.sendall, [frame(number, b"x")])
        sender.start()
        received = channel.recv()
        sender.join()
        assert received is not None
        assert received[0].batch_id == number


def test_the_end_of_the_front_is_seen_while_it_is_awake(
    pair: tuple[socket.socket, Channel],
) -> None:
    front, channel = pair
    channel.awake_s = 60.0
    front.close()
    assert channel.recv() is None
