"""A connection fed by hand: any split of the same bytes gives the same exchanges."""

import random
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.frontend.edge import PILE_BYTES, TURN

REQUESTS = [
    b"GET /a?b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /b HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc",
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n",
    b"\r\nHEAD /d HTTP/1.1\r\n\r\n",
    b"GET /nope HTTP/1.1\r\n\r\n",
    b"GET /e HTTP/1.0\r\n\r\n",
    b"BAD\r\n\r\n",
]


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=5), st.randoms())
@settings(max_examples=60, deadline=None)
def test_any_split_gives_the_same_exchanges(
    fuzz: ModuleType, requests: list[bytes], chance: random.Random
) -> None:
    stream = b"".join(requests)
    whole = fuzz.drive([stream])
    for answers_late in (False, True):
        cut = fuzz.drive(fuzz.cut(stream, chance), answers_late=answers_late)
        assert (cut.asked, cut.told, cut.is_closed) == (whole.asked, whole.told, whole.is_closed)


def test_the_fuzz_seeds_and_their_mutations_pass(fuzz: ModuleType) -> None:
    chance = random.Random(7)
    for _ in range(60):
        fuzz.one_input(fuzz.mutate(chance))


@pytest.mark.parametrize("answers_late", [False, True])
def test_a_long_row_of_requests_is_answered_whole(fuzz: ModuleType, answers_late: bool) -> None:
    count = max(TURN * 3 + 1, PILE_BYTES // 20)
    stream = b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(count))
    pieces = [stream[at : at + 50_000] for at in range(0, len(stream), 50_000)]
    outcome = fuzz.drive(pieces, answers_late=answers_late)
    assert [target for _, target, _, _ in outcome.asked] == [f"/{n}" for n in range(count)]
    assert not outcome.is_closed
