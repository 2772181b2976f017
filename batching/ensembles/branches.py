"""Branches: one request on its way through an ensemble in which a step gives any number of answers.

Each answer of such a step has its own Passage through the steps after it. Used by ensembles.py, which carries each
Passage from step to step like any other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.batching.stream import MAX_UNREAD_BYTES, NOT_SINGLE_MESSAGE, StreamedAnswer, answer_bytes

from .passage import Passage, sequence_parameters

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.batching.request import InferRequest
    from penstock.batching.stream import AnswerSink, Backpressure, Resume

    from .course import Course, CourseStep

MAX_ACTIVE = 64
"""The most answers of one request on their way through the same steps if `max_inflight_requests` is unset: further ones
wait, so that one request does not fill all queues."""
PAUSE_BYTES = MAX_UNREAD_BYTES // 4
"""Bytes of answers on their way through the same steps above which the step before is told to wait."""


class _Segment:
    """The Passages of one request on one Course.

    `active_count`: how many are under way or wait to be handed out; `waiting`: those that wait for one of them to end.
    `resume_callbacks`: the callbacks of steps that were told to wait, for when there is room again.
    """

    __slots__ = ("active_count", "nbytes", "resume_callbacks", "waiting")

    def __init__(self) -> None:
        self.active_count = 0
        self.nbytes = 0
        self.waiting: deque[Passage] = deque()
        self.resume_callbacks: list[Resume] = []


class Branches:
    """What is under way for one request: its first Passage, and one for each answer since.

    Invariants: results are handed out in the order of the answers they stem from; at most `max_active` Passages are
    going on a Course, and the step that makes its answers is told to wait once as many wait.
    Threads: the event loop's.
    """

    def __init__(self, root: Passage, max_active: int) -> None:
        self.root = root
        self.active = {root}
        self._max_active = max_active or MAX_ACTIVE
        self._segments: dict[Course, _Segment] = {}
        self._ordered: deque[Passage] = deque()
        self._nbytes: dict[Passage, int] = {}
        self._collected: list[StreamedAnswer] = []
        self._sink: AnswerSink | None = getattr(root.parent, "answer_sink", None)
        self._sink_paused = False

    @property
    def ended(self) -> bool:
        """Whether all of it has ended."""
        return not self.active

    def add(self, step: CourseStep, course: Course, answer: StreamedAnswer) -> Passage | None:
        """Take an answer of a step. Returns: its Passage, if that may begin.

        Raises: InferError (INTERNAL: it does not match the model's configuration; OVERLOADED: too much waits).
        """
        if sum(segment.nbytes for segment in self._segments.values()) > MAX_UNREAD_BYTES:
            raise InferError(Code.OVERLOADED, "too many answers of a request wait for the steps that consume them")
        root = self.root
        passage = Passage(root.ensemble, root.parent, root.links, course, _used_tensors(step, answer))
        _check_answer(passage, step, answer)
        passage.branches = self
        self.active.add(passage)
        segment = self._segments.setdefault(course, _Segment())
        self._nbytes[passage] = answer_bytes(answer)
        segment.nbytes += self._nbytes[passage]
        if course.outputs:
            self._ordered.append(passage)
        if segment.active_count < self._max_active:
            segment.active_count += 1
            return passage
        segment.waiting.append(passage)
        return None

    def backpressure(self, course: Course) -> Backpressure | None:
        """Tell the step before a Course whether to continue, as `AnswerSink.send` does."""
        segment = self._segments.get(course)
        if segment is None or not self._is_full(course, segment, 1):
            return None
        return segment.resume_callbacks.append

    def record_ended(self, passage: Passage) -> list[Passage]:
        """Record that a Passage has ended. Returns: those that may begin now. Raises: InferError."""
        if passage.course.outputs:
            passage.answer = _make_answer(passage)
        self.active.discard(passage)
        passage.ended = True
        passage.tensors.clear()
        if passage is self.root:
            if passage.course.outputs:
                # none of its steps gives separate answers
                self._ordered.append(passage)
        else:
            self.root.add_times(passage)
        startable = [] if passage.course.outputs or passage is self.root else self._release_slot(passage)
        while self._ordered and (answer := self._ordered[0].answer) is not None:
            first = self._ordered.popleft()
            self._emit(answer._replace(final=self.ended and not self._ordered))
            startable += self._release_slot(first)
        self._resume_producers()
        return startable

    def _release_slot(self, passage: Passage) -> list[Passage]:
        segment = self._segments.get(passage.course)
        if segment is None:
            return []
        segment.nbytes -= self._nbytes.pop(passage)
        if segment.waiting:
            return [segment.waiting.popleft()]
        segment.active_count -= 1
        return []

    def _emit(self, answer: StreamedAnswer) -> None:
        if self._sink is None:
            if len(self._collected) < 2:
                self._collected.append(answer)
            return
        room = self._sink.send(answer)
        if room is not None and not self._sink_paused:
            self._sink_paused = True
            room(self._on_sink_resumed)

    def _on_sink_resumed(self) -> None:
        self._sink_paused = False
        self._resume_producers()

    def _is_full(self, course: Course, segment: _Segment, divisor: int) -> bool:
        """Whether the given fraction, one `divisor`th, of the allowed amount is waiting."""
        if self._sink_paused and course.outputs:
            return True
        return len(segment.waiting) * divisor >= self._max_active or segment.nbytes * divisor > PAUSE_BYTES

    def _resume_producers(self) -> None:
        for course, segment in self._segments.items():
            if segment.resume_callbacks and not self._is_full(course, segment, 2):
                callbacks, segment.resume_callbacks = segment.resume_callbacks, []
                for resume in callbacks:
                    resume()

    def drop_all(self) -> set[Passage]:
        """Drop everything. Returns: what was under way."""
        active, self.active = self.active, set()
        self._segments.clear()
        self._ordered.clear()
        return active

    def outputs(self) -> list[Any]:
        """Return the request's outputs: nothing beyond the answers told, or its only answer. Raises: InferError."""
        if self._sink is not None:
            return []
        if len(self._collected) != 1:
            raise InferError(Code.INTERNAL, NOT_SINGLE_MESSAGE)
        named, mismatch = self._collected[0].outputs, self._collected[0].mismatch
        outputs, model = [], self.root.parent.model.name
        for name in _output_names(self.root.parent):
            if name not in named:
                mismatch = mismatch or f"in ensemble '{model}', the answer lacks the requested output '{name}'"
            outputs.append(named.get(name))
        return CustomOutputs(outputs, {}, mismatch) if mismatch else outputs


class AnswerForwarder:
    """Passes the answers of a step on, one by one. `on_answer` receives each, with its Passage and step."""

    def __init__(
        self,
        passage: Passage,
        request: InferRequest,
        on_answer: Callable[[Passage, CourseStep, StreamedAnswer], Backpressure | None],
    ) -> None:
        self._passage = passage
        self._request = request
        self._on_answer = on_answer
        self._is_first = True

    def send(self, answer: StreamedAnswer) -> Backpressure | None:
        """Take an answer. The first one is counted here, as the code that hands out answers does for outside requests.

        One without tensors for the steps after it is dropped. Source: Triton core, ensemble_scheduler.cc.
        """
        if not answer.outputs and answer.error is None:
            return None
        request = self._request
        if self._is_first:
            self._is_first = False
            if request.model.statistics.answers is not None:  # otherwise it counts with its batch
                request.model.statistics.record_first_response(time.monotonic_ns() - request.start_ns)
        return self._on_answer(self._passage, request.step, answer)


def _used_tensors(step: CourseStep, answer: StreamedAnswer) -> list[Any]:
    outputs = step.model.signature.outputs
    return [answer.outputs.get(outputs[position].name) for position in step.used_outputs]


def _check_answer(passage: Passage, step: CourseStep, answer: StreamedAnswer) -> None:
    """Check that what the following steps need is there and acceptable to them. Raises: InferError."""
    mismatch, outputs = answer.mismatch, step.model.signature.outputs
    missing = {number for number, position in enumerate(step.used_outputs) if passage.tensors[number] is None}
    if missing and not mismatch and not passage.tolerates_missing(missing):
        names = [outputs[step.used_outputs[number]].name for number in sorted(missing)]
        mismatch = f"the answer lacks the requested output '{names[0]}'"
    text, tensors = f"model '{step.model.name}': {mismatch}", range(len(step.used_outputs))
    if mismatch and not passage.tolerates_mismatch(step, tensors, passage.tensors[: len(tensors)], text):
        raise InferError(Code.INTERNAL, text)


def _output_names(request: InferRequest) -> list[str]:
    outputs = request.model.signature.outputs
    return [outputs[position].name for position in request.output_positions]


def _make_answer(passage: Passage) -> StreamedAnswer:
    """Make an answer of the ensemble. Raises: InferError."""
    pairs = zip(_output_names(passage.parent), passage.outputs(), strict=True)
    named: Mapping[str, Any] = {name: output for name, output in pairs if output is not None}
    return StreamedAnswer(named, parameters=sequence_parameters(passage.parent), mismatch=passage.mismatch)
