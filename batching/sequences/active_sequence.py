"""ActiveSequence: one sequence, first request to last. InstanceRows: the rows of one Instance. Used by sequences.py."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.request import InferRequest


class ActiveSequence:
    """One sequence, from its first request to its last.

    Invariants: `current` is the one request that is in a Lane or in a Batch, `waiting` are those behind it. `row` is
    its row in a run of its `instance`, -1 while it waits for a slot. `open`: more of its requests may come. `states`:
    the model's latest, by output name; empty at the start. `state_id`: which state of a model that remembers sequences
    itself is its own (affinity.py).
    """

    __slots__ = ("current", "id", "instance", "open", "row", "state_id", "states", "waiting")

    def __init__(self, sequence_id: int | str) -> None:
        self.id = sequence_id
        self.state_id: object = None
        self.open = True
        self.instance = 0
        self.row = -1
        self.current: InferRequest | None = None
        self.waiting: deque[InferRequest] = deque()
        self.states: dict[str, Array] = {}


class InstanceRows:
    """The rows of one Instance, direct strategy: it runs one batch of its sequences at a time.

    `heads` are the sequences with a request that may go next. `queued` counts those in a Lane, `running` those in a
    Batch.
    """

    __slots__ = ("heads", "queued", "running")

    def __init__(self) -> None:
        self.heads: dict[ActiveSequence, None] = {}
        self.queued = 0
        self.running = 0
