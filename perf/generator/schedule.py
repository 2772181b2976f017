"""Schedules: when the requests of an open loop are due, and which of them fall to each process."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from .orders import Load, Part, Times

_Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
_BLOCK = 1024


def due_ns(load: Load, part: Part) -> Iterator[int]:
    """Return when each request of one process is due, from the common start: ascending, endless without `requests`.

    Together the processes make the same schedule as one alone: even and recorded times are dealt to them in turn, and
    independent Poisson streams add up to one with the sum of their rates. With sequences, each process takes the turns
    of its own.
    """
    own_places = len(part.slots(load.sequences)) if load.sequences else 1
    place_count = load.sequences or part.of
    if not own_places:
        return iter(())
    blocks: Iterator[_Numbers]
    if load.intervals_us:
        blocks = _recorded(np.array(load.intervals_us), part, place_count)
    elif load.rate_per_s <= 0:
        raise ValueError(f"an open loop takes a rate above 0, got {load.rate_per_s}")
    elif load.poisson:
        blocks = _poisson(
            load.rate_per_s * own_places / place_count, np.random.default_rng((load.seed, part.number, part.of))
        )
    else:
        blocks = (np.multiply(numbers, 1e9 / load.rate_per_s) for numbers in _numbers(part, place_count))
    every = (due for block in blocks for due in block.astype(np.int64).tolist())
    return islice(every, _share(load, part, own_places, place_count)) if load.requests else every


def _share(load: Load, part: Part, own_places: int, place_count: int) -> int:
    whole, rest = divmod(load.requests, place_count)
    return whole * own_places + len(part.slots(rest))


def _numbers(part: Part, place_count: int) -> Iterator[Times]:
    """Yield the numbers of one process's requests among all, when dealt to `place_count` places in turn."""
    own_places = np.array(part.slots(place_count), np.int64)
    rounds = max(_BLOCK // len(own_places), 1)
    first = 0
    while True:
        turn_numbers = np.arange(first, first + rounds, dtype=np.int64)
        yield (turn_numbers[:, None] * place_count + own_places).ravel()
        first += rounds


def _poisson(rate_per_s: float, random: np.random.Generator) -> Iterator[_Numbers]:
    last = 0.0
    while True:
        block = last + np.cumsum(random.exponential(1e9 / rate_per_s, _BLOCK))
        last = float(block[-1])
        yield block


def _recorded(intervals_us: _Numbers, part: Part, place_count: int) -> Iterator[_Numbers]:
    at_ns = np.cumsum(intervals_us) * 1e3
    if not (intervals_us >= 0).all() or at_ns[-1] <= 0:
        raise ValueError("recorded intervals are 0 or more, and not all 0")
    for numbers in _numbers(part, place_count):
        times, place = np.divmod(numbers, len(at_ns))
        yield times * at_ns[-1] + at_ns[place]
