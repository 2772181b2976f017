"""Hosts and WorkerSlots: every call is answered once, whatever its worker does; calls not begun run elsewhere.

For every kind of Crew: the plain one, and those of DEEPaaS models and of components.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import InferError
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from penstock.server.carrying import worker_slots
from penstock.server.carrying.hosts import Crew
from penstock.server.deepaas.loading import DeepaasCrew
from penstock.server.workers import restarting
from penstock.server.workers.order import Order
from tests.server.carrying.crews import Echo, Ledger, NoBackoff, Stage, Staged
from tests.server.seldon.crews import SeldonEcho, SeldonStage

Stages = Callable[..., Stage]


@pytest.fixture(params=["plain", "deepaas", "seldon"])
def staged(request: pytest.FixtureRequest) -> Stages:
    """Return what makes a Stage of each kind of Crew from a service and a plan."""
    stages: dict[str, Stages] = {
        "plain": Stage,
        "deepaas": partial(Stage, crew=DeepaasCrew),
        "seldon": SeldonStage,
    }
    return stages[request.param]


@pytest.fixture
def echo(staged: Stages) -> Echo:
    """Return a service for the Stage."""
    return SeldonEcho() if staged is SeldonStage else Echo()


@pytest.mark.parametrize("seed", range(20))
def test_every_call_is_answered_once_and_begun_at_most_once_whatever_its_worker_does(
    seed: int, staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    stage = staged(echo, lambda _: chance.choice(["answer"] * 9 + ["die"]))
    stage.fails_to_start = lambda: len(stage.workers) > 4 and chance.random() < 0.2
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        for number in range(120):
            engine.submit(stage.call(model, str(number), ledger))
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        await ledger.all(120)
        assert model.inflight == 0

    stage.run(monkeypatch, scene, workers=chance.randint(1, 3))

    assert len(ledger.ends) == 120
    assert all(len(ends) == 1 for ends in ledger.ends.values())
    assert sorted(echo.ran) == sorted({*echo.ran})
    lost = [name for name, (end,) in ledger.ends.items() if end != name.encode()]
    assert all(ledger.ends[name] in (["ended"], ["does not start"]) for name in lost)
    begun = {body.decode() for body in echo.ran}
    assert begun >= {name for name, (end,) in ledger.ends.items() if end in (name.encode(), "ended")}


@pytest.mark.parametrize("seed", range(10))
def test_closing_answers_calls_in_progress_once(
    seed: int, staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    stage = staged(echo, lambda _: "answer" if chance.random() < 0.8 else "hang")
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(100))
        for _ in range(chance.randint(1, 20)):
            await asyncio.sleep(0)
        await engine.stop(0.0)
        await ledger.all(100)

    stage.run(monkeypatch, scene, workers=2)

    assert all(len(ends) == 1 for ends in ledger.ends.values())


def test_stopping_answers_calls_that_a_replaced_version_still_runs(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo, lambda body: "hang" if body[2:] == b"hang" else "answer")
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        engine.submit(stage.call(model, "hang", ledger))
        loading = asyncio.ensure_future(engine.load(model.spec))
        while engine.model(model.name) is model:  # noqa: ASYNC110 - waits for turns of the loop, not for time
            await asyncio.sleep(0)
        engine.submit(stage.call(engine.model(model.name), "new", ledger))
        await ledger.all(1)
        await engine.stop(0.0)
        await ledger.all(2)
        await loading

    stage.run(monkeypatch, scene)

    assert ledger.ends == {"new": [b"new"], "hang": ["ended"]}


def test_only_the_running_call_fails_with_its_worker(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo, lambda body: "die" if body[2:] == b"3" else "answer")
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(8))
        await ledger.all(8)

    stage.run(monkeypatch, scene)

    assert ledger.ends == {str(each): [b"%d" % each if each != 3 else "ended"] for each in range(8)}
    assert ledger.lost == {"3"}
    assert len(stage.workers) == 2


def test_the_backoff_is_reset_by_an_answer_but_not_by_a_failed_call(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo, lambda body: "die" if body[2:] == b"die" else "answer")
    ledger = Ledger()
    forgotten = []

    async def scene(engine: Engine, model: Model) -> None:
        for number, name in enumerate(("die", "answer"), 1):
            engine.submit(stage.call(model, name, ledger))
            await ledger.all(number)
            forgotten.append(NoBackoff.forgotten)

    stage.run(monkeypatch, scene)

    assert forgotten == [0, 1]


def test_waiting_calls_fail_when_the_worker_cannot_be_restarted(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo, lambda _: "die")
    stage.fails_to_start = lambda: len(stage.workers) > 1
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(4))
        await ledger.all(4)
        assert not model.healthy

    stage.run(monkeypatch, scene)

    assert sorted(end for (end,) in ledger.ends.values()) == ["does not start"] * 3 + ["ended"]


def test_waiting_calls_of_a_lost_worker_run_on_the_other_workers(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo, lambda body: "die" if body[2:] == b"0" else "answer")
    stage.fails_to_start = lambda: len(stage.workers) > 2
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(60))
        await ledger.all(60)
        assert model.healthy

    stage.run(monkeypatch, scene, workers=2)

    assert [name for name, (end,) in ledger.ends.items() if end == "ended"] == ["0"]


def test_slow_calls_are_sent_to_a_worker_one_at_a_time(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]
    monkeypatch.setattr("penstock.server.carrying.worker_slots.time.monotonic_ns", lambda: now[0])

    def slowly(_body: bytes) -> str:
        now[0] += 50_000_000
        return "answer"

    stage = staged(echo, slowly)
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(20))
        await ledger.all(20)
        for worker in stage.workers:
            worker.most = 0
        stage.submit(engine, model, ledger, range(20, 84))
        await ledger.all(84)

    stage.run(monkeypatch, scene, workers=2)

    assert [worker.most for worker in stage.workers] == [1, 1]


def test_fast_calls_are_sent_to_a_worker_several_at_a_time(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]
    monkeypatch.setattr("penstock.server.carrying.worker_slots.time.monotonic_ns", lambda: now[0])

    def quickly(_body: bytes) -> str:
        now[0] += 20_000
        return "answer"

    stage = staged(echo, quickly)
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(200))
        await ledger.all(200)

    stage.run(monkeypatch, scene, workers=2)

    assert all(worker.most > 8 for worker in stage.workers)


def test_a_full_queue_rejects_a_call_at_submission(staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = staged(echo, lambda _: "hang")
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(4))
        with pytest.raises(InferError, match="Exceeds maximum queue size"):
            engine.submit(stage.call(model, "one too many", ledger))
        await engine.stop(0.0)

    stage.run(monkeypatch, scene, policy=BatchPolicy(max_queue_requests=4))


def test_statistics_count_each_call_as_one_execution(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo)
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(30))
        await ledger.all(30)
        counted = model.statistics.snapshot()
        assert (counted.success.count, counted.inference_count, counted.execution_count) == (30, 30, 30)
        assert [(entry.rows, entry.count) for entry in counted.batch_stats] == [(1, 30)]

    stage.run(monkeypatch, scene)


def test_statistics_sum_the_durations_of_calls_answered_one_by_one(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call takes 100 s by a fake clock that advances when a call is done."""
    stage = staged(echo)
    ledger = Ledger()

    class Clock:
        @staticmethod
        def monotonic_ns() -> int:
            return time.monotonic_ns() + 100_000_000_000 * len(stage.service.ran)

    monkeypatch.setattr(worker_slots, "time", Clock)

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(12))
        await ledger.all(12)
        await asyncio.sleep(0)
        (entry,) = model.statistics.snapshot().batch_stats
        assert round(entry.compute_infer_ns / 100_000_000_000) == 12

    stage.run(monkeypatch, scene)


