"""Passage: one request on its way through an ensemble: its tensors, what is missing, and the time of its steps.

Nothing runs here: ensembles.py carries it from step to step, and dispatcher.py counts the steps' batches. If a step
gives any number of answers, each has its own Passage; branches.py holds those of one request together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch, Stamps
from penstock.batching.running.custom_outputs import CustomOutputs, require_matching
from penstock.batching.scheduling.timeouts import queue_deadline_ns

from .course import ADD_ROWS, AS_IS, Course, CourseStep, Links

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.stream import StreamedAnswer

    from .branches import Branches
    from .ensemble import Ensemble

logger = logging.getLogger("penstock.batching")

StepTimes = tuple[int, int, int]
"""The time of steps for their inputs, their runs and their outputs, in nanoseconds."""
ZERO_TIMES: StepTimes = (0, 0, 0)
_MAX_SIGNED = (1 << 63) - 1


class Passage:
    """One request on its way through an ensemble.

    Invariant: it ends once: when all its steps are through, with the first error, or when it is withdrawn. `tensors`
    are numbered as in its Course, None once nothing will read them, as the last one always is. `remaining_reads` and
    `missing_predecessors` count down the Course's numbers. `pending` are the steps submitted to the Engine, `ready`
    those to submit next. `has_terms`: the request specifies more than tensors. `submitting`: it is still being
    submitted, so an error is raised to its caller. `branches` is set if the ensemble gives any number of answers;
    `answer` is then the result of a Passage that has ended. `mismatch` says how an output of user code deviates from
    the configuration, "" if none does. `times_ns` and `queue_ns` are summed over the steps, as in Triton.
    """

    __slots__ = (
        "answer", "branches", "course", "ended", "ensemble", "has_terms", "links", "mismatch", "missing_predecessors",
        "missing_text", "parent", "pending", "queue_ns", "ready", "remaining_reads", "remaining_steps", "submitting",
        "tensors", "times_ns",
    )  # fmt: skip

    def __init__(
        self, ensemble: Ensemble, parent: InferRequest, links: Links, course: Course, inputs: Sequence[Any]
    ) -> None:
        self.ensemble = ensemble
        self.parent = parent
        self.links = links
        self.course = course
        self.branches: Branches | None = None
        self.answer: StreamedAnswer | None = None
        self.tensors: list[Any] = [*inputs, *course.empty_tensors]
        self.remaining_reads = course.read_counts and course.read_counts.copy()
        self.missing_predecessors = course.predecessor_counts and course.predecessor_counts.copy()
        self.remaining_steps = len(course.steps)
        self.pending: list[InferRequest] = []
        self.ready = list(course.initial_steps)
        self.has_terms = bool(parent.deadline_ns or parent.priority or parent.target_ns or parent.sequence is not None)
        self.submitting = False
        self.ended = False
        self.queue_ns = 0
        self.times_ns = ZERO_TIMES
        self.mismatch = self.missing_text = ""

    @property
    def root(self) -> Passage:
        """The request's first Passage."""
        return self if self.branches is None else self.branches.root

    def add_times(self, other: Passage) -> None:
        """Add the times of another's steps."""
        self.queue_ns += other.queue_ns
        self.times_ns = _sum(self.times_ns, other.times_ns)

    def stamps(self) -> Stamps:
        """Return the stamps of the batch that its model would have run, computed from the sums."""
        input_ns, infer_ns, output_ns = self.times_ns
        start_ns = self.parent.enqueued_ns + self.queue_ns
        gathered_ns = start_ns + input_ns
        run_ns = gathered_ns + infer_ns
        return start_ns, gathered_ns, run_ns, run_ns + output_ns

    def batch(self) -> Batch:
        """Make that batch."""
        parent = self.parent
        batch = Batch([parent], parent.rows, parent.key, 0)
        batch.exec_start_ns, batch.compute_start_ns, batch.compute_end_ns, batch.exec_end_ns = self.stamps()
        return batch

    def store_outputs(self, step: CourseStep, outputs: list[Any]) -> None:
        """Store what a step has made; adds to `ready` what can follow. Raises: InferError (INTERNAL)."""
        if type(outputs) is CustomOutputs and outputs.mismatch:
            is_tolerated = outputs.incomplete and self.tolerates_missing(
                _missing_tensors(step, outputs), outputs.mismatch
            )
            if not is_tolerated and not self.tolerates_mismatch(step, step.output_tensors, outputs, outputs.mismatch):
                require_matching(outputs)
        tensors, course, number = self.tensors, self.course, step.number
        for tensor, output in zip(step.output_tensors, outputs, strict=True):
            tensors[tensor] = output
        self.ready += course.sole_successors[number]
        for successor in course.joining_successors[number]:
            self.missing_predecessors[successor.number] -= 1
            if not self.missing_predecessors[successor.number]:
                self.ready.append(successor)
        self.remaining_steps -= 1

    def tolerates_mismatch(
        self, step: CourseStep, tensors: Sequence[int], outputs: Sequence[Any], mismatch: str
    ) -> bool:
        """Whether what a step has made may be passed on despite deviating from the configuration; records how it does.

        The next consumer checks the shape; the datatype must be that of the step's model.
        """
        if self.ensemble.model.forms is not None:
            return False
        specs, read_tensors = (
            step.model.signature.outputs,
            {number for each in self.course.steps for number in each.inputs},
        )
        for position, tensor, output in zip(step.used_outputs, tensors, outputs, strict=True):
            if output is None or (tensor in read_tensors and output.dtype != specs[position].type.dtype):
                return False
        if not set(self.course.outputs).isdisjoint(tensors):
            self.mismatch = mismatch
        return True

    def tolerates_missing(self, missing: set[int], mismatch: str = "") -> bool:
        """Whether no step needs these missing tensors. Records that outputs which the client wants are missing.

        Source: Triton core, ensemble_scheduler.cc; so is the log line.
        """
        steps = self.course.steps
        reads = [each for step in steps for each in zip(step.inputs, step.model.signature.inputs, strict=True)]
        if not all(spec.optional for number, spec in reads if number in missing):
            return False
        model = self.ensemble.model
        for number, position in zip(self.course.outputs, self.parent.output_positions, strict=False):
            if number in missing:
                name = model.signature.outputs[position].name
                logger.debug("ensemble %s: Composing models did not output tensor %s", model.name, name)
                self.missing_text = f"in ensemble '{model.name}', {mismatch}"
        return True

    def take_inputs(self, step: CourseStep) -> list[Array | None]:
        """Return the inputs of a step. Raises: InferError (INVALID)."""
        tensors = self.tensors
        inputs: list[Array | None] = [*map(tensors.__getitem__, step.inputs)]
        for number in step.sole_reads:
            tensors[number] = None
        for number in step.shared_reads:
            self.remaining_reads[number] -= 1
            if not self.remaining_reads[number]:
                tensors[number] = None
        return inputs if step.row_modes is None else [*map(_convert_rows, inputs, step.row_modes)]

    def outputs(self) -> list[Any]:
        """Return the outputs that the request wanted. Raises: InferError (INVALID)."""
        outputs = [self.tensors[number] for number in self.course.outputs]
        if self.course.row_modes is not None:
            outputs = [
                _convert_rows(output, row_mode) for output, row_mode in zip(outputs, self.course.row_modes, strict=True)
            ]
        model = self.ensemble.model
        if model.forms is not None:
            outputs = model.forms.to_client(model.name, self.parent.output_positions, outputs)
        if self.mismatch or self.missing_text:
            return CustomOutputs(outputs, {}, self.mismatch or self.missing_text, incomplete=not self.mismatch)
        return outputs


