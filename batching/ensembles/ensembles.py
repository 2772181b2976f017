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
from penstock.batching.scheduling.request_checks import check_shapes_cached
from penstock.batching.sinks import deliver_unordered
from penstock.batching.statistics import BACKEND, CANCELED, OTHER, REJECTED

from .branches import AnswerForwarder, Branches
from .ensemble import Ensemble, EnsembleEngine
from .passage import Passage, add_step_times, apply_terms, is_step, links_for, sequence_parameters
from .steps import labels_of, link_steps

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.stream import Backpressure, StreamedAnswer

    from .course import CourseStep

logger = logging.getLogger("penstock.batching")

_NOT_RUN_CODES = frozenset((Code.EXPIRED, Code.NOT_READY, Code.CANCELLED))
"""Error codes of a step that was accepted but not run."""


class Ensembles:
    """Carries the requests of all ensembles of an Engine from step to step; the sink of the steps.

    `on_removed` is told how many requests of a model have ended. Threads: the event loop's.
    """

    def __init__(
        self, engine: EnsembleEngine, on_removed: Callable[[Model, int], None],
        call_at_turn_end: Callable[[Callable[[], None]], None],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._on_removed = on_removed
        self._call_at_turn_end = call_at_turn_end
        self._flush_scheduled = False
        self._registered: set[Ensemble] = set()
        self._resumable: deque[Passage] = deque()
        self._resuming = False
        self._new_steps: defaultdict[Model, list[InferRequest]] = defaultdict(list)
        self._ended: list[InferRequest] = []

    def register(self, model: Model) -> None:
        """Set up an ensemble that is being opened. Raises: InferError if its steps are not served or do not fit."""
        links = link_steps(model.spec, model.binding_signature, self._engine.model)
        model.spec = replace(model.spec, labels=labels_of(links), decoupled=links.decoupled)
        ensemble = Ensemble(model, self._engine)
        model.ensemble, model.intercepts = ensemble, True
        self._registered.add(ensemble)

    def unregister(self, model: Model) -> None:
        """Release a Model that is being retired, if it is an ensemble."""
        if model.ensemble is not None:
            model.ensemble.invalidate_links()
            self._registered.discard(model.ensemble)

    def invalidate_links(self) -> None:
        """Record that a model has been published or withdrawn."""
        for ensemble in self._registered:
            ensemble.invalidate_links()

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
        inputs = parent.inputs if model.forms is None else model.forms.to_model(parent.inputs)
        passage = Passage(ensemble, parent, links, links.course(parent.output_positions), inputs)
        if model.spec.decoupled and model.spec.ensemble is not None:
            passage.branches = Branches(passage, model.spec.ensemble.max_inflight)
        links.user_count += 1
        model.inflight += 1
        ensemble.passages[parent] = passage
        # an output may be one of its own inputs
        passage.submitting = True
        try:
            if parent.sequence is not None:
                ensemble.sequels.add(passage)
            self._advance(passage)
        except Exception as error:  # noqa: BLE001 - it counts as accepted by now
            self._fail(passage, error, REJECTED)
        passage.submitting = False
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._call_at_turn_end(self._flush)
        if passage.ended and parent.error is not None:
            raise parent.error

    def cancel(self, parent: InferRequest) -> None:
        """Withdraw a request: its waiting steps are withdrawn too, and no more are begun."""
        ensemble = parent.model.ensemble
        passage = None if ensemble is None else ensemble.passages.get(parent)
        if passage is not None:
            self._end(passage)
            parent.model.statistics.record_failure(CANCELED, parent.start_ns, time.monotonic_ns())
            self._flush()

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Take finished steps, and continue the requests they belong to."""
        for request in requests:
            passage: Passage = request.context
            if passage.ended:
                continue
            passage.pending.remove(request)
            if request.error is not None:
                self._fail(passage, request.error, OTHER if request.error.code in _NOT_RUN_CODES else BACKEND)
                continue
            step, outputs = request.step, request.outputs or []
            try:
                if type(outputs) is list and self._continue_directly(passage, step, outputs):
                    continue
                passage.store_outputs(step, outputs)
                self._advance(passage)
            except Exception as error:  # noqa: BLE001 - whatever it is, the requests that shared its batch continue
                self._fail(passage, error, BACKEND)
        self._flush()

    def _continue_directly(self, passage: Passage, step: CourseStep, outputs: list[Any]) -> bool:
        """Continue like `store_outputs` and `_advance`, but directly, if what this step made is all that comes next."""
        course = passage.course
        successor = course.direct_successors[step.number]
        if successor is not None and not passage.has_terms:
            passage.remaining_steps -= 1
            try:
                self._create_step(passage, successor, outputs)
            except InferError as error:
                self._fail(passage, error, REJECTED)
            return True
        returns_as_is = passage.branches is None and passage.ensemble.model.forms is None
        if returns_as_is and course.final_step is step and passage.remaining_steps == 1:
            self._complete(passage, outputs)
            return True
        return False

    def _advance(self, passage: Passage) -> None:
        """Continue a request: make its ready steps, which `_flush` submits, or finish it."""
        if not passage.remaining_steps:
            if not passage.ended:
                self._finish(passage)
            return
        try:
            while passage.ready:
                step = passage.ready.pop(0)
                if passage.parent.sequence is None or not passage.ensemble.sequels.hold_back(passage, step):
                    self._create_step(passage, step, passage.take_inputs(step))
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            self._fail(passage, error, REJECTED)

    def _create_step(self, passage: Passage, step: CourseStep, inputs: list[Array | None]) -> None:
        model = step.model
        shapes = tuple([None if array is None else array.shape for array in inputs])
        rows, key = model.admitted_shapes.get(shapes) or check_shapes_cached(model, shapes)
        request = InferRequest(model, inputs, rows, key, step.used_outputs, self)
        request.step = step
        request.context = passage
        request.id = passage.parent.id
        request.nbytes = input_bytes(inputs)
        if passage.has_terms or step.needs_terms:
            apply_terms(passage, step, request)
        if step.next_course is not None:
            request.answer_sink = AnswerForwarder(passage, request, self._on_streamed_answer)
        if passage.submitting:
            # it has waited since then, like a direct request to the step's model
            request.start_ns = request.enqueued_ns = passage.parent.enqueued_ns
        passage.pending.append(request)
        self._new_steps[model].append(request)

    def _flush(self) -> None:
        """Submit the steps that were made, those of a model together, and hand out requests that have ended since."""
        self._flush_scheduled = False
        while self._new_steps or self._ended:
            new_steps, self._new_steps = self._new_steps, defaultdict(list)
            for model, requests in new_steps.items():
                active = [request for request in requests if not request.context.ended]
                try:
                    enqueued = len(active) > 1 and self._engine.submit_together(model, active)
                except Exception:  # each is submitted alone instead, and gets its own error if it fails
                    logger.exception("model %s: the steps of a batch could not be queued together", model.name)
                    enqueued = False
                if not enqueued:
                    for request in active:
                        self._submit(request)
            if self._ended:
                ended, self._ended = self._ended, []
                deliver_unordered(ended)

    def _submit(self, request: InferRequest) -> None:
        model, passage = request.model, request.context
        try:
            if model.cache is None and model.scheduler.is_full():
                # as a transport does: a loop turn may bring more than a queue holds
                self._engine.make_room(model)
            # what ran to make room may have been a step of the same request
            if not passage.ended:
                self._engine.submit(request)
                if request.sequence is not None:
                    self._resume(passage.ensemble.sequels.record_reached(passage, model))
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            if not passage.ended:
                self._fail(passage, error, REJECTED)

    def _on_streamed_answer(self, passage: Passage, step: CourseStep, answer: StreamedAnswer) -> Backpressure | None:
        """Begin the way of one answer of a step. Returns: as `AnswerSink.send`."""
        backpressure = self._start_branch(passage, step, answer)
        self._flush()
        return backpressure

    def _start_branch(self, passage: Passage, step: CourseStep, answer: StreamedAnswer) -> Backpressure | None:
        branches, course = passage.branches, step.next_course
        if passage.ended or branches is None or course is None:
            return None
        if answer.error is not None:
            self._fail(passage, answer.error, BACKEND)
            return None
        try:
            branch = branches.add(step, course, answer) if answer.outputs else None
            if branch is not None:
                self._advance(branch)
            return branches.backpressure(course)
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            self._fail(passage, error, BACKEND)
            return None

    def _resume(self, passages: list[Passage]) -> None:
        """Submit what was kept back, one after another: a failure there releases the next."""
        self._resumable += passages
        if self._resuming:
            return
        self._resuming = True
        try:
            while self._resumable:
                self._advance(self._resumable.popleft())
        finally:
            self._resuming = False

    # -- its end -----------------------------------------------------------------------------------------------

    def _finish(self, passage: Passage) -> None:
        branches = passage.branches
        try:
            if branches is None:
                self._complete(passage, passage.outputs())
            elif startable := branches.record_ended(passage):
                self._resume(startable)
            elif branches.ended:
                self._complete(branches.root, branches.outputs())
        except Exception as error:  # noqa: BLE001 - as in `deliver`
            self._fail(passage, error, BACKEND)

    def _complete(self, passage: Passage, outputs: list[Any]) -> None:
        parent = passage.parent
        if parent.sequence is not None:
            own_outputs = outputs if type(outputs) is CustomOutputs else CustomOutputs(outputs, {})
            own_outputs.parameters |= sequence_parameters(parent)
            outputs = own_outputs
        parent.outputs = outputs
        self._conclude(passage)

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
        self._conclude(passage, reason)

    def _conclude(self, passage: Passage, reason: str = "") -> None:
        """End a request that has its answer, and count it. It is handed out whatever fails here."""
        parent = passage.parent
        try:
            self._end(passage)
        except Exception:
            logger.exception("ensemble %s: the resources of a request could not all be released", parent.model.name)
        is_raised = passage.submitting and parent.error is not None
        if not is_raised:
            self._ended.append(parent)
        try:
            now_ns = time.monotonic_ns()
            if reason:
                parent.model.statistics.record_failure(reason, parent.start_ns, now_ns)
            else:
                parent.model.statistics.record_single(parent, passage.stamps(), now_ns)
            trace = self._engine.trace
            if (trace is not None or is_step(parent)) and not is_raised:
                batch = passage.batch()
                add_step_times(batch)
                if trace is not None:
                    trace(parent.model, batch, now_ns)
        except Exception:
            logger.exception("ensemble %s: the statistics of a request were lost", parent.model.name)

    def _end(self, passage: Passage) -> None:
        """End a request; `passage` is its first one."""
        # first the entry that marks it as under way, so that it ends only once
        del passage.ensemble.passages[passage.parent]
        self._on_removed(passage.parent.model, 1)
        self._cancel_pending(passage)
        if passage.branches is not None:
            for branch in passage.branches.drop_all():
                self._cancel_pending(branch)
        passage.ensemble.release_links(passage.links)
        if passage.parent.sequence is not None:
            self._resume(passage.ensemble.sequels.remove(passage))

    def _cancel_pending(self, passage: Passage) -> None:
        passage.ended = True
        passage.tensors.clear()
        if passage.pending:
            pending, passage.pending = passage.pending, []
            for request in pending:
                self._engine.cancel(request)