def test_a_replacement_worker_inherits_the_measured_call_duration(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]
    monkeypatch.setattr("penstock.server.carrying.worker_slots.time.monotonic_ns", lambda: now[0])

    def slowly(body: bytes) -> str:
        now[0] += 50_000_000
        return "die" if body[2:] == b"die" else "answer"

    stage = staged(echo, slowly)
    ledger = Ledger()

    async def scene(engine: Engine, model: Model) -> None:
        stage.submit(engine, model, ledger, range(20))
        await ledger.all(20)
        engine.submit(stage.call(model, "die", ledger))
        await ledger.all(21)
        stage.submit(engine, model, ledger, range(20, 84))
        await ledger.all(85)

    stage.run(monkeypatch, scene, workers=2)

    assert stage.workers[2].most == 1


def test_all_workers_are_ended_when_one_fails_to_start(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo)
    stage.fails_to_start = lambda: len(stage.workers) == 2

    async def scene(engine: Engine, model: Model) -> None:
        """Never runs."""

    with pytest.raises(InferError, match="does not start"):
        stage.run(monkeypatch, scene, workers=3)

    assert [worker.serving for worker in stage.workers] == [False] * 3


def test_all_workers_are_ended_when_their_start_is_canceled(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(echo)

    def make_worker(order: Order, lost: Callable[[Any], None], _on_message: Any) -> Staged:
        worker = Staged(stage, order, lost)
        if len(stage.workers) == 2:
            worker.ready = worker.loop.create_future()
        return worker

    async def scene() -> None:
        starting = asyncio.ensure_future(stage.open(ModelSpec("m", 1, Path(), instances=(InstanceGroup(2),))))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(stage.workers) == 2
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    monkeypatch.setattr(restarting, "Worker", make_worker)
    asyncio.run(scene())

    assert [worker.serving for worker in stage.workers] == [False] * 2


def test_a_worker_is_replaced_after_its_maximum_number_of_calls(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(echo, crew=partial(Crew, max_calls=lambda: 3))
    ledger = Ledger()
    there = []

    async def scene(engine: Engine, model: Model) -> None:
        for number in range(1, 8):
            engine.submit(stage.call(model, str(number), ledger))
            await ledger.all(number)
            await asyncio.sleep(0)
            there.append(len(stage.workers))

    stage.run(monkeypatch, scene)

    assert there[0] == 1
    assert [stage.workers[0].served, stage.workers[1].served] == [3, 3]


def test_a_worker_ends_when_its_last_slot_is_closed(
    staged: Stages, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = staged(echo)
    serves = []

    async def scene(engine: Engine, model: Model) -> None:
        opened = await stage.make_external_loader().open(replace(model.spec, instances=(InstanceGroup(1),)))
        for outside in opened.executors:
            serves.append(stage.workers[-1].serving)
            await outside.close()
        serves.append(stage.workers[-1].serving)

    stage.run(monkeypatch, scene)

    assert serves == [True, True, False]
