"""Course: a request's way through the steps of an ensemble, computed once for each set of outputs.

Pure. Made from the links made by steps.py; followed by passage.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError

if TYPE_CHECKING:
    from penstock.backends.signature import Signature
    from penstock.batching.model import Model
    from penstock.batching.spec import ModelSpec

AS_IS, ADD_ROWS, DROP_ROWS = 0, 1, 2
"""How a tensor is passed on: if only one side has an axis for rows, a single row gains or loses it."""
_KEPT_COURSES = 64


@dataclass(frozen=True, slots=True, eq=False)
class Linked:
    """One step and its model.

    `inputs`: the tensor of each of the model's inputs, None for an optional one that gets none; `ways`: how each is
    passed on. `outputs`: the model's output positions and the tensors they become.
    """

    model: Model
    inputs: tuple[str | None, ...]
    ways: tuple[int, ...]
    outputs: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """One step, for requests that want certain outputs. Tensors are numbers: positions in the request's list.

    `inputs` has -1 for one that gets none; `ways` is None if every tensor is passed on as it is. `frees` are the inputs
    that nothing else reads, `shared` the others, each as often as it is read. `wanted` are the model's outputs that are
    used, and `made` what they become. `asks`: the model needs more of a request than its tensors. `after`, if the step
    gives any number of answers: the Course of each of them, whose inputs are those `wanted`; the step then makes
    nothing within its own Course.
    """

    number: int
    model: Model
    inputs: tuple[int, ...]
    ways: tuple[int, ...] | None
    frees: tuple[int, ...]
    shared: tuple[int, ...]
    wanted: tuple[int, ...]
    made: tuple[int, ...]
    asks: bool
    after: Course | None


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The way of requests that want certain outputs: through the steps these need, and no others.

    A step that gives any number of answers ends a Course, and each answer follows the next one separately. `first` need
    only the request's own inputs. By the step's number: `follow` are those that need only what it makes, `join` those
    that also need what others make, and `missing` how many steps these wait for; `straight` is the step that takes
    exactly what it makes, if nothing else reads any of that. `last` is the step that makes exactly what is wanted, if
    there is one.
    `uses`: how often each tensor with more than one reader is read, once more if it is an output. `outputs` are the
    tensors wanted, passed on by `ways`; there are none if another Course follows. `nothing` is a placeholder for
    tensors yet to be made, and for inputs that get none.
    """

    steps: tuple[Passed, ...]
    first: tuple[Passed, ...]
    follow: tuple[tuple[Passed, ...], ...]
    join: tuple[tuple[Passed, ...], ...]
    straight: tuple[Passed | None, ...]
    last: Passed | None
    missing: dict[int, int]
    uses: dict[int, int]
    outputs: tuple[int, ...]
    ways: tuple[int, ...] | None
    nothing: tuple[None, ...]


