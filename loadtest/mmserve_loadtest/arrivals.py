"""When requests of an open loop are due. No clock: seconds after the start come out."""

from __future__ import annotations

import random
from collections.abc import Iterator


def constant(rate: float, duration_s: float) -> Iterator[float]:
    """`rate` times a second, evenly, from 0 on."""
    for number in range(int(rate * duration_s)):
        yield number / rate


def poisson(rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """As many independent users make: exponential gaps of mean 1 / `rate`."""
    chance = random.Random(seed)
    at_s = chance.expovariate(rate)
    while at_s < duration_s:
        yield at_s
        at_s += chance.expovariate(rate)


#: How `--arrivals` spells them.
ARRIVALS = ("constant", "poisson")


def schedule(kind: str, rate: float, duration_s: float, seed: int) -> Iterator[float]:
    """Raises ValueError for a kind that is not one of `ARRIVALS`."""
    match kind:
        case "constant":
            return constant(rate, duration_s)
        case "poisson":
            return poisson(rate, duration_s, seed)
    raise ValueError(f"arrivals are one of {', '.join(ARRIVALS)}, not {kind!r}")
