"""Iterations: a sequence that is one request, which runs again and again until its model is done with it.

Triton's `iterative_sequence`. Between two iterations it waits as the next request of its sequence would, and shares
its next run with whatever waits by then. Called by Sequences.
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
    """Ids for the sequences of requests that say none: 1, 2 and so on, but for those under way, which are `taken`.

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
    """Make a request that has run the next one of its sequence: neither its first nor its last, and new in the queue.

    `pinned`: the last part of its Key says where it has run, and will be added again.
    """
    request.sequence = InSequence(request.under_way.id)
    request.queue_ns = now_ns
    request.waiting = True
    if pinned:
        request.key = request.key[:-1]
    request.under_way.waiting.appendleft(request)
