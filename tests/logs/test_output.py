import math
import re
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mmserve.logs.output import OutputLine, OutputReader, worker_name
from mmserve.metrics.lines import from_worker

PIECES = st.lists(
    st.sampled_from(
        [b"\n", b"\r", b"\r\n", b"a", b"bc" * 3, b"\xff", "ü你".encode(), b"[METRICS]"]
    ),
    max_size=60,
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def read(pieces: list[bytes], reader: OutputReader) -> list[OutputLine]:
    lines = [line for piece in pieces for line in reader.feed(piece, 0.0)]
    return lines + reader.end()


@given(PIECES, st.lists(st.integers(0), max_size=10))
def test_the_lines_are_the_same_however_the_bytes_are_split(
    pieces: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(pieces)
    wanted = [line.decode("utf-8", "backslashreplace") for line in data.splitlines()]
    assert [line.text for line in read(split(data, cuts), OutputReader())] == wanted


@given(PIECES, st.lists(st.integers(0), max_size=10))
def test_long_lines_are_cut_at_the_same_place_however_the_bytes_are_split(
    pieces: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(pieces)
    lines = read(split(data, cuts), OutputReader(line_limit=8))
    assert lines == read([data], OutputReader(line_limit=8))
    whole = data.splitlines()
    assert len(lines) == len(whole)
    for line, all_of_it in zip(lines, whole, strict=True):
        assert ("[cut after 8 bytes]" in line.text) == (len(all_of_it) > 8)


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"bbbbbb"]), max_size=30).map(
                b"".join
            ),
            st.sampled_from([0.0, 0.3, 2.0]),
        )
    )
)
def test_every_line_is_either_there_or_counted(fed: list[tuple[bytes, float]]) -> None:
    reader = OutputReader(
        lines_per_s=3, bytes_per_s=20, burst_lines=5, burst_bytes=30, line_limit=8
    )
    now, shown, dropped, mute_for = 0.0, 0, 0, 0.0
    lines = []
    for data, gap_s in fed:
        now += gap_s
        lines += reader.tick(now)
        lines += reader.feed(data, now)
        mute_for = max(mute_for, min(reader.next_deadline(), now + 9) - now)
    lines += reader.end()
    for line in lines:
        if notice := re.match(r"… (\d+) lines \(", line.text):
            dropped += int(notice[1])
        else:
            shown += 1
    assert shown + dropped == len(b"".join(data for data, _ in fed).splitlines())


def test_a_flood_is_counted_and_told_of_once() -> None:
    reader = OutputReader()
    flood = b"x\n" * (5 << 19)
    lines = [
        line
        for start in range(0, len(flood), 65_536)
        for line in reader.feed(flood[start : start + 65_536], 10.0)
    ]
    assert len(lines) == 4000
    assert reader.next_deadline() == 11.0
    assert reader.tick(10.9) == []
    (notice,) = reader.tick(11.0)
    assert notice.text.startswith("… 2617440 lines (5.2 MB) of output dropped")
    assert reader.next_deadline() == math.inf
    assert [line.text for line in reader.feed(b"after\n", 11.1)] == ["after"]


def test_an_endless_line_is_shown_once_and_kept_nowhere() -> None:
    reader = OutputReader()
    lines = [line for _ in range(1000) for line in reader.feed(b"y" * 65_536, 0.0)]
    assert len(lines) == 1
    assert lines[0].text == "y" * 8192 + " … [cut after 8192 bytes]"
    assert [line.text for line in reader.feed(b"\nnext\n", 0.0)] == ["next"]


def test_a_cut_does_not_fall_into_a_character() -> None:
    reader = OutputReader(line_limit=8)
    (line,) = reader.feed("aa你好啊\n".encode(), 0.0)
    assert line.text == "aa你好 … [cut after 8 bytes]"


def test_a_well_formed_metric_is_told_apart_and_junk_stays_text() -> None:
    reader = OutputReader(from_worker)
    good = b"[METRICS]Mine.Count:3|#A:b|#hostname:h,1700000000,rid\n"
    junk = b"[METRICS]nonsense\n"
    assert reader.feed(good + junk, 0.0) == [
        OutputLine("Mine.Count:3|#A:b|#hostname:h,requestID:rid,timestamp:1700000000", True),
        OutputLine("[METRICS]nonsense"),
    ]
    assert OutputReader().feed(good, 0.0) == [OutputLine(good.decode().strip())]


def test_a_worker_is_named_as_multi_model_server_names_its_thread() -> None:
    assert worker_name("m", 1) == "W-m-1"
    assert worker_name("a" * 30, 12) == "W-" + "a" * 25 + "-12"
    assert worker_name("a\nb\u2028", 1) == "W-a\\nb\\u2028-1"
