"""Pages of the model list. Quiet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

MAX_LIMIT = 100


def page(items: Sequence[T], *, limit: int, start: int) -> tuple[Sequence[T], str | None]:
    """One page, and the token of the next one; None on the last.

    Args:
        limit: items on a page; below 0 or above 100 it is 100. 0 gives an empty last page: under
            Multi Model Server its token leads to the same page for ever.
        start: the token of this page as a number, an offset; below 0 it is 0.
    """
    if not 0 <= limit <= MAX_LIMIT:
        limit = MAX_LIMIT
    start = max(0, start)
    end = start + limit
    has_more = limit > 0 and end < len(items)
    return items[start:end], str(end) if has_more else None