def _missing_tensors(step: CourseStep, outputs: list[Any]) -> set[int]:
    return {tensor for tensor, output in zip(step.output_tensors, outputs, strict=True) if output is None}


def _convert_rows(array: Array | None, row_mode: int) -> Any:
    """Add or remove the axis of a single row, without a copy."""
    if array is None or row_mode == AS_IS:
        return array
    if row_mode == ADD_ROWS:
        return array[None]
    if not array.shape or len(array) != 1:
        rows = len(array) if array.shape else "no"
        text = f"a tensor that is passed to a model without a batch axis must have one row, not {rows}"
        raise InferError(Code.INVALID, text)
    return array[0]


def apply_terms(passage: Passage, step: CourseStep, request: InferRequest) -> None:
    """Apply the request's queueing terms to a step, and pass on its parameters if the step's model takes any."""
    model, parent = step.model, passage.parent
    if parent.deadline_ns or model.has_default_timeout:
        request.deadline_ns = _deadline_ns(passage, model)
    request.priority, request.sequence = parent.priority, parent.sequence
    if parent.target_ns and passage.root is passage:
        request.target_ns = parent.target_ns
    if model.spec.reads_parameters and (parameters := getattr(parent, "parameters", None)):
        request.parameters = parameters


def _deadline_ns(passage: Passage, model: Model) -> int:
    """Return when a step must have left its queue: by the request's remaining time and the model's own policy.

    A Passage of one answer of many has the request's whole time again.
    """
    now_ns, parent = time.monotonic_ns(), passage.parent
    since_ns = now_ns if passage.root is passage else parent.enqueued_ns
    remaining_us = max((parent.deadline_ns - since_ns) // 1000, 1) if parent.deadline_ns else 0
    return queue_deadline_ns(now_ns, remaining_us, model.spec.policy, priority=parent.priority, min_honored_us=0)


def sequence_parameters(request: InferRequest) -> dict[str, Any]:
    """Return the parameters that an ensemble's answers have for a request of a sequence; empty for other requests.

    Source: Triton core, ensemble_scheduler.cc, which sets them for every request.
    """
    in_sequence = request.sequence
    if in_sequence is None:
        return {}
    sequence_id = in_sequence.id
    if type(sequence_id) is int and sequence_id > _MAX_SIGNED:  # as in Triton, whose parameter is signed
        sequence_id -= 1 << 64
    return {"sequence_id": sequence_id, "sequence_start": in_sequence.start, "sequence_end": in_sequence.end}


def is_step(request: InferRequest) -> bool:
    """Whether a request is a step of one that was accepted before."""
    return type(request.context) is Passage


def links_for(request: InferRequest, ensemble: Ensemble) -> Links:
    """Return the links for a request. Those of a step were looked up with its parent, and may be outdated.

    Raises: InferError.
    """
    passage = request.context
    if type(passage) is Passage and not passage.ended:
        return passage.links.nested[ensemble.model]
    return ensemble.links()


def add_step_times(batch: Batch) -> None:
    """Add a batch's times to the sums of those of its requests that are steps."""
    start_ns = batch.exec_start_ns
    # as in statistics.py: a difference just below 0 is 0
    batch_times = (
        max(batch.compute_start_ns - start_ns, 0),
        max(batch.compute_end_ns - batch.compute_start_ns, 0),
        max(batch.exec_end_ns - batch.compute_end_ns, 0),
    )
    previous, total = None, batch_times
    for request in batch.requests:
        passage = request.context
        if type(passage) is Passage:
            if passage.times_ns is not previous:
                # steps that came here together share one tuple, so its sum is computed once
                previous = passage.times_ns
                total = _sum(previous, batch_times)
            passage.times_ns = total
            queue_ns = start_ns - request.enqueued_ns
            if queue_ns > 0:
                passage.queue_ns += queue_ns


def _sum(one: StepTimes, other: StepTimes) -> StepTimes:
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]
