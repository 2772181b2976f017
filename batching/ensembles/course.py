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
_MAX_CACHED_COURSES = 64


@dataclass(frozen=True, slots=True, eq=False)
class LinkedStep:
    """One step and its model.

    `inputs`: the tensor of each of the model's inputs, None for an optional one that gets none; `row_modes`: how each
    is passed on. `outputs`: the model's output positions and the tensors they become.
    """

    model: Model
    inputs: tuple[str | None, ...]
    row_modes: tuple[int, ...]
    outputs: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class CourseStep:
    """One step, for requests that want certain outputs. Tensors are numbers: positions in the request's list.

    `inputs` has -1 for one that gets none; `row_modes` is None if every tensor is passed on as it is. `sole_reads` are
    the inputs that nothing else reads, `shared_reads` the others, each as often as it is read. `used_outputs` are the
    model's outputs that are used, and `output_tensors` what they become. `needs_terms`: the model needs more of a
    request than its tensors. `next_course`, if the step gives any number of answers: the Course of each of them, whose
    inputs are those `used_outputs`; the step then makes nothing within its own Course.
    """

    number: int
    model: Model
    inputs: tuple[int, ...]
    row_modes: tuple[int, ...] | None
    sole_reads: tuple[int, ...]
    shared_reads: tuple[int, ...]
    used_outputs: tuple[int, ...]
    output_tensors: tuple[int, ...]
    needs_terms: bool
    next_course: Course | None


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """The way of requests that want certain outputs: through the steps these need, and no others.

    A step that gives any number of answers ends a Course, and each answer follows the next one separately.
    `initial_steps` need only the request's own inputs. By the step's number: `sole_successors` are those that need only
    what it makes, `joining_successors` those that also need what others make, and `predecessor_counts` how many steps
    these wait for; `direct_successors` is the step that takes exactly what it makes, if nothing else reads any of that.
    `final_step` is the step that makes exactly what is wanted, if there is one.
    `read_counts`: how often each tensor with more than one reader is read, once more if it is an output. `outputs` are
    the tensors wanted, passed on by `row_modes`; there are none if another Course follows. `empty_tensors` is a
    placeholder for tensors yet to be made, and for inputs that get none.
    """

    steps: tuple[CourseStep, ...]
    initial_steps: tuple[CourseStep, ...]
    sole_successors: tuple[tuple[CourseStep, ...], ...]
    joining_successors: tuple[tuple[CourseStep, ...], ...]
    direct_successors: tuple[CourseStep | None, ...]
    final_step: CourseStep | None
    predecessor_counts: dict[int, int]
    read_counts: dict[int, int]
    outputs: tuple[int, ...]
    row_modes: tuple[int, ...] | None
    empty_tensors: tuple[None, ...]


@dataclass(slots=True, eq=False)
class Links:
    """The steps of an ensemble with the models that served when they were looked up.

    `nested`: the links of steps that are ensembles, looked up at the same time. `user_count` counts the requests under
    way and the links that this is nested in; `stale`: no more of them come.
    """

    spec: ModelSpec
    signature: Signature
    steps: tuple[LinkedStep, ...]
    row_modes: Mapping[str, int]
    nested: dict[Model, Links] = field(default_factory=dict)
    user_count: int = 0
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

    def course(self, output_positions: tuple[int, ...]) -> Course:
        """Return the Course of requests that want these outputs, by their positions."""
        course = self._courses.get(output_positions)
        if course is None:
            if len(self._courses) >= _MAX_CACHED_COURSES:
                self._courses.clear()
            course = self._courses[output_positions] = self._build_course(output_positions)
        return course

    def _build_course(self, output_positions: tuple[int, ...]) -> Course:
        outputs = [self.signature.outputs[position].name for position in output_positions]
        row_modes = tuple(self.row_modes[tensor] for tensor in outputs)
        needed, steps = set(outputs), set[int]()
        for number in reversed(self._topological_order()):
            step = self.steps[number]
            if needed.intersection(tensor for _, tensor in step.outputs):
                steps.add(number)
                needed.update(tensor for tensor in step.inputs if tensor is not None)
        sources = self.streaming_sources()
        source = sources[outputs[0]] if outputs else None
        course: Course | None = None
        while True:
            used = [
                self.steps[number] for number in sorted(steps) if self._source_of(self.steps[number], sources) == source
            ]
            given_tensors = [spec.name for spec in self.signature.inputs]
            if source is not None:
                given_tensors = [tensor for _, tensor in sorted(self.steps[source].outputs) if tensor in needed]
            course = _make_course(used, given_tensors, outputs, row_modes, needed, course)
            if source is None:
                return course
            source, outputs, row_modes = self._source_of(self.steps[source], sources), [], ()

    def streaming_sources(self) -> dict[str, int | None]:
        """Return for each tensor the last step before it that gives any number of answers; None if there is none.

        Raises: InferError (INVALID) if a step, or the client, would get tensors from answers of different steps.
        """
        sources: dict[str, int | None] = dict.fromkeys(self.signature.input)
        for number in self._topological_order():
            step = self.steps[number]
            source = number if step.model.spec.is_streaming else self._source_of(step, sources)
            sources.update((tensor, source) for _, tensor in step.outputs)
        self._single_source(self.spec.name, {sources[tensor] for tensor in self.signature.output})
        return sources

    def _source_of(self, step: LinkedStep, sources: Mapping[str, int | None]) -> int | None:
        return self._single_source(
            step.model.spec.name, {sources[tensor] for tensor in step.inputs if tensor is not None}
        )

    def _single_source(self, model_name: str, sources: Iterable[int | None]) -> int | None:
        source, *others = sources
        if others:
            text = f"step of model '{model_name}' receives inputs originated from different decoupled models"
            raise InferError(Code.INVALID, f"in ensemble {self.spec.name}, {text}")
        return source

    def _topological_order(self) -> list[int]:
        """Return the steps ordered so that each comes after those it needs; check_flow ensures there is an order."""
        available = {spec.name for spec in self.signature.inputs}
        order: list[int] = []
        remaining = list(range(len(self.steps)))
        while remaining:
            for number in remaining:
                if available.issuperset(tensor for tensor in self.steps[number].inputs if tensor is not None):
                    break
            remaining.remove(number)
            order.append(number)
            available.update(tensor for _, tensor in self.steps[number].outputs)
        return order


