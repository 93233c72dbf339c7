from hypothesis import given
from hypothesis import strategies as st

from mmserve.frontend.paging import MAX_LIMIT, page


@given(st.lists(st.integers(), max_size=350), st.integers().filter(lambda limit: limit != 0))
def test_a_walk_over_all_pages_meets_every_item_once(items: list[int], limit: int) -> None:
    met: list[int] = []
    token: str | None = "0"
    while token is not None:
        some, token = page(items, limit=limit, start=int(token))
        assert len(some) <= MAX_LIMIT
        assert some or not items, "no page but the first of nothing is empty"
        met += some
    assert met == items


def test_a_page_that_ends_with_the_last_item_is_the_last() -> None:
    assert page("ab", limit=2, start=0) == ("ab", None)
    assert page("ab", limit=1, start=0) == ("a", "1")
    assert page("ab", limit=1, start=1) == ("b", None)


def test_no_limit_leads_round_in_a_circle() -> None:
    assert page("ab", limit=0, start=0) == ("", None)


def test_a_start_outside_the_list_is_harmless() -> None:
    assert page("ab", limit=1, start=9) == ("", None)
    assert page("ab", limit=1, start=-9) == ("a", "1")
