import datetime

from hypothesis import given
from hypothesis import strategies as st

from mmserve.logs.stamp import Stamp

TIMES = st.floats(0, 4e9)


@given(st.lists(TIMES, min_size=1), st.lists(st.floats(-0.01, 0.01)))
def test_a_stamp_is_the_local_time_to_the_millisecond(
    times: list[float], steps: list[float]
) -> None:
    stamp = Stamp()
    for step in steps:
        times.append(max(0.0, times[-1] + step))
    for now in times:
        text = stamp.of(now)
        local = datetime.datetime.fromtimestamp(int(now))
        assert text.startswith(local.strftime("%Y-%m-%dT%H:%M:%S,"))
        assert abs(int(text[-3:]) - (now - int(now)) * 1000) <= 1.001


def test_the_stamp_for_json_is_utc() -> None:
    assert Stamp(utc=True).of(1_700_000_000.25) == "2023-11-14T22:13:20.250Z"