def _make_course(
    linked_steps: list[LinkedStep], given_tensors: list[str], outputs: list[str], row_modes: tuple[int, ...],
    needed: set[str], next_course: Course | None,
) -> Course:  # fmt: skip
    """Compute the way from `given_tensors` to `outputs`, or to a step whose answers continue with `next_course`."""
    finite_steps = [step for step in linked_steps if not step.model.spec.is_streaming]
    produced = [tensor for step in finite_steps for _, tensor in step.outputs if tensor in needed]
    numbers = {tensor: number for number, tensor in enumerate([*given_tensors, *produced])}
    output_numbers = tuple(numbers[tensor] for tensor in outputs)
    reads = Counter(numbers[tensor] for step in linked_steps for tensor in step.inputs if tensor is not None)
    reads.update(output_numbers)
    steps = tuple(
        _make_step(number, step, numbers, needed, reads, next_course) for number, step in enumerate(linked_steps)
    )
    makers = {tensor: step.number for step in steps for tensor in step.output_tensors}
    predecessors = [{makers[each] for each in step.inputs if each in makers} for step in steps]
    joins = {step.number: len(predecessors[step.number]) > 1 for step in steps}
    successors = [[each for each in steps if step.number in predecessors[each.number]] for step in steps]
    sole_successors = tuple(tuple(each for each in group if not joins[each.number]) for group in successors)
    direct_successors = tuple(
        next((each for each in group if _takes_exactly(each, step)), None)
        for step, group in zip(steps, sole_successors, strict=True)
    )
    returns_tensors = not any(row_modes)
    makers_of_all = (step for step in steps if step.output_tensors == output_numbers)
    return Course(
        steps=steps,
        initial_steps=tuple(step for step in steps if not predecessors[step.number]),
        sole_successors=sole_successors,
        joining_successors=tuple(tuple(each for each in group if joins[each.number]) for group in successors),
        direct_successors=direct_successors,
        final_step=next(makers_of_all, None) if returns_tensors else None,
        predecessor_counts={number: len(predecessors[number]) for number in joins if joins[number]},
        read_counts={number: count for number, count in reads.items() if count > 1},
        outputs=output_numbers,
        row_modes=None if returns_tensors else row_modes,
        empty_tensors=(None,) * (len(produced) + 1),
    )


def _takes_exactly(step: CourseStep, producer: CourseStep) -> bool:
    return step.inputs == step.sole_reads == producer.output_tensors and step.row_modes is None


def _make_step(
    number: int, step: LinkedStep, numbers: Mapping[str, int], needed: set[str], reads: Mapping[int, int],
    next_course: Course | None,
) -> CourseStep:  # fmt: skip
    used = sorted((position, tensor) for position, tensor in step.outputs if tensor in needed)
    inputs = tuple(-1 if tensor is None else numbers[tensor] for tensor in step.inputs)
    streams = step.model.spec.is_streaming
    return CourseStep(
        number=number,
        model=step.model,
        inputs=inputs,
        row_modes=step.row_modes if any(step.row_modes) else None,
        sole_reads=tuple(each for each in inputs if reads[each] == 1),
        shared_reads=tuple(each for each in inputs if reads[each] > 1),
        used_outputs=tuple(position for position, _ in used),
        output_tensors=() if streams else tuple(numbers[tensor] for _, tensor in used),
        needs_terms=step.model.has_default_timeout or step.model.spec.reads_parameters,
        next_course=next_course if streams else None,
    )
