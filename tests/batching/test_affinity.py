"""Models that keep the state of sequences themselves: several Instances, and Instances that are lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Backend
from penstock.backends.errors import Code, DeviceLost, InferError, RunStopped
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InSequence, RequestOptions
from penstock.batching.spec import BatchPolicy, Control, InstanceGroup, ModelSpec, SequenceSpec
from tests.fakes import PATIENCE_S, FakeBackend

pytestmark = pytest.mark.anyio

COLUMN = (-1, 1)
GRAPH = Signature(
    (TensorSpec("x", "FP32", COLUMN), TensorSpec("start", "INT32", COLUMN), TensorSpec("ready", "INT32", COLUMN),
     TensorSpec("id", "INT64", COLUMN)),
    (TensorSpec("y", "FP32", COLUMN),),
)  # fmt: skip
SEQUENCE = SequenceSpec(
    idle_us=60_000_000,
    controls=(
        Control("start", "start", "INT32"), Control("ready", "ready", "INT32"), Control("id", "corrid", "INT64"),
    ),
)  # fmt: skip
ROWS = 2
LATE = 77.0
SPEC = ModelSpec(
    "m", 1, Path("m"), "fake", policy=BatchPolicy(max_batch_rows=ROWS), sequence=SEQUENCE, instances=(InstanceGroup(2),)
)
TWO_DEVICES = (InstanceGroup(1, ("cuda:0", "cuda:1")),)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Loads:
    """Loads models that keep state: sums by row for direct sequences, else by sequence id.

    `befalls` says what happens to a run once it has taken in what it was given.
    """

    def __init__(self, befalls: Callable[[list[float]], Exception | None] = lambda _: None, *, direct: bool) -> None:
        self.devices: list[str] = []
        self.refuses = False
        self._befalls = befalls
        self._direct = direct

    def __call__(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        if self.refuses:
            raise InferError(Code.INTERNAL, "it does not load")
        self.devices.append(device)
        sums: dict[int, float] = {}

        def add_up(inputs: list[Any]) -> list[Any]:
            x, start, ready, identity = (each.ravel().tolist() for each in inputs)
            keys = range(len(x)) if self._direct else identity
            for value, begins, there, key in zip(x, start, ready, keys, strict=True):
                if there:
                    sums[key] = value + (0 if begins else sums.get(key, 0))
            error = self._befalls([value for value, there in zip(x, ready, strict=True) if there])
            if isinstance(error, RunStopped):
                sums.clear()  # its session is closed
            if error is not None:
                raise error
            return [np.array([[sums.get(key, 0)] for key in keys], np.float32)]

        return FakeBackend(GRAPH, add_up, stateful=True)


@asynccontextmanager
async def served(loads: Loads, spec: ModelSpec) -> AsyncIterator[tuple[Engine, Model]]:
    engine = Engine(asyncio.get_running_loop(), {"fake": loads})
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield engine, await engine.load(spec)
    finally:
        await engine.stop(PATIENCE_S)


async def ask(it: tuple[Engine, Model], value: float, identity: int, flags: str = "") -> float | str:
    engine, model = it
    terms = RequestOptions(sequence=InSequence(identity, "s" in flags, "e" in flags))
    try:
        (answer,) = await engine.infer(model, [np.full((1, 1), value, np.float32)], options=terms)
    except InferError as error:
        return error.message
    return float(answer.item())


async def follow(it: tuple[Engine, Model], identity: int, flags: str) -> list[tuple[float, float | str]]:
    """Send a sequence's requests, one per flag ("." for none). Returns: the expected sum and the answer of each."""
    found, total = [], 0.0
    for step, flag in enumerate(flags):
        value = 100.0 * identity + step
        total = value + (0 if flag == "s" else total)
        found.append((total, await ask(it, value, identity, flag)))
    return found


