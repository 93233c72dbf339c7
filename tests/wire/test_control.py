"""The links over which processes are started: orders with descriptors."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmserve.platform import send_with_fds
from mmserve.wire.control import (
    BlockingLink,
    Signal,
    Spawn,
    Start,
    ToLibrary,
    ToZygote,
    Unpacker,
    fds_of,
    pack,
)

ORDERS = st.lists(
    st.builds(Signal, st.integers(1, 1 << 22), st.integers(1, 64))
    | st.builds(
        Start,
        st.integers(1, 1000),
        st.sampled_from(["fork", "exec", "library", "template"]),
        st.dictionaries(st.binary(max_size=5), st.binary(max_size=5), max_size=3),
    )
)


@given(orders=ORDERS, data=st.data())
def test_orders_come_whole_and_with_their_descriptors_however_they_are_split(
    orders: list[Start | Signal], data: st.DataObject
) -> None:
    unpacker, found, number = Unpacker(ToZygote), [], 0
    expected = []
    for order in orders:
        fds = list(range(number, number + fds_of(order)))
        number += len(fds)
        expected.append((order, fds))
        packed = pack(order)
        at = data.draw(st.integers(1, len(packed)))
        found += unpacker.feed(packed[:at], fds)  # descriptors come with the first byte
        found += unpacker.feed(packed[at:])
    assert found == expected
    assert unpacker.fds == []


def send(link: socket.socket, order: msgspec.Struct, *, upto: int | None = None) -> None:
    """An order with descriptors of pipes that nobody else holds."""
    pipes = [os.pipe() for _ in range(2)]
    fds = [fd for pipe in pipes for fd in pipe][: fds_of(order)]
    send_with_fds(link, pack(order)[:upto], fds)
    for fd in (fd for pipe in pipes for fd in pipe):
        os.close(fd)


def test_a_fork_lets_go_of_what_came_for_others() -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    ours, theirs = socket.socketpair()
    link = BlockingLink(theirs, ToLibrary)
    for number in (1, 2):
        send(ours, Spawn(number, "fork", {}))
    send(ours, Spawn(3, "fork", {b"A": b"B"}), upto=6)  # its end is still to come
    for _ in range(3):
        assert link.receive()
    order, own = next(link.messages())
    assert order == Spawn(1, "fork", {})
    link.let_go()
    ours.close()
    assert len(own) == 3
    for fd in own:
        os.close(fd)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


def test_the_end_of_a_link_is_told() -> None:
    ours, theirs = socket.socketpair()
    link = BlockingLink(theirs, ToLibrary)
    ours.close()
    assert not link.receive()
    assert not list(link.messages())
    link.let_go()


@pytest.mark.parametrize(("kind", "count"), [("fork", 3), ("exec", 3), ("template", 4)])
def test_an_order_has_a_known_number_of_descriptors(kind: str, count: int) -> None:
    assert fds_of(Start(1, kind, {})) == count