@dataclass(slots=True, eq=False)
class Links:
    """The steps of an ensemble with the models that served when they were looked up.

    `nested`: the links of steps that are ensembles, looked up at the same time. `users` counts the requests under way
    and the links that this is nested in; `stale`: no more of them come.
    """

    spec: ModelSpec
    signature: Signature
    steps: tuple[Linked, ...]
    ways: Mapping[str, int]
    nested: dict[Model, Links] = field(default_factory=dict)
    users: int = 0
    stale: bool = False
    _courses: dict[tuple[int, ...], Course] = field(default_factory=dict)

    @property
    def models(self) -> set[Model]:
        """The models, each once."""
        return {step.model for step in self.steps}

    @property
    def decoupled(self) -> bool:
        """Whether a request may have any number of answers, because one of the steps may."""
        return any(step.model.spec.decoupled for step in self.steps)

    def course(self, wanted: tuple[int, ...]) -> Course:
        """Return the Course of requests that want these outputs, by their positions."""
        course = self._courses.get(wanted)
        if course is None:
            if len(self._courses) >= _KEPT_COURSES:
                self._courses.clear()
            course = self._courses[wanted] = self._lay(wanted)
        return course

    def _lay(self, wanted: tuple[int, ...]) -> Course:
        outputs = [self.signature.outputs[position].name for position in wanted]
        ways = tuple(self.ways[tensor] for tensor in outputs)
        needed, steps = set(outputs), set[int]()
        for number in reversed(self._order()):
            step = self.steps[number]
            if needed.intersection(tensor for _, tensor in step.outputs):
                steps.add(number)
                needed.update(tensor for tensor in step.inputs if tensor is not None)
        sources = self.sources()
        source = sources[outputs[0]] if outputs else None
        course: Course | None = None
        while True:
            used = [
                self.steps[number] for number in sorted(steps) if self._source(self.steps[number], sources) == source
            ]
            given = [spec.name for spec in self.signature.inputs]
            if source is not None:
                given = [tensor for _, tensor in sorted(self.steps[source].outputs) if tensor in needed]
            course = _course(used, given, outputs, ways, needed, course)
            if source is None:
                return course
            source, outputs, ways = self._source(self.steps[source], sources), [], ()

    def sources(self) -> dict[str, int | None]:
        """Return for each tensor the last step before it that gives any number of answers; None if there is none.

        Raises: InferError (INVALID) if a step, or the client, would get tensors from answers of different steps.
        """
        sources: dict[str, int | None] = dict.fromkeys(self.signature.input)
        for number in self._order():
            step = self.steps[number]
            source = number if step.model.spec.is_streaming else self._source(step, sources)
            sources.update((tensor, source) for _, tensor in step.outputs)
        self._only(self.spec.name, {sources[tensor] for tensor in self.signature.output})
        return sources

    def _source(self, step: Linked, sources: Mapping[str, int | None]) -> int | None:
        return self._only(step.model.spec.name, {sources[tensor] for tensor in step.inputs if tensor is not None})

    def _only(self, taker: str, found: Iterable[int | None]) -> int | None:
        source, *others = found
        if others:
            text = f"step of model '{taker}' receives inputs originated from different decoupled models"
            raise InferError(Code.INVALID, f"in ensemble {self.spec.name}, {text}")
        return source

    def _order(self) -> list[int]:
        """Return the steps ordered so that each comes after those it needs; check_flow ensures there is an order."""
        there = {spec.name for spec in self.signature.inputs}
        order: list[int] = []
        left = list(range(len(self.steps)))
        while left:
            for number in left:
                if there.issuperset(tensor for tensor in self.steps[number].inputs if tensor is not None):
                    break
            left.remove(number)
            order.append(number)
            there.update(tensor for _, tensor in self.steps[number].outputs)
        return order


def _course(
    used: list[Linked], given: list[str], outputs: list[str], ways: tuple[int, ...], needed: set[str],
    after: Course | None,
) -> Course:  # fmt: skip
    """Compute the way from the tensors `given` to `outputs`, or to a step whose answers continue with `after`."""
    made = [
        tensor for step in used if not step.model.spec.is_streaming for _, tensor in step.outputs if tensor in needed
    ]
    numbers = {tensor: number for number, tensor in enumerate([*given, *made])}
    ends = tuple(numbers[tensor] for tensor in outputs)
    reads = Counter(numbers[tensor] for step in used for tensor in step.inputs if tensor is not None) + Counter(ends)
    passed = tuple(_pass(number, step, numbers, needed, reads, after) for number, step in enumerate(used))
    makers = {tensor: step.number for step in passed for tensor in step.made}
    needs = [{makers[each] for each in step.inputs if each in makers} for step in passed]
    takers = [[each for each in passed if step.number in needs[each.number]] for step in passed]
    follow = tuple(tuple(each for each in taker if len(needs[each.number]) == 1) for taker in takers)
    return Course(
        passed, tuple(step for step in passed if not needs[step.number]), follow,
        tuple(tuple(each for each in taker if len(needs[each.number]) > 1) for taker in takers),
        tuple(next((each for each in follow[step.number] if _takes_all(each, step)), None) for step in passed),
        None if any(ways) else next((step for step in passed if step.made == ends), None),
        {step.number: len(needs[step.number]) for step in passed if len(needs[step.number]) > 1},
        {number: count for number, count in reads.items() if count > 1}, ends, ways if any(ways) else None,
        (None,) * (len(made) + 1),
    )  # fmt: skip


def _takes_all(step: Passed, before: Passed) -> bool:
    return step.inputs == step.frees == before.made and step.ways is None


def _pass(
    number: int, step: Linked, numbers: Mapping[str, int], needed: set[str], reads: Mapping[int, int],
    after: Course | None,
) -> Passed:  # fmt: skip
    model, used = step.model, sorted((position, tensor) for position, tensor in step.outputs if tensor in needed)
    inputs = tuple(-1 if tensor is None else numbers[tensor] for tensor in step.inputs)
    frees = tuple(each for each in inputs if reads[each] == 1)
    shared = tuple(each for each in inputs if reads[each] > 1)
    ways, wanted = step.ways if any(step.ways) else None, tuple(position for position, _ in used)
    asks, streams = model.has_default_timeout or model.spec.reads_parameters, model.spec.is_streaming
    made = () if streams else tuple(numbers[tensor] for _, tensor in used)
    return Passed(number, model, inputs, ways, frees, shared, wanted, made, asks, after if streams else None)
