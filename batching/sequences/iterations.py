"""Iterations: a sequence that is one request, which runs again and again until its model is done with it.

Triton's `iterative_sequence`. Between two iterations it waits as the next request of its sequence would, and shares its
next run with whatever is waiting by then. Used by Sequences.
Source: Triton core, sequence_utils.h (IterativeSequencer).
"""

from __future__ import annotations

from collections.abc import Container
from itertools import count
from typing import TYPE_CHECKING

from penstock.batching.request import InSequence

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest


class Identities:
    """Ids for the sequences of requests without one: 1, 2 and so on, except those under way, which are `taken`.

    `text`: the model takes its ids as text.
    """

    def __init__(self, taken: Container[int | str], *, text: bool) -> None:
        self._taken = taken
        self._numbers = count(1)
        self._text = text

    def next(self) -> InSequence:
        """Begin a sequence."""
        found: int | str = next(self._numbers)
        while (found := str(found) if self._text else found) in self._taken:
            found = next(self._numbers)
        return InSequence(found, start=True)


def go_on(request: InferRequest, now_ns: int, *, pinned: bool) -> None:
    """Turn a request that has run into the next one of its sequence: neither first nor last, and new in the queue.

    `pinned`: its Key ends with a Pin, which will be added again.
    """
    request.sequence = InSequence(request.active_sequence.id)
    request.enqueued_ns = now_ns
    request.waiting = True
    if pinned:
        request.key = request.key[:-1]
    request.active_sequence.waiting.appendleft(request)
