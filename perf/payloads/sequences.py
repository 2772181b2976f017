"""Sequences: requests that belong together, each slot in the middle of one; written as they are sent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from .tensors import InputError, Step
from .writing import FIRST, LAST, Template, Writer

MAX_IDS = 2**32 - 1
"""The number of ids used if no end is given, as in perf_analyzer."""
MAX_SLOTS = 1 << 16
"""The assumed number of slots if it is unknown."""


@dataclass(frozen=True, slots=True)
class Ids:
    """The `count` ids from `first`, divided among slots: a slot has every `slots`th, so that no two share one."""

    first: int
    count: int
    slots: int

    def of(self, slot: int, number: int) -> int:
        """Return the id of a slot's sequence. Once its own are used up, they repeat."""
        ids_of_slot = (self.count - slot + self.slots - 1) // self.slots
        return self.first + slot + number % ids_of_slot * self.slots


def ids(first: int, count: int, slots: int) -> Ids:
    """Divide `count` ids (0: all there are) among slots (0: unknown). Raises: InputError."""
    flag = f"--sequence-id-range {first}:{first + count if count else ''}"
    if first < 1 or count < 0:
        raise InputError(f"{flag}: it starts from 1 at least, and ends above where it starts")
    count = count or MAX_IDS
    if count < slots:
        raise InputError(f"{flag}: {count} ids are fewer than the {slots} sequences that may be under way at once")
    return Ids(first, count, slots or min(MAX_SLOTS, count))


@dataclass(frozen=True, slots=True)
class Lengths:
    """The number of requests in a sequence: `base`, plus or minus `variation` percent; None: its stream's steps."""

    base: int | None
    variation: float = 0.0

    def draw(self, rng: random.Random, steps: int) -> int:
        """Draw a length of at least 1."""
        if self.base is None:
            return steps
        return max(1, self.base + int(rng.uniform(-1, 1) * self.base * self.variation / 100))


@dataclass(frozen=True)
class Sequences:
    """Payloads of sequences. A slot's new sequence takes the next stream, and repeats its steps.

    Threads: one. The state of slots and templates is its process's own, and empty when it is sent to one.
    """

    writer: Writer
    streams: tuple[tuple[Step, ...], ...]
    ids: Ids
    lengths: Lengths
    rows: int = 1
    seed: int = 0
    _slots: dict[int, _Slot] = field(default_factory=dict, compare=False, repr=False)
    _templates: dict[tuple[int, int], Template] = field(default_factory=dict, compare=False, repr=False)

    def stream(self, slot: int) -> Iterator[bytes]:
        """Return a slot's requests, starting with a new sequence. Raises: InputError."""
        if slot >= self.ids.slots:
            raise InputError(f"there are ids for {self.ids.slots} sequences at once, and one more is wanted")
        state = self._slots.get(slot)
        if state is None:
            state = self._slots[slot] = _Slot(self, slot)
        state.left = 0
        return state

    def ending(self, slot: int) -> bytes | None:
        """Return the request that ends the slot's sequence; None if none is open."""
        state = self._slots.get(slot)
        if state is None or not state.left:
            return None
        state.left = 1
        return next(state)

    def template(self, stream: int, step: int) -> Template:
        """Return the template of one step's requests."""
        template = self._templates.get((stream, step))
        if template is None:
            template = self._templates[stream, step] = self.writer.template(self.streams[stream][step])
        return template


class _Slot:
    """The state of one slot. `left`: requests of its sequence that have not been sent."""

    def __init__(self, sequences: Sequences, slot: int) -> None:
        self._all = sequences
        self._slot = slot
        self._rng = random.Random(f"{sequences.seed}/{slot}")
        self._number = -1
        self._identity = b""
        self._stream = 0
        self._step = 0
        self.left = 0

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        mark = 0
        if not self.left:
            self._begin()
            mark = FIRST
        if self.left == 1:
            mark |= LAST
        self.left -= 1
        step = self._step
        self._step = (step + 1) % len(self._all.streams[self._stream])
        return self._all.template(self._stream, step)(self._identity, mark)

    def _begin(self) -> None:
        every = self._all
        self._number += 1
        self._identity = every.writer.identity(every.ids.of(self._slot, self._number))
        self._stream = (self._slot + self._number) % len(every.streams)
        self._step = 0
        self.left = every.lengths.draw(self._rng, len(every.streams[self._stream]))
