"""Ensembles of any shape: every answer is right, every request ends once, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest
from penstock.batching.spec import ModelSpec, Step
from tests.batching.ensembles import House, ensemble_spec, house

GUILTY = 7.0
"""A model `picky` raises when it is given this."""

_MODELS = {"add": ("a b", "sum"), "fork": ("x", "twice less"), "picky": ("x", "y")}


def _run(model: str, values: list[Any]) -> list[Any]:
    if model == "add":
        return [values[0] + values[1]]
    return [values[0] * 2, values[0] - 1] if model == "fork" else [values[0] + 1]


def picky(inputs: list[Any]) -> list[Any]:
    if (inputs[0] == GUILTY).any():
        raise InferError(Code.INVALID, "a guilty row")
    return _run("picky", inputs)


@dataclass(frozen=True)
class Shape:
    """An ensemble and its correct answers."""

    spec: ModelSpec

    def answers(self, value: float, positions: tuple[int, ...]) -> list[float] | None:
        """Return the correct answers; None if a needed step fails."""
        known: dict[str, float] = {"in": value}
        steps = self.spec.ensemble.steps if self.spec.ensemble else ()
        makers = {tensor: step for step in steps for tensor in step.outputs.values()}

        def of(tensor: str) -> float:
            if tensor not in known:
                step = makers[tensor]
                names, outputs = (side.split() for side in _MODELS[step.model])
                inputs = [of(step.inputs[name]) for name in names]
                if step.model == "picky" and inputs[0] == GUILTY:
                    raise InferError(Code.INVALID, "a guilty row")
                results = dict(zip(outputs, _run(step.model, inputs), strict=True))
                known.update({step.outputs[name]: results[name] for name in step.outputs})
            return known[tensor]

        try:
            return [of(self.spec.outputs[position].name) for position in positions]
        except InferError:
            return None


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    tensors, steps = ["in"], list[Step]()
    for number in range(draw(st.integers(1, 7))):
        model = draw(st.sampled_from(sorted(_MODELS)))
        names, outputs = (side.split() for side in _MODELS[model])
        first = "in" if not number else draw(st.sampled_from(tensors))
        inputs = {name: draw(st.sampled_from(tensors)) for name in names} | {names[0]: first}
        renamed = {name: f"{name}{number}" for name in outputs}
        steps.append(Step(model, "", inputs, renamed))
        tensors += renamed.values()
    used = {tensor for step in steps for tensor in step.inputs.values()}
    ends = [tensor for tensor in tensors if tensor not in used]
    more = [tensor for tensor in tensors if tensor in used and tensor != "in" and draw(st.booleans())]
    return Shape(ensemble_spec("e", "in", " ".join([*ends, *more]), *draw(st.permutations(steps))))


@dataclass(frozen=True)
class Submission:
    value: float
    rows: int
    positions: tuple[int, ...]
    turns: int
    """Loop turns after which it is canceled; -1 for never."""


@st.composite
def requests(draw: st.DrawFn, count: int) -> list[Submission]:
    positions = st.lists(st.integers(0, count - 1), min_size=1, max_size=count, unique=True).map(tuple)
    submissions = st.builds(Submission, st.integers(-2, 8).map(float), st.integers(1, 3), positions, st.integers(-1, 6))
    return draw(st.lists(submissions, min_size=1, max_size=12))


async def _ask(system: House, submission: Submission, refused: list[InferRequest]) -> InferRequest:
    request = system.request("e", submission.value, rows=submission.rows, positions=submission.positions)
    try:
        system.engine.submit(request)
    except InferError:
        refused.append(request)
        return request
    if submission.turns >= 0:
        for _ in range(submission.turns):
            await asyncio.sleep(0)
        system.engine.cancel(request)
    return request


async def _check(shape: Shape, every: list[Submission], executor: str, queue: int) -> None:
    async with house() as system:
        for name, sides in _MODELS.items():
            function = picky if name == "picky" else lambda inputs, name=name: _run(name, inputs)
            await system.serve(name, function, *sides, executor=executor, max_queue_requests=queue)
        model = await system.engine.load(shape.spec)
        refused: list[InferRequest] = []
        submitted = await asyncio.gather(*(_ask(system, submission, refused) for submission in every))
        models = system.engine.models()
        assert await system.engine.stop(10) == 0

        delivered = Counter(map(id, system.sink.requests))
        for submission, request in zip(every, submitted, strict=True):
            count = delivered[id(request)]
            if request in refused:
                assert count == 0
            elif submission.turns < 0:
                assert count == 1
            else:
                assert count <= 1
            if count and request.error is None:
                answers = shape.answers(submission.value, submission.positions)
                assert [output.tolist() for output in request.outputs or []] == [
                    [[answer] * 4] * submission.rows for answer in answers or []
                ]
            elif count and not queue:
                assert shape.answers(submission.value, submission.positions) is None
        assert model.ensemble is not None
        assert not model.ensemble.passages
        assert [each.inflight for each in models] == [0] * len(models)


@settings(deadline=None, max_examples=60)
@given(st.data(), shapes(), st.sampled_from(["loop", "thread"]), st.sampled_from([0, 2]))
def test_every_request_ends_once_and_with_the_right_answer(
    data: st.DataObject, shape: Shape, executor: str, queue: int
) -> None:
    every = data.draw(requests(len(shape.spec.outputs)))

    asyncio.run(_check(shape, every, executor, queue))
