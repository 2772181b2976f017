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

from .controls import check_id
from .iterations import Identities, go_on
from .places import Places, pin
from .under_way import InstanceRows, UnderWay

if TYPE_CHECKING:
    from penstock.batching.request import InferRequest
    from penstock.batching.running.batch import Batch
    from penstock.batching.scheduling.lane import Lane
    from penstock.batching.spec import SequenceSpec

logger = logging.getLogger("penstock.batching")

EXPIRED = "timeout of the corresponding sequence has been expired"
CUT = "cancelled with a request before it in its sequence"
_CONFLICT = (
    "sequence %s for model '%s' has a conflict. The previous sequence did not end before this sequence start. Previous "
    "sequence will be terminated early."
)
_ROW = attrgetter("active_sequence.row")


class Sequences:
    """The sequences under way of one model, and those that wait for a place.

    Of each sequence, one request at a time is in a Lane or in a Batch; the others wait here, in order. Pure: told the
    time; its caller holds the model's lock. `backlog_requests` and `backlog_bytes` count what waits without a place.
    `remembers`: the model's Instances remember sequences (homes.py). Each runs only those with their places there;
    their Keys end with its seat. The model may identify them by id, so only one of an id has a place (`_standing`); in
    Triton, those that follow it have one too.
    `vacated`: callbacks for when the last sequence at a seat is over and none can begin there. `identities`: only for
    models whose sequences are requests that run again (iterations.py); such a sequence ends with its request.
    """

    def __init__(self, name: str, spec: SequenceSpec, rows: int, instances: int, *, remembers: bool = False) -> None:
        self._name = name
        self._idle_ns = spec.idle_us * 1000
        self._delay_ns = spec.max_delay_us * 1000 if spec.min_utilization else 0
        self._wanted = math.ceil(spec.min_utilization * rows - 1e-6)
        self._corrid = next((control for control in spec.controls if control.kind == "corrid"), None)
        self._shapes = {state.output: state.first_shape for state in spec.states if -1 in state.shape}
        instances = max(instances, 1)
        self.remembers = remembers
        self._standing: set[int | str] = set()
        self.vacated: dict[int, Callable[[], object]] = {}
        self._rows = [InstanceRows() for _ in range(instances)] if spec.direct else None
        self._alike = not self._shapes and (self._rows is None or instances == 1)
        self._places = Places(rows if spec.direct else spec.max_candidates or rows, instances)
        self._hold_backlog = spec.hold_backlog
        self._all: set[UnderWay] = set()
        self._open: dict[int | str, UnderWay] = {}
        text = self._corrid is not None and self._corrid.datatype == "BYTES"
        self.identities = Identities(self._open, text=text) if spec.iterative else None
        self._backlog: OrderedDict[UnderWay, None] = OrderedDict()
        self._idle: OrderedDict[UnderWay, int] = OrderedDict()
        self._nearest_ns = 0
        self.backlog_requests = 0
        self.backlog_bytes = 0

    def __len__(self) -> int:
        return len(self._all)

    # -- arriving ----------------------------------------------------------------------------------------------

    def check(self, request: InferRequest) -> bool:
        """Check a request that has arrived. Returns: whether it would wait for a place.

        Raises: InferError (INVALID: it has no sequence id, or one that is not under way and that it does not start).
        """
        said = request.sequence or NO_SEQUENCE
        to = f"to model '{self._name}'"
        if request.rows != 1:
            raise _invalid(f"inference request {to} must specify batch-size 1 due to requirements of sequence batcher")
        if not said.id and self.identities is not None:
            return not self._places.free
        if not said.id:
            raise _invalid(f"inference request {to} must specify a non-zero or non-empty correlation ID")
        if self._corrid is not None:
            check_id(self._name, self._corrid, said.id)
        one = self._open.get(said.id)
        if one is not None:
            return one.row < 0
        if not said.start:
            text = f"inference request for sequence {said.id} {to} must specify the START flag on the first request of"
            raise _invalid(f"{text} the sequence")
        return not self._places.free or said.id in self._standing

    def admit(self, request: InferRequest, now_ns: int) -> list[InferRequest]:
        """Accept a request that `check` has passed. Returns: what may go to its Lane now."""
        said = request.sequence or NO_SEQUENCE
        if not said.id and self.identities is not None:
            said = request.sequence = self.identities.next()
        one = self._open.get(said.id)
        if one is None:
            one = self._open[said.id] = UnderWay(said.id)
            self._all.add(one)
            if not self._place(one):
                self._backlog[one] = None
        elif said.start:
            logger.warning(_CONFLICT, said.id, self._name)
        self._idle.pop(one, None)
        if said.end:
            self._close(one)
        request.active_sequence = one
        one.waiting.append(request)
        if one.row < 0:
            self.backlog_requests += 1
            self.backlog_bytes += request.nbytes
            return []
        return self._go_on(one, now_ns) if one.current is None else []

    def holds(self, request: InferRequest) -> bool:
        """Whether a request waits here, not in a Lane."""
        return request.active_sequence.current is not request

    def enough(self, live: int, hold: int) -> bool:
        """Whether, of `live` waiting requests, more than `hold` have a place and enough wait for one."""
        return live - self.backlog_requests > hold and self.backlog_requests >= self._hold_backlog

    def expires(self, request: InferRequest) -> bool:
        """Whether a request's timeout counts: only until its sequence has a place, as in Triton."""
        return request.active_sequence.row < 0

    def held(self) -> list[InferRequest]:
        """List the requests that wait here."""
        return [request for one in self._all for request in one.waiting]

    # -- running -----------------------------------------------------------------------------------------------

    def take(self, lane: Lane, limit_rows: int) -> tuple[list[InferRequest], int]:
        """Take the requests of one batch from their Lane, and their rows."""
        most = limit_rows if self._rows is None else self._places.rows
        head = lane.head()
        if head is None or self._alike:
            return lane.take(most)
        first = self._shape(head)
        taken: list[InferRequest] = []
        for request in lane.live_requests():
            if len(taken) < max(most, 1) and self._shape(request) == first:
                lane.remove(request)
                taken.append(request)
        return taken, len(taken)

    def _shape(self, request: InferRequest) -> tuple[object, ...]:
        """Return what must be equal in a batch besides the Key: the Instance, and the shapes of free states."""
        one = request.active_sequence
        states = {} if (request.sequence or NO_SEQUENCE).start else one.states
        shapes = [states[name].shape if name in states else begin for name, begin in self._shapes.items()]
        return (one.instance, *shapes)

    def arrange(self, batch: Batch) -> None:
        """Assign rows to the requests of a closed batch (`batch.row_positions`), if each sequence has its own row."""
        if self._rows is None:
            return
        batch.requests.sort(key=_ROW)
        rows = self._rows[batch.requests[0].active_sequence.instance]
        rows.issued -= len(batch.requests)
        rows.running += len(batch.requests)
        places = list(map(_ROW, batch.requests))
        last = places[-1]
        if rows.issued:
            # requests of other shapes: their rows are part of the run all the same, as in Triton
            instance = batch.requests[0].active_sequence.instance
            last = max(one.row for one in self._all if one.current is not None and one.instance == instance)
        # a model that remembers by row must find each part of a batch at its own rows
        if last >= len(places) or self.remembers:
            batch.row_positions, batch.span_rows = places, last + 1

    def left(self, batch: Batch, now_ns: int) -> list[InferRequest]:
        """Record which requests have run or failed, and which run again. Returns: what may go to its Lane now."""
        ready: list[InferRequest] = []
        for request in batch.requests:
            one = request.active_sequence
            one.current = None
            if self._rows is not None:
                self._rows[one.instance].running -= 1
            if request in batch.rerun_requests:
                go_on(request, now_ns, pinned=self.remembers)
            elif self.identities is not None and not one.waiting:
                self._close(one)
            ready += self._go_on(one, now_ns)
        return ready

    # -- leaving -----------------------------------------------------------------------------------------------

    def cut(self, request: InferRequest, now_ns: int) -> tuple[list[InferRequest], list[InferRequest]]:
        """End a sequence at a request that will not run, because it was cancelled or has expired.

        Returns: the requests behind it, which must not run either, and what may go to its Lane now.
        Source: Triton; a sequence that lacks one of its requests would have a different state.
        """
        one = request.active_sequence
        first = one.waiting.index(request) if one.row >= 0 and one.current is not request else 0
        behind = [one.waiting.pop() for _ in range(len(one.waiting) - first)]
        behind.reverse()
        if one.row < 0:
            self.backlog_requests -= len(behind)
            self.backlog_bytes -= sum(each.nbytes for each in behind)
            del self._backlog[one]
            self._all.remove(one)
        behind = [each for each in behind if each is not request]
        self._close(one)
        if one.row < 0 or one.current not in (request, None):
            return behind, []
        if self._rows is not None and one.current is request:
            self._rows[one.instance].issued -= 1
        one.current = None
        return behind, self._go_on(one, now_ns)

    def idle_ns(self) -> int:
        """Return when `reap` must be called next; 0 for never. Any thread, no lock needed."""
        return self._nearest_ns

    def hurry(self, now_ns: int, *, last: bool) -> None:
        """Stop holding batches open. `last`: also end idle sequences, since nothing will continue them."""
        self._delay_ns, self._idle_ns = 0, 0 if last else self._idle_ns
        self._wake_at(now_ns)

    def reap(self, now_ns: int) -> list[InferRequest]:
        """End sequences that were idle too long, and reassign their places. Returns: what may go to its Lane now."""
        if not 0 < self._nearest_ns <= now_ns:
            return []
        ready: list[InferRequest] = []
        while self._idle:
            one, since_ns = next(iter(self._idle.items()))
            if since_ns + self._idle_ns > now_ns:
                break
            del self._idle[one]
            self._close(one)
            ready += self._release(one, now_ns)
        self._nearest_ns = 0
        if self._idle:
            self._wake_at(next(iter(self._idle.values())) + self._idle_ns)
        for rows in self._rows or ():
            ready += self._gather(rows, now_ns)
        before = -1
        while len(self._backlog) != before:
            before = len(self._backlog)
            ready += self._fill(now_ns)
        return ready

    def _wake_at(self, due_ns: int) -> None:
        self._nearest_ns = min(self._nearest_ns or due_ns, due_ns)

    def _close(self, one: UnderWay) -> None:
        if one.open:
            one.open = False
            del self._open[one.id]

    def _place(self, one: UnderWay) -> bool:
        """Give a sequence the lowest row that is free on any Instance. Returns: whether there is one."""
        place = None if one.id in self._standing else self._places.take()
        if place is not None:
            one.row, one.instance = place
            self._standing.update((one.id,) if self.remembers else ())
        return place is not None

    def _release(self, one: UnderWay, now_ns: int) -> list[InferRequest]:
        """Free the place of a sequence that is over, and give it to the one that has waited longest."""
        self._all.remove(one)
        self._standing.discard(one.id)
        if self._rows is not None:
            self._rows[one.instance].heads.pop(one, None)
        if not self._places.give_back(one.row, one.instance) and not self.stand_at(one.instance):
            self.vacated.pop(one.instance, lambda: None)()
        return self._fill(now_ns) + self._gather_of(one, now_ns)

    def house(self, instance: int, now_ns: int, *, runs: bool) -> None:
        """Let sequences begin at an Instance, or stop that for now. Makes `reap` due: some may have waited for this."""
        self._places.shut(instance, shut=not runs)
        self._wake_at(now_ns)

    def seat(self, seats: Collection[int], now_ns: int) -> None:
        """Let sequences begin at these Instances only; those under way stay where they are. Makes `reap` due."""
        self._places.move(seats, {(one.row, one.instance) for one in self._all if one.row >= 0})
        if self._rows is not None:
            self._rows += [InstanceRows() for _ in range(len(self._rows), max(seats) + 1)]
            self._alike = False
        self._wake_at(now_ns)

    def stand_at(self, seat: int) -> bool:
        """Whether any sequence has its place at an Instance."""
        return any(one.instance == seat and one.row >= 0 for one in self._all)

    def _fill(self, now_ns: int) -> list[InferRequest]:
        """Give a place to the longest-waiting sequence that may have it. Returns: what may go to its Lane now."""
        following = next((each for each in self._backlog if each.id not in self._standing), None)
        if following is None or not self._place(following):
            return []
        del self._backlog[following]
        self.backlog_requests -= len(following.waiting)
        self.backlog_bytes -= sum(request.nbytes for request in following.waiting)
        return self._go_on(following, now_ns)

    def _go_on(self, one: UnderWay, now_ns: int) -> list[InferRequest]:
        """Advance a sequence of which nothing is in a Lane or a Batch. Returns: what may go to a Lane."""
        if one.waiting:
            if self._rows is None:
                return [self._issue(one)]
            self._rows[one.instance].heads[one] = None
        elif one.open:
            self._idle[one] = now_ns
            self._wake_at(now_ns + self._idle_ns)
        else:
            return self._release(one, now_ns)
        return self._gather_of(one, now_ns)

    def _gather_of(self, one: UnderWay, now_ns: int) -> list[InferRequest]:
        return [] if self._rows is None else self._gather(self._rows[one.instance], now_ns)

    def _gather(self, rows: InstanceRows, now_ns: int) -> list[InferRequest]:
        """Release the heads of an Instance's sequences together, once its batch is over and enough are there."""
        if rows.running or not rows.heads:
            return []
        if self._delay_ns and not rows.issued and len(rows.heads) < self._wanted:
            due_ns = min(one.waiting[0].enqueued_ns for one in rows.heads) + self._delay_ns
            if now_ns < due_ns:
                self._wake_at(due_ns)
                return []
        ready = [self._issue(one) for one in rows.heads]
        rows.heads.clear()
        rows.issued += len(ready)
        return ready

    def _issue(self, one: UnderWay) -> InferRequest:
        request = one.current = one.waiting.popleft()
        if self.remembers:
            request.key = (*request.key, pin(one.instance))
        return request


def _invalid(text: str) -> InferError:
    return InferError(Code.INVALID, text)
