"""Ensembles: models made of models. Each request becomes a request per step, once the step's inputs are there.

Steps wait in the queues of their models like any request, so steps of different requests share batches. Tensors are
passed on as they are. steps.py determines the order of steps; branches.py handles the answers of a step that gives any
number of them.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.registry import STOPPING_MESSAGE
from penstock.batching.request import InferRequest, input_bytes
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.batching.scheduling.admission import admitted
from penstock.batching.sinks import deliver_unordered
from penstock.batching.statistics import BACKEND, CANCELED, OTHER, REJECTED

from .branches import Branches, Spread
from .ensemble import Carries, Ensemble
from .passage import Passage, count_steps, hand_on, is_step, links_for, told_of
from .steps import labels_of, link

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.stream import Backpressure, StreamedAnswer

    from .course import Passed

logger = logging.getLogger("penstock.batching")

_OTHERS = frozenset((Code.EXPIRED, Code.NOT_READY, Code.CANCELLED))
"""Error codes of a step that was accepted but not run."""


class Ensembles:
    """Carries the requests of all ensembles of an Engine from step to step; the sink of the steps.

    `left` is told how many requests of a model have ended. `begin` schedules a call for the end of this loop turn.
    Threads: the event loop's.
    """

    def __init__(
        self, engine: Carries, left: Callable[[Model, int], None], begin: Callable[[Callable[[], None]], None]
    ) -> None:
        self._engine = engine
        self._left = left
        self._begin = begin
        self._beginning = False
        self._open: set[Ensemble] = set()
        self._freed: deque[Passage] = deque()
        self._freeing = False
        self._made: defaultdict[Model, list[InferRequest]] = defaultdict(list)
        self._done: list[InferRequest] = []

    def adopt(self, model: Model) -> None:
        """Set up an ensemble that is being opened. Raises: InferError if its steps are not served or do not fit."""
        links = link(model.spec, model.binding_signature, self._engine.model)
        model.spec = replace(model.spec, labels=labels_of(links), decoupled=links.decoupled)
        ensemble = Ensemble(model, self._engine)
        model.ensemble, model.intercepts = ensemble, True
        self._open.add(ensemble)

    def dismiss(self, model: Model) -> None:
        """Release a Model that is being retired, if it is an ensemble."""
        if model.ensemble is not None:
            model.ensemble.forget()
            self._open.discard(model.ensemble)

    def forget(self) -> None:
        """Record that a model has been published or withdrawn."""
        for ensemble in self._open:
            ensemble.forget()

    # -- a request ---------------------------------------------------------------------------------------------

    def start(self, parent: InferRequest) -> None:
        """Begin a request: its first steps, all or none, are submitted to their models at the end of the loop turn.

        Raises: InferError if it cannot be begun; later errors of a step are delivered.
        """
        model = parent.model
        ensemble = model.ensemble
        if ensemble is None:
            raise ValueError(f"'{model.name}' is not an ensemble")
        try:
            # the steps of an accepted request are finished even then
            if (self._engine.stopping or model.closing) and not is_step(parent):
                raise InferError(Code.NOT_READY, f"in ensemble '{model.name}', {STOPPING_MESSAGE}")
            links = links_for(parent, ensemble)
        except InferError:
            model.statistics.record_failure(REJECTED, parent.start_ns, time.monotonic_ns())
            raise
        inputs = parent.inputs if model.forms is None else model.forms.enter(parent.inputs)
        passage = Passage(ensemble, parent, links, links.course(parent.output_positions), inputs)
        if model.spec.decoupled and model.spec.ensemble is not None:
            passage.branches = Branches(passage, model.spec.ensemble.max_inflight)
        links.users += 1
        model.inflight += 1
        ensemble.passages[parent] = passage
        # an output may be one of its own inputs
        passage.opening = True
        try:
            if parent.sequence is not None:
                ensemble.sequels.enter(passage)
            self._go(passage)
        except Exception as error:  # noqa: BLE001 - it counts as accepted by now
            self._fail(passage, error, REJECTED)
        passage.opening = False
        if not self._beginning:
            self._beginning = True
            self._begin(self._settle)
        if passage.ended and parent.error is not None:
            raise parent.error

    def cancel(self, parent: InferRequest) -> None:
        """Withdraw a request: its waiting steps are withdrawn too, and no more are begun."""
        ensemble = parent.model.ensemble
        passage = None if ensemble is None else ensemble.passages.get(parent)
        if passage is not None:
            self._end(passage)
            parent.model.statistics.record_failure(CANCELED, parent.start_ns, time.monotonic_ns())
            self._settle()

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take finished steps, and continue the requests they belong to."""
        for request in requests:
            passage: Passage = request.context
            if passage.ended:
                continue
            passage.pending.remove(request)
            if request.error is not None:
                self._fail(passage, request.error, OTHER if request.error.code in _OTHERS else BACKEND)
                continue
            step, outputs = request.step, request.outputs or []
            try:
                if type(outputs) is list and self._goes_straight(passage, step, outputs):
                    continue
                passage.put(step, outputs)
                self._go(passage)
            except Exception as error:  # noqa: BLE001 - whatever it is, the requests that shared its batch continue
                self._fail(passage, error, BACKEND)
        self._settle()

    def _goes_straight(self, passage: Passage, step: Passed, outputs: list[Any]) -> bool:
        """Continue like `put` and `_go`, but directly, if what this step made is all that comes next."""
        course = passage.course
        following = course.straight[step.number]
        if following is not None and not passage.asks:
            passage.left -= 1
            try:
                self._make(passage, following, outputs)
            except InferError as error:
                self._fail(passage, error, REJECTED)
            return True
        whole = passage.branches is None and passage.ensemble.model.forms is None
        if whole and course.last is step and passage.left == 1:
            self._complete(passage, outputs)
            return True
        return False

    def _go(self, passage: Passage) -> None:
        """Continue a request: make its ready steps, which `_settle` submits, or finish it."""
        if not passage.left:
            if not passage.ended:
                self._finish(passage)
            return
        try:
            while passage.ready:
                step = passage.ready.pop(0)
                if passage.parent.sequence is None or not passage.ensemble.sequels.keeps(passage, step):
                    self._make(passage, step, passage.inputs(step))
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            self._fail(passage, error, REJECTED)

    def _make(self, passage: Passage, step: Passed, inputs: list[Array | None]) -> None:
        model = step.model
        shapes = tuple([None if array is None else array.shape for array in inputs])
        rows, key = model.admitted_shapes.get(shapes) or admitted(model, shapes)
        request = InferRequest(model, inputs, rows, key, step.wanted, self)
        request.step = step
        request.context = passage
        request.id = passage.parent.id
        request.nbytes = input_bytes(inputs)
        if passage.asks or step.asks:
            hand_on(passage, step, request)
        if step.after is not None:
            request.answer_sink = Spread(passage, request, self._spread)
        if passage.opening:
            # it has waited since then, like a direct request to the step's model
            request.start_ns = request.enqueued_ns = passage.parent.enqueued_ns
        passage.pending.append(request)
        self._made[model].append(request)

    def _settle(self) -> None:
        """Submit the steps that were made, those of a model together, and hand out requests that have ended since."""
        self._beginning = False
        while self._made or self._done:
            made, self._made = self._made, defaultdict(list)
            for model, requests in made.items():
                live = [request for request in requests if not request.context.ended]
                try:
                    together = len(live) > 1 and self._engine.submit_together(model, live)
                except Exception:  # each is submitted alone instead, and gets its own error if it fails
                    logger.exception("model %s: the steps of a batch could not be queued together", model.name)
                    together = False
                if not together:
                    for request in live:
                        self._submit(request)
            if self._done:
                done, self._done = self._done, []
                deliver_unordered(done)

    def _submit(self, request: InferRequest) -> None:
        model, passage = request.model, request.context
        try:
            if model.cache is None and model.scheduler.full():
                # as a transport does: a loop turn may bring more than a queue holds
                self._engine.make_room(model)
            # what ran to make room may have been a step of the same request
            if not passage.ended:
                self._engine.submit(request)
                if request.sequence is not None:
                    self._go_on(passage.ensemble.sequels.passed(passage, model))
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            if not passage.ended:
                self._fail(passage, error, REJECTED)

    def _spread(self, passage: Passage, step: Passed, told: StreamedAnswer) -> Backpressure | None:
        """Begin the way of one answer of a step. Returns: as `AnswerSink.tell`."""
        room = self._spread_on(passage, step, told)
        self._settle()
        return room

    def _spread_on(self, passage: Passage, step: Passed, told: StreamedAnswer) -> Backpressure | None:
        branches, course = passage.branches, step.after
        if passage.ended or branches is None or course is None:
            return None
        if told.error is not None:
            self._fail(passage, told.error, BACKEND)
            return None
        try:
            branch = branches.add(step, course, told) if told.outputs else None
            if branch is not None:
                self._go(branch)
            return branches.room(course)
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            self._fail(passage, error, BACKEND)
            return None

    def _go_on(self, freed: list[Passage]) -> None:
        """Submit what was kept back, one after another: a failure there releases the next."""
        self._freed += freed
        if self._freeing:
            return
        self._freeing = True
        try:
            while self._freed:
                self._go(self._freed.popleft())
        finally:
            self._freeing = False

    # -- its end -----------------------------------------------------------------------------------------------

    def _finish(self, passage: Passage) -> None:
        branches = passage.branches
        try:
            if branches is None:
                self._complete(passage, passage.outputs())
            elif following := branches.done(passage):
                self._go_on(following)
            elif branches.over:
                self._complete(branches.root, branches.outputs())
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            self._fail(passage, error, BACKEND)

    def _complete(self, passage: Passage, outputs: list[Any]) -> None:
        parent = passage.parent
        if parent.sequence is not None:
            own = outputs if type(outputs) is CustomOutputs else CustomOutputs(outputs, {})
            own.parameters |= told_of(parent)
            outputs = own
        parent.outputs = outputs
        self._over(passage)

    def _fail(self, passage: Passage, error: Exception, reason: str) -> None:
        """End a request with a step's error, in Triton's form."""
        passage = passage.root
        parent = passage.parent
        if not isinstance(error, InferError):
            logger.error("ensemble %s: a request could not be continued", parent.model.name, exc_info=error)
            error = InferError(Code.INTERNAL, "the request could not be continued")
        if parent not in passage.ensemble.passages:  # it had already ended
            return
        text = f"in ensemble '{parent.model.name}', {error.message}"
        parent.error = InferError(error.code, text, error.retry_after_ns)
        self._over(passage, reason)

    def _over(self, passage: Passage, reason: str = "") -> None:
        """End a request that has its answer, and count it. It is handed out whatever fails here."""
        parent = passage.parent
        try:
            self._end(passage)
        except Exception:
            logger.exception("ensemble %s: the resources of a request could not all be released", parent.model.name)
        raised = passage.opening and parent.error is not None
        if not raised:
            self._done.append(parent)
        try:
            now_ns = time.monotonic_ns()
            if reason:
                parent.model.statistics.record_failure(reason, parent.start_ns, now_ns)
            else:
                parent.model.statistics.record_single(parent, passage.stamps(), now_ns)
            trace = self._engine.trace
            if (trace is not None or is_step(parent)) and not raised:
                batch = passage.batch()
                count_steps(batch)
                if trace is not None:
                    trace(parent.model, batch, now_ns)
        except Exception:
            logger.exception("ensemble %s: the statistics of a request were lost", parent.model.name)

    def _end(self, passage: Passage) -> None:
        """End a request; `passage` is its first one."""
        # first the entry that marks it as under way, so that it ends only once
        del passage.ensemble.passages[passage.parent]
        self._left(passage.parent.model, 1)
        self._take_back(passage)
        if passage.branches is not None:
            for branch in passage.branches.leave():
                self._take_back(branch)
        passage.ensemble.leave(passage.links)
        if passage.parent.sequence is not None:
            self._go_on(passage.ensemble.sequels.leave(passage))

    def _take_back(self, passage: Passage) -> None:
        passage.ended = True
        passage.tensors.clear()
        if passage.pending:
            pending, passage.pending = passage.pending, []
            for request in pending:
                self._engine.cancel(request)
