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


class SequenceIds:
    """Ids for the sequences of requests without one: 1, 2 and so on, except those under way, which are `taken`.

    `as_text`: the model takes its ids as text.
    """

    def __init__(self, taken: Container[int | str], *, as_text: bool) -> None:
        self._taken = taken
        self._numbers = count(1)
        self._as_text = as_text

    def begin_sequence(self) -> InSequence:
        """Begin a sequence."""
        sequence_id: int | str = next(self._numbers)
        while (sequence_id := str(sequence_id) if self._as_text else sequence_id) in self._taken:
            sequence_id = next(self._numbers)
        return InSequence(sequence_id, start=True)


def requeue(request: InferRequest, now_ns: int, *, is_pinned: bool) -> None:
    """Turn a request that has run into the next one of its sequence: neither first nor last, and new in the queue.

    `is_pinned`: its Key ends with a Pin, which will be added again.
    """
    request.sequence = InSequence(request.active_sequence.id)
    request.enqueued_ns = now_ns
    request.waiting = True
    if is_pinned:
        request.key = request.key[:-1]
    request.active_sequence.waiting.appendleft(request)