def answers_of(found: list[list[tuple[float, float | str]]]) -> list[tuple[float, float]]:
    return [(expected, answer) for each in found for expected, answer in each if isinstance(answer, float)]


def spec_of(*, direct: bool, instances: tuple[InstanceGroup, ...] = SPEC.instances) -> ModelSpec:
    return replace(SPEC, sequence=replace(SEQUENCE, direct=direct), instances=instances)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("instances", [SPEC.instances, TWO_DEVICES], ids=["one CPU", "two devices"])
async def test_each_instance_keeps_its_own_sequence_state(instances: tuple[InstanceGroup, ...], direct: bool) -> None:
    loads = Loads(direct=direct)
    async with served(loads, spec_of(direct=direct, instances=instances)) as it:
        found = await asyncio.gather(*(follow(it, identity, "s......e") for identity in range(1, 13)))

    assert len(loads.devices) == 2
    assert [len(each) for each in found] == [8] * 12
    assert all(answer == expected for each in found for expected, answer in each)


@pytest.mark.parametrize("instances", [(InstanceGroup(1),), SPEC.instances, TWO_DEVICES])
@pytest.mark.parametrize("seed", range(12))
async def test_no_answer_of_a_sequence_is_wrong_whatever_happens_to_the_instances(
    seed: int, instances: tuple[InstanceGroup, ...]
) -> None:
    chance = random.Random(seed)
    errors: list[Exception | None] = [
        DeviceLost(Code.NOT_READY, "lost"), RunStopped(Code.EXPIRED, "stopped"), InferError(Code.INVALID, "guilty"),
    ]  # fmt: skip
    loads = Loads(lambda values: chance.choice(errors) if any(values) and not chance.randrange(5) else None,
                  direct=bool(seed % 2))  # fmt: skip
    async with served(loads, spec_of(direct=bool(seed % 2), instances=instances)) as it:
        found = await asyncio.gather(*(follow(it, identity, "s....s....e") for identity in range(1, 13)))
        assert not it[1].inflight

    assert [len(each) for each in found] == [11] * 12
    assert len(answers_of(found)) > 20
    assert all(answer == expected for expected, answer in answers_of(found))


@pytest.mark.parametrize("instances", [SPEC.instances, TWO_DEVICES], ids=["one CPU", "two devices"])
@pytest.mark.parametrize("seed", range(6))
async def test_no_sequence_is_lost_when_instances_are_added_and_removed(
    seed: int, instances: tuple[InstanceGroup, ...]
) -> None:
    chance, loads, asking = random.Random(seed), Loads(direct=bool(seed % 2)), True
    spec = spec_of(direct=bool(seed % 2), instances=instances)
    async with served(loads, spec) as it:

        async def come_and_go() -> int:
            count = 0
            while asking:
                groups = tuple([replace(group, count=chance.randint(1, 3)) for group in instances])
                change = await it[0].change(it[1], replace(spec, instances=groups))
                assert change is not None
                await asyncio.gather(*change.commit())
                count += 1
            return count

        changing = asyncio.ensure_future(come_and_go())
        found = await asyncio.gather(*(follow(it, identity, "s....s....e") for identity in range(1, 25)))
        asking = False
        assert await changing
        await asyncio.gather(*it[1].shutdown_tasks)

        assert len(it[1].instances) == len(it[1].placements)
        assert len(it[1].instances) == sum(group.count for group in it[1].spec.instances)
    assert len(loads.devices) > 2
    assert all(answer == expected for each in found for expected, answer in each)


async def test_a_model_is_closed_even_if_a_sequence_keeps_an_ending_instance_alive() -> None:
    async with served(Loads(direct=True), SPEC) as it:
        assert [await ask(it, 1, 1, "s"), await ask(it, 1, 2, "s")] == [1, 1]
        change = await it[0].change(it[1], replace(SPEC, instances=(InstanceGroup(1),)))
        assert change is not None
        assert change.commit() == []

        await it[0].unload("m", 1)

        assert not it[1].shutdown_tasks


