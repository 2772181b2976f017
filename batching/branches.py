"""Branches: one request on its way through an ensemble where a step gives any number of answers.

Each answer of such a step has a Passage to itself through the steps behind it. Called by ensembles.py, which carries
each Passage from step to step as it does any other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError

from .passage import Passage
from .stream import MOST_BYTES, NOT_ONE, Told, size_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .course import Course, Passed
    from .request import InferRequest

MOST_AT_ONCE = 64
"""Answers of one request that are on their way through the same steps, where `max_inflight_requests` is silent: others
wait, so that one request does not fill the queues of all."""


class Branches:
    """What is under way for one request: its first Passage, and one for each answer since.

    Invariant: what came through to the end is handed out in the order in which the answers it stems from came.
    `going` are under way, `most` of them at once on the same Course; others wait. Threads: the event loop's.
    """

    def __init__(self, root: Passage, most: int) -> None:
        self.root = root
        self.going = {root}
        self._most = most or MOST_AT_ONCE
        self._counts: Counter[Course] = Counter()
        self._waiting: dict[Course, deque[Passage]] = {}
        self._line: deque[Passage] = deque()
        self._nbytes: dict[Passage, int] = {}
        self._sum = 0
        self._given: list[Told] = []
        self._answers = getattr(root.parent, "answers", None)

    @property
    def over(self) -> bool:
        """Whether all of it has come to its end."""
        return not self.going

    def add(self, step: Passed, course: Course, told: Told) -> Passage | None:
        """Take an answer of a step. Returns: its Passage, if that may begin.

        Raises: InferError (INTERNAL: it is not what the model's configuration says; OVERLOADED: too much waits).
        """
        if self._sum > MOST_BYTES:
            raise InferError(Code.OVERLOADED, "the answers of a request wait for the steps that take them")
        root = self.root
        passage = Passage(root.ensemble, root.parent, root.links, course, _tensors(step, told))
        _check(passage, step, told)
        passage.branches = self
        self.going.add(passage)
        self._nbytes[passage] = size_of(told)
        self._sum += self._nbytes[passage]
        if course.outputs:
            self._line.append(passage)
        if self._counts[course] < self._most:
            self._counts[course] += 1
            return passage
        self._waiting.setdefault(course, deque()).append(passage)
        return None

    def done(self, passage: Passage) -> Passage | None:
        """Note that a Passage is through. Returns: one that may begin in its place. Raises: InferError."""
        course = passage.course
        if course.outputs:
            passage.answer = _told(passage)
        self.going.discard(passage)
        passage.ended = True
        passage.tensors.clear()
        if passage is self.root:
            if course.outputs:
                # none of its steps tells its answers apart
                self._line.append(passage)
            self._hand_out()
            return None
        self._sum -= self._nbytes.pop(passage)
        self.root.take_times(passage)
        self._hand_out()
        waiting = self._waiting.get(course)
        if waiting:
            return waiting.popleft()
        self._counts[course] -= 1
        return None

    def _hand_out(self) -> None:
        line = self._line
        while line and (told := line[0].answer) is not None:
            line.popleft()
            if self.over and not line:
                told = told._replace(final=True)
            if self._answers is not None:
                self._answers.tell(told)
            elif len(self._given) < 2:
                self._given.append(told)

    def leave(self) -> set[Passage]:
        """Let go of all. Returns: what was under way."""
        going, self.going = self.going, set()
        self._waiting.clear()
        self._line.clear()
        return going

    def outputs(self) -> list[Any]:
        """Give what the request has come to: nothing more than was told, or its only answer. Raises: InferError."""
        if self._answers is not None:
            return []
        if len(self._given) != 1:
            raise InferError(Code.INTERNAL, NOT_ONE)
        named = self._given[0].outputs
        return [named.get(name) for name in _names(self.root.parent)]


class Spread:
    """Where the answers of a step go: on, one by one. `take` has each, with the Passage and the step it is of."""

    def __init__(self, passage: Passage, step: Passed, take: Callable[[Passage, Passed, Told], None]) -> None:
        self._passage = passage
        self._step = step
        self._take = take

    def tell(self, told: Told) -> None:
        """Take an answer. Raises: InferError."""
        self._take(self._passage, self._step, told)


def _tensors(step: Passed, told: Told) -> list[Any]:
    outputs = step.model.signature.outputs
    return [told.outputs.get(outputs[position].name) for position in step.wanted]


def _check(passage: Passage, step: Passed, told: Told) -> None:
    """Check that what the steps behind need is there, and as the model's configuration says. Raises: InferError."""
    wrong, outputs = told.wrong, step.model.signature.outputs
    lacking = {number for number, position in enumerate(step.wanted) if passage.tensors[number] is None}
    if lacking and not wrong and not passage.spares(lacking.difference(passage.course.outputs)):
        names = [outputs[step.wanted[number]].name for number in sorted(lacking)]
        wrong = f"the answer lacks the requested output '{names[0]}'"
    if wrong:
        raise InferError(Code.INTERNAL, f"model '{step.model.name}': {wrong}")


def _names(request: InferRequest) -> list[str]:
    outputs = request.model.signature.outputs
    return [outputs[position].name for position in request.wanted]


def _told(passage: Passage) -> Told:
    """Make an answer of the ensemble. Raises: InferError."""
    pairs = zip(_names(passage.parent), passage.outputs(), strict=True)
    named: Mapping[str, Any] = {name: output for name, output in pairs if output is not None}
    return Told(named)
