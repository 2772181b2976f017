"""Sequences: which request of each sequence may run next. Owned by the Scheduler of a sequence model.

Source: Triton core, sequence_batch_scheduler.cc.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.batching.request import NO_SEQUENCE

from .active_sequence import ActiveSequence, InstanceRows
from .controls import check_id
from .iterations import SequenceIds, requeue
from .sequence_slots import SequenceSlots, pin

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch
    from penstock.batching.scheduling.lane import Lane
    from penstock.batching.spec import SequenceSpec

logger = logging.getLogger("penstock.batching")

EXPIRED_TEXT = "timeout of the corresponding sequence has been expired"
CANCELED_TEXT = "cancelled with a request before it in its sequence"
_CONFLICT_TEXT = (
    "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence start. Previous "
    "sequence will be terminated early."
)
_row_of = attrgetter("active_sequence.row")


class Sequences:
    """The sequences under way of one model, and those that wait for a slot.

    Of each sequence, one request at a time is in a Lane or in a Batch; the others wait here, in order. Pure: told the
    time; its caller holds the model's lock. `backlog_requests` and `backlog_bytes` count what waits without a slot.
    `model_keeps_state`: the model's Instances remember sequences (affinity.py). Each runs only those with a slot there,
    whose Keys end with its number. The model may identify them by id, so only one of an id has a slot (`_placed_ids`).
    `on_vacated`: callbacks for when the last sequence at an Instance is over and none can begin there. `generated_ids`:
    only for models whose sequences are requests that run again (iterations.py); such a sequence ends with its request.
    """

    def __init__(
        self, name: str, spec: SequenceSpec, rows: int, instances: int, *, model_keeps_state: bool = False
    ) -> None:
        self._name = name
        self._idle_ns = spec.idle_us * 1000
        self._delay_ns = spec.max_delay_us * 1000 if spec.min_utilization else 0
        self._min_heads = math.ceil(spec.min_utilization * rows - 1e-6)
        self._corrid_control = next((control for control in spec.controls if control.kind == "corrid"), None)
        self._free_state_shapes = {state.output: state.first_shape for state in spec.states if -1 in state.shape}
        instances = max(instances, 1)
        self.model_keeps_state = model_keeps_state
        self._placed_ids: set[int | str] = set()
        self.on_vacated: dict[int, Callable[[], object]] = {}
        self._instance_rows = [InstanceRows() for _ in range(instances)] if spec.direct else None
        self._all_compatible = not self._free_state_shapes and (self._instance_rows is None or instances == 1)
        self._slots = SequenceSlots(rows if spec.direct else spec.max_candidates or rows, instances)
        self._hold_backlog = spec.hold_backlog
        self._active: set[ActiveSequence] = set()
        self._open_by_id: dict[int | str, ActiveSequence] = {}
        as_text = self._corrid_control is not None and self._corrid_control.datatype == "BYTES"
        self.generated_ids = SequenceIds(self._open_by_id, as_text=as_text) if spec.iterative else None
        self._backlog: OrderedDict[ActiveSequence, None] = OrderedDict()
        self._idle_since: OrderedDict[ActiveSequence, int] = OrderedDict()
        self._next_reap_ns = self.backlog_requests = self.backlog_bytes = 0

    def __len__(self) -> int:
        return len(self._active)

    # -- arriving ----------------------------------------------------------------------------------------------

    def check(self, request: InferRequest) -> bool:
        """Check a request that has arrived. Returns: whether it would wait for a slot.

        Raises: InferError (INVALID: it has no sequence id, or one that is not under way and that it does not start).
        """
        in_sequence = request.sequence or NO_SEQUENCE
        to = f"to model '{self._name}'"
        if request.rows != 1:
            raise _invalid(f"inference request {to} must specify batch-size 1 due to requirements of sequence batcher")
        if not in_sequence.id and self.generated_ids is not None:
            return not self._slots.has_free
        if not in_sequence.id:
            raise _invalid(f"inference request {to} must specify a non-zero or non-empty correlation ID")
        if self._corrid_control is not None:
            check_id(self._name, self._corrid_control, in_sequence.id)
        sequence = self._open_by_id.get(in_sequence.id)
        if sequence is not None:
            return sequence.row < 0
        if not in_sequence.start:
            text = f"inference request for sequence {in_sequence.id} {to} must specify the START flag"
            raise _invalid(f"{text} on the first request of the sequence")
        return not self._slots.has_free or in_sequence.id in self._placed_ids

    def admit(self, request: InferRequest, now_ns: int) -> list[InferRequest]:
        """Accept a request that `check` has passed. Returns: what may go to its Lane now."""
        in_sequence = request.sequence or NO_SEQUENCE
        if not in_sequence.id and self.generated_ids is not None:
            in_sequence = request.sequence = self.generated_ids.begin_sequence()
        sequence = self._open_by_id.get(in_sequence.id)
        if sequence is None:
            sequence = self._open_by_id[in_sequence.id] = ActiveSequence(in_sequence.id)
            self._active.add(sequence)
            if not self._assign_slot(sequence):
                self._backlog[sequence] = None
        elif in_sequence.start:
            logger.warning(_CONFLICT_TEXT, in_sequence.id, self._name)
        self._idle_since.pop(sequence, None)
        if in_sequence.end:
            self._close(sequence)
        request.active_sequence = sequence
        sequence.waiting.append(request)
        if sequence.row < 0:
            self.backlog_requests += 1
            self.backlog_bytes += request.nbytes
            return []
        return self._advance(sequence, now_ns) if sequence.current is None else []

    def holds(self, request: InferRequest) -> bool:
        """Whether a request waits here, not in a Lane."""
        return request.active_sequence.current is not request

    def has_enough(self, waiting_count: int, hold_count: int) -> bool:
        """Whether, of `waiting_count` waiting requests, more than `hold_count` have a slot and enough wait for one."""
        return waiting_count - self.backlog_requests > hold_count and self.backlog_requests >= self._hold_backlog

    def can_expire(self, request: InferRequest) -> bool:
        """Whether a request's timeout counts: only until its sequence has a slot, as in Triton."""
        return request.active_sequence.row < 0

    def held_requests(self) -> list[InferRequest]:
        """List the requests that wait here."""
        return [request for sequence in self._active for request in sequence.waiting]

    # -- running -----------------------------------------------------------------------------------------------

    def take(self, lane: Lane, max_rows: int) -> tuple[list[InferRequest], int]:
        """Take the requests of one batch from their Lane, and their rows."""
        max_requests = max_rows if self._instance_rows is None else self._slots.rows
        head = lane.head()
        if head is None or self._all_compatible:
            return lane.take(max_requests)
        head_shapes = self._shapes_of(head)
        taken: list[InferRequest] = []
        for request in lane.waiting_requests():
            if len(taken) < max(max_requests, 1) and self._shapes_of(request) == head_shapes:
                lane.remove(request)
                taken.append(request)
        return taken, len(taken)

    def _shapes_of(self, request: InferRequest) -> tuple[object, ...]:
        """Return what must be equal in a batch besides the Key: the Instance, and the shapes of free states."""
        sequence = request.active_sequence
        states = {} if (request.sequence or NO_SEQUENCE).start else sequence.states
        shapes = [states[name].shape if name in states else begin for name, begin in self._free_state_shapes.items()]
        return (sequence.instance, *shapes)

    def assign_rows(self, batch: Batch) -> None:
        """Assign rows to the requests of a closed batch (`batch.row_positions`), if each sequence has its own row."""
        if self._instance_rows is None:
            return
        batch.requests.sort(key=_row_of)
        rows = self._instance_rows[batch.requests[0].active_sequence.instance]
        rows.queued -= len(batch.requests)
        rows.running += len(batch.requests)
        positions = list(map(_row_of, batch.requests))
        last = positions[-1]
        if rows.queued:
            # requests of other shapes: their rows are part of the run all the same, as in Triton
            instance = batch.requests[0].active_sequence.instance
            last = max(each.row for each in self._active if each.current is not None and each.instance == instance)
        # a model that remembers by row must find each part of a batch at its own rows
        if last >= len(positions) or self.model_keeps_state:
            batch.row_positions, batch.span_rows = positions, last + 1

    def record_ended(self, batch: Batch, now_ns: int) -> list[InferRequest]:
        """Record which requests have run or failed, and which run again. Returns: what may go to its Lane now."""
        ready: list[InferRequest] = []
        for request in batch.requests:
            sequence = request.active_sequence
            sequence.current = None
            if self._instance_rows is not None:
                self._instance_rows[sequence.instance].running -= 1
            if request in batch.rerun_requests:
                requeue(request, now_ns, is_pinned=self.model_keeps_state)
            elif self.generated_ids is not None and not sequence.waiting:
                self._close(sequence)
            ready += self._advance(sequence, now_ns)
        return ready

    # -- leaving -----------------------------------------------------------------------------------------------

    def end_at(self, request: InferRequest, now_ns: int) -> tuple[list[InferRequest], list[InferRequest]]:
        """End a sequence at a request that will not run, because it was cancelled or has expired.

        Returns: the requests behind it, which must not run either, and what may go to its Lane now.
        Source: Triton; a sequence that lacks one of its requests would have a different state.
        """
        sequence = request.active_sequence
        first = sequence.waiting.index(request) if sequence.row >= 0 and sequence.current is not request else 0
        followers = [sequence.waiting.pop() for _ in range(len(sequence.waiting) - first)]
        followers.reverse()
        if sequence.row < 0:
            self.backlog_requests -= len(followers)
            self.backlog_bytes -= sum(each.nbytes for each in followers)
            del self._backlog[sequence]
            self._active.remove(sequence)
        followers = [each for each in followers if each is not request]
        self._close(sequence)
        if sequence.row < 0 or sequence.current not in (request, None):
            return followers, []
        if self._instance_rows is not None and sequence.current is request:
            self._instance_rows[sequence.instance].queued -= 1
        sequence.current = None
        return followers, self._advance(sequence, now_ns)

    def next_reap_ns(self) -> int:
        """Return when `reap` must be called next; 0 for never. Any thread, no lock needed."""
        return self._next_reap_ns

    def expedite(self, now_ns: int, *, end_idle: bool) -> None:
        """Stop holding batches open. `end_idle`: also end idle sequences, since nothing will continue them."""
        self._delay_ns, self._idle_ns = 0, 0 if end_idle else self._idle_ns
        self._schedule_reap(now_ns)

    def reap(self, now_ns: int) -> list[InferRequest]:
        """End sequences that were idle too long, and reassign their slots. Returns: what may go to its Lane now."""
        if not 0 < self._next_reap_ns <= now_ns:
            return []
        ready: list[InferRequest] = []
        while self._idle_since:
            sequence, since_ns = next(iter(self._idle_since.items()))
            if since_ns + self._idle_ns > now_ns:
                break
            del self._idle_since[sequence]
            self._close(sequence)
            ready += self._release_slot(sequence, now_ns)
        self._next_reap_ns = 0
        if self._idle_since:
            self._schedule_reap(next(iter(self._idle_since.values())) + self._idle_ns)
        for rows in self._instance_rows or ():
            ready += self._release_heads(rows, now_ns)
        previous_count = -1
        while len(self._backlog) != previous_count:
            previous_count = len(self._backlog)
            ready += self._fill_slot(now_ns)
        return ready

    def _schedule_reap(self, due_ns: int) -> None:
        self._next_reap_ns = min(self._next_reap_ns or due_ns, due_ns)

    def _close(self, sequence: ActiveSequence) -> None:
        if sequence.open:
            sequence.open = False
            del self._open_by_id[sequence.id]

    def _assign_slot(self, sequence: ActiveSequence) -> bool:
        """Give a sequence the lowest row that is free on any Instance. Returns: whether there is one."""
        slot = None if sequence.id in self._placed_ids else self._slots.acquire()
        if slot is not None:
            sequence.row, sequence.instance = slot
            self._placed_ids.update((sequence.id,) if self.model_keeps_state else ())
        return slot is not None

    def _release_slot(self, sequence: ActiveSequence, now_ns: int) -> list[InferRequest]:
        """Free the slot of a sequence that is over, and give it to the one that has waited longest."""
        self._active.remove(sequence)
        self._placed_ids.discard(sequence.id)
        if self._instance_rows is not None:
            self._instance_rows[sequence.instance].heads.pop(sequence, None)
        if not self._slots.release(sequence.row, sequence.instance) and not self.has_sequences_at(sequence.instance):
            self.on_vacated.pop(sequence.instance, lambda: None)()
        return self._fill_slot(now_ns) + self._release_heads_of(sequence, now_ns)

    def set_available(self, instance: int, now_ns: int, *, available: bool) -> None:
        """Let sequences begin at an Instance, or stop that for now. Makes `reap` due: some may have waited for this."""
        self._slots.set_paused(instance, paused=not available)
        self._schedule_reap(now_ns)

    def set_instances(self, instances: Collection[int], now_ns: int) -> None:
        """Let sequences begin at these Instances only; those under way stay where they are. Makes `reap` due."""
        self._slots.move(instances, {(each.row, each.instance) for each in self._active if each.row >= 0})
        if self._instance_rows is not None:
            self._instance_rows += [InstanceRows() for _ in range(len(self._instance_rows), max(instances) + 1)]
            self._all_compatible = False
        self._schedule_reap(now_ns)

    def has_sequences_at(self, instance: int) -> bool:
        """Whether any sequence has its slot at an Instance."""
        return any(sequence.instance == instance and sequence.row >= 0 for sequence in self._active)

    def _fill_slot(self, now_ns: int) -> list[InferRequest]:
        """Give a slot to the longest-waiting sequence that may have it. Returns: what may go to its Lane now."""
        successor = next((each for each in self._backlog if each.id not in self._placed_ids), None)
        if successor is None or not self._assign_slot(successor):
            return []
        del self._backlog[successor]
        self.backlog_requests -= len(successor.waiting)
        self.backlog_bytes -= sum(request.nbytes for request in successor.waiting)
        return self._advance(successor, now_ns)

    def _advance(self, sequence: ActiveSequence, now_ns: int) -> list[InferRequest]:
        """Advance a sequence of which nothing is in a Lane or a Batch. Returns: what may go to a Lane."""
        if sequence.waiting:
            if self._instance_rows is None:
                return [self._release_next(sequence)]
            self._instance_rows[sequence.instance].heads[sequence] = None
        elif sequence.open:
            self._idle_since[sequence] = now_ns
            self._schedule_reap(now_ns + self._idle_ns)
        else:
            return self._release_slot(sequence, now_ns)
        return self._release_heads_of(sequence, now_ns)

    def _release_heads_of(self, sequence: ActiveSequence, now_ns: int) -> list[InferRequest]:
        rows = self._instance_rows
        return [] if rows is None else self._release_heads(rows[sequence.instance], now_ns)

    def _release_heads(self, rows: InstanceRows, now_ns: int) -> list[InferRequest]:
        """Release the heads of an Instance's sequences together, once its batch is over and enough are there."""
        if rows.running or not rows.heads:
            return []
        if self._delay_ns and not rows.queued and len(rows.heads) < self._min_heads:
            due_ns = min(sequence.waiting[0].enqueued_ns for sequence in rows.heads) + self._delay_ns
            if now_ns < due_ns:
                self._schedule_reap(due_ns)
                return []
        ready = [self._release_next(sequence) for sequence in rows.heads]
        rows.heads.clear()
        rows.queued += len(ready)
        return ready

    def _release_next(self, sequence: ActiveSequence) -> InferRequest:
        request = sequence.current = sequence.waiting.popleft()
        if self.model_keeps_state:
            request.key = (*request.key, pin(sequence.instance))
        return request


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID, text)
