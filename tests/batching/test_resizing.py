"""Resizing: Instances added and removed while a Model serves. Each request is answered once, whatever happens."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from penstock.backends.backend import Backend, Binding
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature
from penstock.batching.devices.placement import Devices
from penstock.batching.devices.rate_limiter import Claim, RateLimiter
from penstock.batching.engine import Engine
from penstock.batching.loading import resizing
from penstock.batching.loading.resizing import match_groups
from penstock.batching.model import Model
from penstock.batching.request import InSequence, RequestOptions
from penstock.batching.running.external import ExternalExecutor
from penstock.batching.running.external_models import OpenedVersion, close_executors, complete_external, single_groups
from penstock.batching.spec import InstanceGroup, ModelSpec, Resource, SequenceSpec
from tests.batching import test_engine, test_external
from tests.batching.test_external import Elsewhere, Ledger, Remembers, x
from tests.fakes import PATIENCE_S, FakeBackend, Gate, ListSink, fake_request

pytestmark = pytest.mark.anyio

CPU, GPU = InstanceGroup(), InstanceGroup(1, ("cuda:0",))


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    return "asyncio", {"use_uvloop": request.param}


class House:
    """An Engine with one Model on fake backends, and the backends that were loaded."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.loaded: list[FakeBackend] = []
        self.most_bindings = 1 << 30
        self.engine = Engine(asyncio.get_running_loop(), {"fake": self._load})
        self.engine.devices = Devices(RateLimiter())
        self.sink = ListSink()
        self.model: Model

    def _load(self, path: Path, device: str, options: Mapping[str, str]) -> Backend:
        house = self

        class Counted(FakeBackend):
            def bind(self, signature: Signature, capacity_rows: int) -> Binding:
                if len(self.bindings) >= house.most_bindings:
                    raise InferError(Code.INTERNAL, "no memory")
                return super().bind(signature, capacity_rows)

        self.loaded.append(Counted(test_engine.SAME_AND_SUM, self.gate))
        self.loaded[-1].node_inputs = [device]
        return self.loaded[-1]

    def submit(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.submit(fake_request(self.model, sink=self.sink))

    async def resize(self, *groups: InstanceGroup, **policy: Any) -> None:
        change = await self.engine.change(self.model, self.spec(*groups, **policy))
        assert change is not None
        await asyncio.gather(*change.commit())

    def spec(self, *groups: InstanceGroup, **policy: Any) -> ModelSpec:
        return replace(test_engine.spec_of(max_batch_rows=1, cap_rows=1, **policy), instances=groups)


@asynccontextmanager
async def house(*groups: InstanceGroup, **policy: Any) -> AsyncIterator[House]:
    system = House(Gate(test_engine.same_and_sum))
    system.model = await system.engine.load(system.spec(*groups, **policy))
    try:
        yield system
    finally:
        system.gate.open()
        assert await system.engine.stop(5.0) == 0
        assert all(backend.closed for backend in system.loaded)


def claims_of(engine: Engine) -> Sequence[Claim]:
    limiter = engine.devices.limiter
    assert limiter is not None
    return limiter._claims


def of(count: int, group: InstanceGroup = CPU) -> InstanceGroup:
    return replace(group, count=count)


class TestMatching:
    def test_each_new_group_is_matched_with_the_first_equal_old_one(self) -> None:
        assert match_groups([CPU, CPU, GPU], [GPU, CPU]) == [2, 0]

    def test_a_new_group_without_an_equal_old_one_is_unmatched(self) -> None:
        other = replace(CPU, rate_priority=2)

        assert match_groups([CPU], [CPU, CPU, other]) == [0, None, None]

    @pytest.mark.parametrize("seed", range(50))
    def test_as_many_groups_as_possible_are_matched_and_none_twice(self, seed: int) -> None:
        chance = random.Random(seed)
        old, new = (chance.choices([CPU, GPU, replace(CPU, host_policy="x")], k=chance.randrange(8)) for _ in "ab")

        found = match_groups(old, new)

        matched = [at for at in found if at is not None]
        assert len(matched) == len(set(matched)) == sum(min(old.count(each), new.count(each)) for each in (*{*old},))
        assert all(at is None or old[at] == group for at, group in zip(found, new, strict=True))


class TestThreadInstances:
    async def test_an_added_instance_runs_beside_a_busy_one(self) -> None:
        async with house(of(1)) as system:
            system.gate.close()
            system.submit()
            await system.gate.entered()

            await system.resize(of(2))
            system.submit()
            await system.gate.entered()

            assert len(system.loaded) == 1
            assert len(system.model.thread_instances) == 2
            assert system.model.spec.instances == (of(2),)

    async def test_a_waiting_request_is_taken_by_an_added_instance(self) -> None:
        async with house(of(1)) as system:
            system.gate.close()
            system.submit(2)
            await system.gate.entered()

            await system.resize(of(2))

            await system.gate.entered()

    async def test_removed_instances_finish_their_runs_without_blocking_the_resize(self) -> None:
        async with house(of(3)) as system:
            system.gate.close()
            system.submit(3)
            for _ in range(3):
                await system.gate.entered()

            await system.resize(of(1))
            system.submit(3)

            assert system.sink.requests == []
            system.gate.open()
            assert len(await system.sink.holds(6)) == 6
            await asyncio.gather(*system.model.shutdown_tasks)
            assert len(system.model.thread_instances) == 1
            assert len(system.loaded[0].bindings) - len(system.model.placements[0].bindings) == 2

    async def test_statistics_and_learned_costs_survive_a_resize(self) -> None:
        async with house(of(2)) as system:
            system.submit(5)
            await system.sink.holds(5)
            before = system.model.statistics, system.model.costs, system.model.scheduler

            await system.resize(of(1))

            assert (system.model.statistics, system.model.costs, system.model.scheduler) == before
            assert system.engine.model("m") is system.model

    async def test_each_added_instance_on_a_gpu_loads_the_model_and_frees_it_when_removed(self) -> None:
        async with house(of(2, CPU), of(1, GPU)) as system:
            await system.resize(of(3, GPU), of(1, CPU))
            assert len(system.loaded) == 4
            assert [each.closed for each in system.loaded] == [False] * 4

            await system.resize(of(2, CPU), of(2, GPU))

            assert [each.closed for each in system.loaded] == [False, False, False, True]
            assert [each.group for each in system.model.thread_instances].count(GPU) == 2

    async def test_the_device_share_has_the_new_number_of_instances(self) -> None:
        async with house(of(1)) as system:
            share = system.model.placements[0].share

            await system.resize(of(4))

            assert share.instances == 4

    async def test_the_device_share_is_kept_by_a_remaining_instance(self) -> None:
        async with house(of(1, GPU), replace(GPU, host_policy="x"), run_limit_us=60_000_000) as system:
            share = system.model.placements[0].share

            await system.resize(replace(GPU, host_policy="x"), run_limit_us=60_000_000)

            assert system.loaded[0].closed
            assert [at.owns_share for at in system.model.placements] == [True]
            assert system.model.node_inputs is system.loaded[1].node_inputs
            assert system.model.placements[0].share is share

    async def test_the_loop_runs_fast_batches_after_a_resize(self) -> None:
        async with house(of(1), executor="loop") as system:
            await system.resize(of(2), executor="loop")

            system.submit(3)

            assert len(await system.sink.holds(3)) == 3

    async def test_a_resize_that_fails_leaves_the_instances_unchanged(self) -> None:
        async with house(of(2)) as system:
            system.most_bindings = 4

            with pytest.raises(InferError, match="no memory"):
                await system.engine.change(system.model, system.spec(of(4)))

            assert len(system.model.thread_instances) == 2
            assert len(system.model.placements[0].bindings) == 3
            system.submit(4)
            await system.sink.holds(4)

    async def test_an_instance_that_cannot_be_created_leaves_no_claim_at_the_rate_limiter(self) -> None:
        needs = replace(CPU, resources=(Resource("r", 1),))
        async with house(needs) as system:
            system.most_bindings = 1
            with pytest.raises(InferError, match="no memory"):
                await system.engine.change(system.model, system.spec(of(2, needs)))

            assert len(claims_of(system.engine)) == 1

    @pytest.mark.parametrize("groups", [[GPU], [CPU, GPU], [CPU, replace(CPU, passive=True)]])
    async def test_a_change_of_more_than_instance_counts_requires_a_reload(
        self, groups: Sequence[InstanceGroup]
    ) -> None:
        async with house(of(2)) as system:
            assert await system.engine.change(system.model, system.spec(*groups)) is None

    async def test_an_abandoned_change_closes_its_new_instances(self) -> None:
        async with house(of(1), of(1, GPU)) as system:
            change = await system.engine.change(system.model, system.spec(of(2), of(2, GPU)))
            assert change is not None

            await change.abandon()

            assert [each.closed for each in system.loaded] == [False, False, True]
            assert len(system.model.thread_instances) == 2

    async def test_a_canceled_resize_finishes_before_its_model_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async with house(of(1)) as it:
            making, bind = Gate(list), it.loaded[0].bind

            def bind_in_time(signature: Signature, capacity_rows: int) -> Binding:
                making([])
                return bind(signature, capacity_rows)

            making.close()
            monkeypatch.setattr(it.loaded[0], "bind", bind_in_time)
            change = asyncio.ensure_future(it.engine.change(it.model, it.spec(of(2))))
            await making.entered()
            change.cancel()
            await asyncio.wait([change])
            unload = asyncio.ensure_future(it.engine.unload(it.model.name, 1))
            (ending,) = it.model.shutdown_tasks
            making.open()
            await unload

            assert ending.exception() is None
            assert it.model.instances == []

    async def test_an_instance_whose_removal_fails_does_not_prevent_unloading(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        ending = threading.Event()

        def fail(*_: object) -> None:
            ending.wait()
            raise OSError("the device does not answer")

        monkeypatch.setattr(resizing, "_end_thread", fail)
        async with house(of(2)) as it:
            it.gate.close()
            it.submit(2)
            for _ in range(2):
                await it.gate.entered()
            await it.resize(of(1))
            it.gate.open()
            await it.sink.holds(2)
            unload = asyncio.ensure_future(it.engine.unload(it.model.name, 1))
            await asyncio.sleep(0)
            ending.set()
            await unload

            assert it.model.instances == []
            assert "the device does not answer" in caplog.text

    async def test_a_model_that_fails_to_close_does_not_prevent_other_models_from_closing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with house(of(1)) as it:
            broken = await it.engine.load(replace(it.spec(of(1)), name="broken"))
            slow = await it.engine.load(replace(it.spec(of(1)), name="slow"))
            failed, end, end_slow = (
                threading.Event(),
                broken.placements[0].backend.close,
                slow.placements[0].backend.close,
            )
            loop = asyncio.get_running_loop()

            def fail() -> None:
                end()
                failed.set()
                raise OSError("the device is gone")

            def wait() -> None:
                failed.wait()
                for _ in range(100):  # turns, in which the loop learns of the other's failure
                    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE_S)
                end_slow()

            with (
                patch.object(broken.placements[0].backend, "close", fail),
                patch.object(slow.placements[0].backend, "close", wait),
            ):
                assert await it.engine.stop(5.0) == 0

            assert all(backend.closed for backend in it.loaded)
            assert "the device is gone" in caplog.text

    async def test_an_executor_that_fails_to_close_does_not_prevent_others_from_closing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        ended: list[str] = []

        async def fail() -> None:
            raise OSError("its worker is gone")

        async def end() -> None:
            await asyncio.sleep(0)
            ended.append("other")

        executors = [SimpleNamespace(close=fail), SimpleNamespace(close=end)]
        await close_executors(cast(Model, SimpleNamespace(name="m", executors=executors)))

        assert ended == ["other"]
        assert "its worker is gone" in caplog.text

    async def test_the_rate_limiter_has_a_claim_for_each_current_instance(self) -> None:
        needs = replace(CPU, resources=(Resource("r", 1),))
        async with house(needs) as system:
            await system.resize(of(3, needs))
            assert len(claims_of(system.engine)) == 3

            system.submit(9)
            await system.sink.holds(9)
            await system.resize(of(2, needs))
            await asyncio.gather(*system.model.shutdown_tasks)

            assert len(claims_of(system.engine)) == 2

    @pytest.mark.parametrize("seed", range(6))
    @pytest.mark.parametrize("needs", [False, True])
    async def test_no_request_is_lost_or_answered_twice(self, seed: int, needs: bool) -> None:
        chance = random.Random(seed)
        group = replace(CPU, resources=(Resource("r", 1),)) if needs else CPU
        async with house(of(2, group)) as system:
            for _ in range(12):
                system.submit(chance.randrange(30))
                change = await system.engine.change(system.model, system.spec(of(chance.randint(1, 5), group)))
                assert change is not None
                system.submit(chance.randrange(30))
                if chance.random() < 0.2:
                    await change.abandon()
                else:
                    change.commit()
            while system.model.inflight:
                await system.sink.holds(len(system.sink.requests) + 1)

            requests = system.sink.requests
            assert len(requests) == len(set(map(id, requests)))
            assert all(request.error is None for request in requests)
            await asyncio.gather(*system.model.shutdown_tasks)
            assert len(system.model.instances) == system.model.spec.instances[0].count


class More:
    """Opens executors one after another, as many as requested."""

    def __init__(self, plan: Callable[[], str] = lambda: "answer", kind: type[Elsewhere] = Elsewhere) -> None:
        self.opened: list[Elsewhere] = []
        self._plan = plan
        self._kind = kind

    def _some(self, count: int) -> list[ExternalExecutor]:
        executors = [self._kind(self._plan) for _ in range(count)]
        self.opened += executors
        return list(executors)

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        return OpenedVersion(complete_external(spec), self._some(len(single_groups(spec))), "elsewhere")

    async def open_more(self, served: ModelSpec, spec: ModelSpec, places: Sequence[int]) -> OpenedVersion:
        return OpenedVersion(replace(served, instances=spec.instances), self._some(len(places)), "elsewhere")


@asynccontextmanager
async def elsewhere(
    count: int, more: More, sequence: SequenceSpec | None = None
) -> AsyncIterator[tuple[Engine, Model]]:
    engine = Engine(asyncio.get_running_loop(), {})
    engine.devices = Devices(RateLimiter())
    engine.external_loaders["elsewhere"] = more
    model = await engine.load(replace(test_external.spec_of(), instances=(of(count),), sequence=sequence))
    async with asyncio.timeout(test_external.GUARD_S):
        yield engine, model
        assert await engine.stop(5.0) == 0
    assert all(each.closed for each in more.opened)


async def resize(engine: Engine, model: Model, count: int, group: InstanceGroup = CPU) -> None:
    change = await engine.change(model, replace(model.spec, instances=(of(count, group),)))
    assert change is not None
    await asyncio.gather(*change.commit())


class TestExternalExecutors:
    async def test_only_missing_executors_are_opened_and_only_surplus_ones_are_closed(self) -> None:
        more = More()
        async with elsewhere(3, more) as (engine, model):
            await resize(engine, model, 4)
            assert len(more.opened) == 4
            await resize(engine, model, 3)
            assert [each.closed for each in more.opened] == [False, False, False, True]
            await resize(engine, model, 4)
            assert len(more.opened) == 5
            assert len(model.executors) == len(model.instances) == 4

    async def test_a_removed_executor_answers_its_batch_before_it_is_closed(self) -> None:
        plans = iter(["late"])
        more = More(lambda: next(plans, "answer"))
        async with elsewhere(2, more) as (engine, model):
            busy = asyncio.ensure_future(engine.infer(model, x(3)))
            await more.opened[0].received.wait()

            await resize(engine, model, 1, replace(CPU, host_policy="other"))

            assert not more.opened[0].closed
            assert more.opened[1].closed
            assert (await busy)[0].tolist() == [[3]]
            await asyncio.gather(*model.shutdown_tasks)
            assert [each.closed for each in more.opened] == [True, True, False]

    async def test_a_batch_that_a_removed_executor_did_not_begin_runs_on_another(self) -> None:
        plans = iter(["unbegun"])
        more = More(lambda: next(plans, "answer"))
        async with elsewhere(1, more) as (engine, model):
            busy = asyncio.ensure_future(engine.infer(model, x(3)))
            await more.opened[0].received.wait()

            await resize(engine, model, 1, replace(CPU, host_policy="other"))

            assert (await busy)[0].tolist() == [[3]]
            assert (len(more.opened[0].begun), len(more.opened[1].begun)) == (1, 1)

    async def test_a_resize_that_needs_too_many_resources_changes_nothing(self) -> None:
        more = More()
        async with elsewhere(1, more) as (engine, model):
            engine.devices.limiter = RateLimiter({("r", None): 1})
            with pytest.raises(InferError, match="limited to 1"):
                await resize(engine, model, 2, replace(CPU, resources=(Resource("r", 2),)))

            assert [each.closed for each in more.opened] == [False, True, True]
            assert (await engine.infer(model, x(3)))[0].tolist() == [[3]]

    @pytest.mark.parametrize("seed", range(20))
    async def test_no_request_is_lost_or_answered_twice(self, seed: int) -> None:
        chance = random.Random(seed)
        more = More(lambda: chance.choice(["answer", "answer", "late", "fail", "die", "unbegun"]))
        needs = replace(CPU, resources=(Resource("r", 1),))
        async with elsewhere(2, more) as (engine, model):
            ledger = Ledger()

            async def come_and_go() -> None:
                while not ledger.done.is_set():
                    for _ in range(chance.randrange(6)):
                        await asyncio.sleep(0)
                    group = chance.choice([CPU, CPU, needs])
                    await resize(engine, model, chance.randint(1, 4), group)

            changing = asyncio.ensure_future(come_and_go())
            await test_external.submit_all(engine, model, 100, ledger)
            await changing
            await asyncio.gather(*model.shutdown_tasks)

            assert len(model.instances) == len(model.executors) == sum(group.count for group in model.spec.instances)
            assert len([each for each in more.opened if not each.closed]) == len(model.executors)

        assert len(ledger.ends) == 100
        assert {end for (end,) in ledger.ends.values()} <= {"right", "failed", "died"}


class Session:
    """Clients of sequences on Instances that keep their state."""

    def __init__(self, engine: Engine, model: Model, more: More) -> None:
        self._engine = engine
        self._model = model
        self._more = more

    async def ask(self, number: int, *, start: bool = False, end: bool = False) -> int:
        """Send one request of a sequence. Returns: which executor ran it."""
        before = [len(each.begun) for each in self._more.opened]
        terms = RequestOptions(sequence=InSequence(number, start, end))
        (output,) = await self._engine.infer(self._model, x(number), options=terms)
        assert output.tolist() == [[number]]
        return next(
            at for at, each in enumerate(self._more.opened) if at >= len(before) or len(each.begun) > before[at]
        )


@pytest.mark.parametrize("direct", [True, False])
class TestSequences:
    async def test_a_sequence_ends_on_its_removed_instance_which_is_then_closed(self, direct: bool) -> None:
        more = More(kind=Remembers)
        async with elsewhere(3, more, SequenceSpec(direct=direct)) as (engine, model):
            session = Session(engine, model, more)
            states = [await session.ask(number, start=True) for number in (1, 2, 3)]
            assert states == [0, 1, 2]

            await resize(engine, model, 2)

            assert not more.opened[2].closed
            assert [await session.ask(number) for number in (3, 2, 1)] == [2, 1, 0]
            assert await session.ask(4, start=True) in {0, 1}
            assert await session.ask(3, end=True) == 2
            await asyncio.gather(*model.shutdown_tasks)
            assert [each.closed for each in more.opened] == [False, False, True]
            assert [await session.ask(number, end=True) for number in (1, 2)] == [0, 1]

    async def test_a_removed_instance_without_sequences_is_closed_at_once(self, direct: bool) -> None:
        more = More(kind=Remembers)
        async with elsewhere(2, more, SequenceSpec(direct=direct)) as (engine, model):
            session = Session(engine, model, more)
            assert await session.ask(1, start=True) == 0

            await resize(engine, model, 1)

            assert more.opened[1].closed
            assert await session.ask(1, end=True) == 0

    async def test_a_sequence_waiting_for_a_slot_gets_one_on_an_added_instance(self, direct: bool) -> None:
        more = More(kind=Remembers)
        async with elsewhere(1, more, SequenceSpec(direct=direct)) as (engine, model):
            session = Session(engine, model, more)
            for number in range(1, 5):
                await session.ask(number, start=True)
            waits = asyncio.ensure_future(session.ask(5, start=True))
            await asyncio.sleep(0)
            assert not waits.done()

            await resize(engine, model, 2)

            assert await waits == 1
            assert [await session.ask(number, end=True) for number in (1, 5)] == [0, 1]

    async def test_instances_may_be_added_again_before_a_removed_ones_last_sequence_ends(self, direct: bool) -> None:
        more = More(kind=Remembers)
        async with elsewhere(2, more, SequenceSpec(direct=direct)) as (engine, model):
            session = Session(engine, model, more)
            assert [await session.ask(number, start=True) for number in (1, 2)] == [0, 1]
            await resize(engine, model, 1)
            await resize(engine, model, 2)

            assert [await session.ask(number) for number in (1, 2, 1, 2)] == [0, 1, 0, 1]
            assert await session.ask(3, start=True) == 2
            assert await session.ask(2, end=True) == 1
            await asyncio.gather(*model.shutdown_tasks)
            assert [each.closed for each in more.opened] == [False, True, False]
            assert await session.ask(3, end=True) == 2

    @pytest.mark.parametrize("seed", range(10))
    async def test_every_request_is_answered_once_on_the_executor_of_its_sequence(
        self, direct: bool, seed: int
    ) -> None:
        chance = random.Random(seed)
        more = More(lambda: chance.choice(["answer", "answer", "late", "fail"]), Remembers)
        async with elsewhere(2, more, SequenceSpec(direct=direct)) as (engine, model):
            ledger = Ledger()

            async def come_and_go() -> None:
                while not ledger.done.is_set():
                    for _ in range(chance.randrange(6)):
                        await asyncio.sleep(0)
                    await resize(engine, model, chance.randint(1, 4))

            changing = asyncio.ensure_future(come_and_go())
            await test_external.submit_sequences(engine, model, ledger)
            await changing
            await asyncio.gather(*model.shutdown_tasks)
            assert len([each for each in more.opened if not each.closed]) == len(model.executors)

        assert len(ledger.ends) == 40
        assert {end for (end,) in ledger.ends.values()} <= {"right", "failed"}
        assert all(each.strangers == [] for each in more.opened if isinstance(each, Remembers))


@pytest.mark.parametrize("seed", range(10))
async def test_iterative_requests_keep_their_instance_until_they_are_done(seed: int) -> None:
    chance = random.Random(seed)
    more = More(lambda: chance.choice(["again", "again", "answer", "late", "fail"]))
    sequence = SequenceSpec(direct=bool(seed % 2), iterative=True)
    async with elsewhere(2, more, sequence) as (engine, model):
        ledger = Ledger()

        async def come_and_go() -> None:
            while not ledger.done.is_set():
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)
                await resize(engine, model, chance.randint(1, 4))

        changing = asyncio.ensure_future(come_and_go())
        await test_external.submit_all(engine, model, 60, ledger)
        await changing
        await asyncio.gather(*model.shutdown_tasks)
        assert len([each for each in more.opened if not each.closed]) == len(model.executors)

    assert len(ledger.ends) == 60
    assert {end for (end,) in ledger.ends.values()} <= {"right", "failed"}
