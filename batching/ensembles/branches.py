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

from .passage import Passage, told_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.batching.request import InferRequest
    from penstock.batching.stream import AnswerSink, Backpressure, Resume

    from .course import Course, Passed

MOST_AT_ONCE = 64
"""The most answers of one request on their way through the same steps if `max_inflight_requests` is unset: further ones
wait, so that one request does not fill all queues."""
ENOUGH_BYTES = MAX_UNREAD_BYTES // 4
"""Bytes of answers on their way through the same steps above which the step before is told to wait."""


class _Stretch:
    """The Passages of one request on one Course.

    `going`: how many are under way or wait to be handed out; `waiting`: those that wait for a place. `room`: the
    callbacks of steps that were told to wait, for when there is room again.
    """

    __slots__ = ("going", "nbytes", "room", "waiting")

    def __init__(self) -> None:
        self.going = 0
        self.nbytes = 0
        self.waiting: deque[Passage] = deque()
        self.room: list[Resume] = []


class Branches:
    """What is under way for one request: its first Passage, and one for each answer since.

    Invariants: results are handed out in the order of the answers they stem from; at most `most` Passages are going on
    a Course, and the step that makes its answers is told to wait once as many wait.
    Threads: the event loop's.
    """

    def __init__(self, root: Passage, most: int) -> None:
        self.root = root
        self.going = {root}
        self._most = most or MOST_AT_ONCE
        self._stretches: dict[Course, _Stretch] = {}
        self._line: deque[Passage] = deque()
        self._nbytes: dict[Passage, int] = {}
        self._given: list[StreamedAnswer] = []
        self._answers: AnswerSink | None = getattr(root.parent, "answer_sink", None)
        self._takers_full = False

    @property
    def over(self) -> bool:
        """Whether all of it has ended."""
        return not self.going

    def add(self, step: Passed, course: Course, told: StreamedAnswer) -> Passage | None:
        """Take an answer of a step. Returns: its Passage, if that may begin.

        Raises: InferError (INTERNAL: it does not match the model's configuration; OVERLOADED: too much waits).
        """
        if sum(stretch.nbytes for stretch in self._stretches.values()) > MAX_UNREAD_BYTES:
            raise InferError(Code.OVERLOADED, "too many answers of a request wait for the steps that consume them")
        root = self.root
        passage = Passage(root.ensemble, root.parent, root.links, course, _tensors(step, told))
        _check(passage, step, told)
        passage.branches = self
        self.going.add(passage)
        stretch = self._stretches.setdefault(course, _Stretch())
        self._nbytes[passage] = answer_bytes(told)
        stretch.nbytes += self._nbytes[passage]
        if course.outputs:
            self._line.append(passage)
        if stretch.going < self._most:
            stretch.going += 1
            return passage
        stretch.waiting.append(passage)
        return None

    def room(self, course: Course) -> Backpressure | None:
        """Tell the step before a Course whether to continue, as `AnswerSink.tell` does."""
        stretch = self._stretches.get(course)
        if stretch is None or not self._full(course, stretch, 1):
            return None
        return stretch.room.append

    def done(self, passage: Passage) -> list[Passage]:
        """Record that a Passage has ended. Returns: those that may begin now. Raises: InferError."""
        if passage.course.outputs:
            passage.answer = _told(passage)
        self.going.discard(passage)
        passage.ended = True
        passage.tensors.clear()
        if passage is self.root:
            if passage.course.outputs:
                # none of its steps gives separate answers
                self._line.append(passage)
        else:
            self.root.take_times(passage)
        following = [] if passage.course.outputs or passage is self.root else self._leave_place(passage)
        while self._line and (told := self._line[0].answer) is not None:
            first = self._line.popleft()
            self._hand_out(told._replace(final=self.over and not self._line))
            following += self._leave_place(first)
        self._call_for_more()
        return following

    def _leave_place(self, passage: Passage) -> list[Passage]:
        stretch = self._stretches.get(passage.course)
        if stretch is None:
            return []
        stretch.nbytes -= self._nbytes.pop(passage)
        if stretch.waiting:
            return [stretch.waiting.popleft()]
        stretch.going -= 1
        return []

    def _hand_out(self, told: StreamedAnswer) -> None:
        if self._answers is None:
            if len(self._given) < 2:
                self._given.append(told)
            return
        room = self._answers.send(told)
        if room is not None and not self._takers_full:
            self._takers_full = True
            room(self._takers_go_on)

    def _takers_go_on(self) -> None:
        self._takers_full = False
        self._call_for_more()

    def _full(self, course: Course, stretch: _Stretch, part: int) -> bool:
        """Whether the given fraction, one `part`th, of the allowed amount is waiting."""
        if self._takers_full and course.outputs:
            return True
        return len(stretch.waiting) * part >= self._most or stretch.nbytes * part > ENOUGH_BYTES

    def _call_for_more(self) -> None:
        for course, stretch in self._stretches.items():
            if stretch.room and not self._full(course, stretch, 2):
                room, stretch.room = stretch.room, []
                for go_on in room:
                    go_on()

    def leave(self) -> set[Passage]:
        """Drop everything. Returns: what was under way."""
        going, self.going = self.going, set()
        self._stretches.clear()
        self._line.clear()
        return going

    def outputs(self) -> list[Any]:
        """Return the request's outputs: nothing beyond the answers told, or its only answer. Raises: InferError."""
        if self._answers is not None:
            return []
        if len(self._given) != 1:
            raise InferError(Code.INTERNAL, NOT_SINGLE_MESSAGE)
        named, wrong = self._given[0].outputs, self._given[0].mismatch
        outputs, model = [], self.root.parent.model.name
        for name in _names(self.root.parent):
            if name not in named:
                wrong = wrong or f"in ensemble '{model}', the answer lacks the requested output '{name}'"
            outputs.append(named.get(name))
        return CustomOutputs(outputs, {}, wrong) if wrong else outputs