async def test_a_sequence_whose_instance_was_lost_must_start_again() -> None:
    fates = iter([DeviceLost(Code.NOT_READY, "lost")])
    loads = Loads(lambda values: next(fates, None) if 7 in values else None, direct=True)
    async with served(loads, replace(SPEC, instances=(InstanceGroup(1),))) as it:
        outcomes = [await ask(it, value, identity, flags) for value, identity, flags in (
            (1, 1, "s"), (2, 2, "s"), (7, 1, ""), (3, 2, ""), (4, 2, "s"), (5, 2, "e"), (6, 1, "s"),
        )]  # fmt: skip

    text = (
        "inference request for sequence {} to model 'm' must specify the START flag on the first request of the "
        "sequence: the instance that ran it was lost, with its state"
    )
    assert outcomes == [1, 2, text.format(1), text.format(2), 4, 9, 6]


async def test_a_sequences_first_request_is_retried_at_its_row_after_a_device_is_lost() -> None:
    fates = iter([DeviceLost(Code.NOT_READY, "lost")])
    loads = Loads(lambda values: next(fates, None) if 7 in values else None, direct=True)
    async with served(loads, replace(SPEC, instances=(InstanceGroup(1),))) as it:
        assert [await ask(it, 1, 1, "s"), await ask(it, 7, 2, "s"), await ask(it, 1, 2)] == [1, 7, 8]


async def test_requests_of_a_failed_batch_change_sequence_state_only_once() -> None:
    loads = Loads(lambda values: InferError(Code.INVALID, "guilty") if 7 in values else None, direct=False)
    async with served(loads, replace(spec_of(direct=False), instances=(InstanceGroup(1),))) as it:
        await asyncio.gather(*(ask(it, 1, identity, "s") for identity in (1, 2)))
        outcomes = await asyncio.gather(ask(it, 5, 1), ask(it, 7, 2))
        after = [await ask(it, 1, identity, "e") for identity in (1, 2)]

    assert outcomes[1] == "guilty"
    assert after == [7, 9]


async def test_sequences_of_an_unusable_instance_fail_and_new_sequences_start_on_another() -> None:
    fates = iter([DeviceLost(Code.NOT_READY, "lost")])
    loads = Loads(lambda values: next(fates, None) if 7 in values else None, direct=True)
    async with served(loads, SPEC) as it:
        assert [await ask(it, 1, identity, "s") for identity in (1, 2, 3)] == [1, 1, 1]
        loads.refuses = True
        assert await ask(it, 7, 1) == "lost"
        outcomes = [await ask(it, 1, identity, flags) for identity, flags in ((3, "e"), (4, "s"), (4, "e"), (2, "e"))]
        assert outcomes == ["model 'm' lost its device: it does not load", 1, 2, 2]


async def test_a_sequence_that_may_start_on_an_idle_instance_is_not_left_waiting() -> None:
    ends = threading.Event()

    def befalls(values: list[float]) -> None:
        if LATE in values:
            assert ends.wait(PATIENCE_S)

    loads = Loads(befalls, direct=False)
    async with served(loads, spec_of(direct=False)) as it:
        assert await ask(it, 1, 1, "s") == 1
        late = asyncio.create_task(ask(it, LATE, 2, "se"))
        while it[1].instances[1].idle:  # noqa: ASYNC110 - an Instance that goes to work has no event
            await asyncio.sleep(0)
        # only one sequence of an id runs at a time: this one waits for the other, and may then use the first Instance
        after = asyncio.create_task(ask(it, 3, 2, "s"))
        assert await ask(it, 1, 1, "e") == 2
        while not it[1].instances[0].idle:  # noqa: ASYNC110 - nor has one that goes to sleep
            await asyncio.sleep(0)

        ends.set()

        assert [await late, await after] == [LATE, 3]