class Spread:
    """Passes the answers of a step on, one by one. `take` receives each, with its Passage and step."""

    def __init__(
        self,
        passage: Passage,
        request: InferRequest,
        take: Callable[[Passage, Passed, StreamedAnswer], Backpressure | None],
    ) -> None:
        self._passage = passage
        self._request = request
        self._take = take
        self._first = True

    def send(self, told: StreamedAnswer) -> Backpressure | None:
        """Take an answer. The first one is counted here, as the code that hands out answers does for outside requests.

        One without tensors for the steps after it is dropped. Source: Triton core, ensemble_scheduler.cc.
        """
        if not told.outputs and told.error is None:
            return None
        request = self._request
        if self._first:
            self._first = False
            if request.model.statistics.answers is not None:  # otherwise it counts with its batch
                request.model.statistics.record_first_response(time.monotonic_ns() - request.start_ns)
        return self._take(self._passage, request.step, told)


def _tensors(step: Passed, told: StreamedAnswer) -> list[Any]:
    outputs = step.model.signature.outputs
    return [told.outputs.get(outputs[position].name) for position in step.wanted]


def _check(passage: Passage, step: Passed, told: StreamedAnswer) -> None:
    """Check that what the following steps need is there and acceptable to them. Raises: InferError."""
    wrong, outputs = told.mismatch, step.model.signature.outputs
    lacking = {number for number, position in enumerate(step.wanted) if passage.tensors[number] is None}
    if lacking and not wrong and not passage.spares(lacking):
        names = [outputs[step.wanted[number]].name for number in sorted(lacking)]
        wrong = f"the answer lacks the requested output '{names[0]}'"
    text, made = f"model '{step.model.name}': {wrong}", range(len(step.wanted))
    if wrong and not passage.bears(step, made, passage.tensors[: len(made)], text):
        raise InferError(Code.INTERNAL, text)


def _names(request: InferRequest) -> list[str]:
    outputs = request.model.signature.outputs
    return [outputs[position].name for position in request.output_positions]


def _told(passage: Passage) -> StreamedAnswer:
    """Make an answer of the ensemble. Raises: InferError."""
    pairs = zip(_names(passage.parent), passage.outputs(), strict=True)
    named: Mapping[str, Any] = {name: output for name, output in pairs if output is not None}
    return StreamedAnswer(named, parameters=told_of(passage.parent), mismatch=passage.wrong)
