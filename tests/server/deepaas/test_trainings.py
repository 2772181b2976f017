"""Trainings wait, run and end: one after another, each once, whatever requests arrive meanwhile."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES
from penstock.server.deepaas import trainings as module
from penstock.server.deepaas.records import TrainingRecord, TrainingStatus, started_json
from penstock.server.deepaas.store import Store
from penstock.server.deepaas.trainings import SERVER_ENDED

from .fake_trainers import NOON, Bench, FakeTrainer, done, turns

AT_ONCE = 2


class Trainings(RuleBasedStateMachine):
    """Any order of events in the trainings of two models."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bench = self.do(self.make_bench())
        self.added: dict[str, list[str]] = {"m": [], "n": []}
        self.ended: dict[str, str] = {}
        self.removed: set[str] = set()
        self.never: set[str] = set()

    async def make_bench(self) -> Bench:
        return Bench(AT_ONCE)

    def do(self, work: Any) -> Any:
        async def main() -> Any:
            try:
                return await asyncio.wait_for(work, 10)
            finally:
                await turns()

        return self.loop.run_until_complete(main())

    @property
    def alive(self) -> list[FakeTrainer]:
        return [trainer for trainer in self.bench.trainers if not trainer.ended]

    def waiting(self, name: str) -> set[str]:
        return {run.record.uuid for run in self.bench.runs.trainings_of(name) if run.phase == "waiting"}

    @rule(name=st.sampled_from("mn"), sizes=st.lists(st.sampled_from([1, LARGE_BYTES]), min_size=1, max_size=4))
    def add(self, name: str, sizes: list[int]) -> None:
        for size in sizes:
            self.added[name].append(self.do(self.bench.add(name, bytes(size))))

    @rule()
    def time_passes(self) -> None:
        self.bench.clock.pass_s(1.5)

    @precondition(lambda self: self.alive)
    @rule(at=st.integers(0, 9), how=st.sampled_from(["give", "raise_", "fail"]))
    def a_training_ends(self, at: int, how: str) -> None:
        trainer = self.alive[at % len(self.alive)]
        getattr(trainer, how)("words")
        self.do(turns())

    @rule(name=st.sampled_from("mn"), at=st.integers(0, 9))
    def remove(self, name: str, at: int) -> None:
        there = [run.record.uuid for run in self.bench.runs.trainings_of(name)]
        if not there:
            return
        uuid = there[at % len(there)]
        self.never |= {uuid} & self.waiting(name)
        record = self.do(self.bench.runs.remove(name, uuid))
        assert record.status is not TrainingStatus.RUNNING
        assert self.ended.setdefault(uuid, record.document) == record.document
        self.removed.add(uuid)

    @rule(name=st.sampled_from("mn"))
    def unload(self, name: str) -> None:
        self.never |= self.waiting(name)
        self.do(self.bench.runs.on_unload(name))
        assert all(run.ended.is_set() for run in self.bench.runs.trainings_of(name))

    @invariant()
    def running_trainings_are_limited_and_none_waits_needlessly(self) -> None:
        for name in self.added:
            running = [trainer for trainer in self.alive if trainer.name == name]
            waiting = [run for run in self.bench.runs.trainings_of(name) if run.phase == "waiting"]
            assert len(running) <= AT_ONCE
            assert not waiting or len(running) == AT_ONCE

    @invariant()
    def trainings_begin_in_order_and_once(self) -> None:
        for name, added in self.added.items():
            begun = [trainer.uuid for trainer in self.bench.trainers if trainer.name == name]
            assert begun == [uuid for uuid in added if uuid in set(begun)]
            waiting = self.waiting(name)
            assert not begun or waiting.isdisjoint(added[: added.index(begun[-1])])
            assert self.never.isdisjoint(begun)

    @invariant()
    def the_list_has_the_trainings_that_were_added_and_not_removed(self) -> None:
        for name, added in self.added.items():
            listed = [run.record.uuid for run in self.bench.runs.trainings_of(name)]
            assert listed == [uuid for uuid in added if uuid not in self.removed]

    @invariant()
    def ended_trainings_do_not_change(self) -> None:
        for name in self.added:
            for run in self.bench.runs.trainings_of(name):
                ended = run.record.status is not TrainingStatus.RUNNING
                assert ended == run.ended.is_set() == (run.phase == "ended")
                assert json.loads(run.record.document)["status"] == run.record.status
                if ended:
                    assert self.ended.setdefault(run.record.uuid, run.record.document) == run.record.document

    def teardown(self) -> None:
        self.do(self.bench.runs.close())
        assert not self.alive
        assert all(run.ended.is_set() for name in self.added for run in self.bench.runs.trainings_of(name))
        self.loop.close()


Trainings.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestTrainings = Trainings.TestCase


def message(run: Any) -> Any:
    return json.loads(run.record.document).get("message")


def test_a_large_request_waits_on_disk_and_is_passed_on_complete() -> None:
    async def work() -> None:
        bench, large = Bench(), bytes(range(256)) * (LARGE_BYTES // 256)
        await bench.add()
        second = await bench.add(request=large)
        run = bench.runs.find("m", second)
        assert run is not None
        assert not isinstance(run.request, bytes)

        bench.trainers[0].give(None)
        await run_until(lambda: len(bench.trainers) == 2 and bench.trainers[1].training)

        assert bench.trainers[1].request == large
        await bench.runs.close()

    done(work())


def test_a_full_disk_rejects_a_training_that_would_have_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise OSError(28, "No space left on device")

    async def work() -> None:
        bench = Bench()
        await bench.add(request=bytes(LARGE_BYTES))
        with pytest.raises(InferError, match="No space left on device") as refused:
            await bench.add(request=bytes(LARGE_BYTES))
        assert refused.value.code is Code.OVERLOADED
        assert len(bench.runs.trainings_of("m")) == 1
        await bench.runs.close()

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    done(work())


def test_the_number_of_waiting_trainings_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        bench = Bench()
        for _ in range(3):
            await bench.add()
        with pytest.raises(InferError, match="2 trainings of model 'm' are already waiting"):
            await bench.add()
        await bench.runs.close()

    monkeypatch.setattr(module, "MAX_WAITING", 2)
    done(work())


def test_the_oldest_ended_trainings_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        bench = Bench(at_once=9)
        uuids = [await bench.add() for _ in range(5)]
        for at in (3, 1, 2, 4):
            bench.trainers[at].give(None)
            await turns()
        assert [run.record.uuid for run in bench.runs.trainings_of("m")] == [uuids[0], uuids[3], uuids[4]]
        await bench.runs.close()

    monkeypatch.setattr(module, "MAX_ENDED", 2)
    done(work())


def test_trainings_interrupted_by_the_servers_end_are_in_the_records_of_later_servers(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench(file=tmp_path / "jobs")
        await bench.runs.open()
        runs, waits = await bench.add(), await bench.add()
        bench.trainers[0].line("Epoch 1/3")
        await bench.runs.close()
        assert len(bench.trainers) == 1

        later = Bench(file=tmp_path / "jobs")
        await later.runs.open()
        found = later.runs.trainings_of("m")
        assert [run.record.uuid for run in found] == [runs, waits]
        assert [message(run) for run in found] == [SERVER_ENDED, SERVER_ENDED]
        assert await later.runs.log(found[0]) == "Epoch 1/3\n"
        await later.runs.close()

    done(work())


def test_a_killed_server_leaves_no_training_recorded_as_running(tmp_path: Path) -> None:
    async def work() -> None:
        killed = Bench(file=tmp_path / "jobs")
        await killed.runs.open()
        uuid = await killed.add()
        killed.trainers[0].line("a line")
        killed.runs._save(killed.runs.find("m", uuid))  # type: ignore[arg-type]  # as SAVE_S later
        await killed.runs.store.close()  # nothing is saved afterwards

        later = Bench(file=tmp_path / "jobs")
        await later.runs.open()
        (found,) = later.runs.trainings_of("m")
        assert (found.record.status, message(found)) == (TrainingStatus.ERROR, SERVER_ENDED)
        assert await later.runs.log(found) == "a line\n"
        await later.runs.close()
        killed.trainers[0].give(None)
        await turns()

    done(work())


def test_unloading_a_model_ends_its_trainings() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.add("m")
        await bench.add("m")
        await bench.add("n")

        await bench.runs.on_unload("m")

        assert {message(run) for run in bench.runs.trainings_of("m")} == {
            "model 'm' was unloaded while the training ran"
        }
        assert [run.phase for run in bench.runs.trainings_of("n")] == ["training"]
        await bench.runs.close()

    done(work())


def test_a_training_that_takes_long_to_kill_is_reported_as_canceled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        bench = Bench()
        uuid = await bench.add()
        monkeypatch.setattr(bench.trainers[0], "kill", lambda why: None)

        record = await bench.runs.remove("m", uuid)

        assert record is not None
        assert (record.status, json.loads(record.document)["status"]) == (TrainingStatus.CANCELLED, "cancelled")
        bench.trainers[0].give("late")
        await bench.runs.close()

    monkeypatch.setattr(module, "END_S", 0.0)
    done(work())


def test_an_unreadable_record_does_not_prevent_others_from_being_read(tmp_path: Path) -> None:
    async def work() -> None:
        earlier = Store(tmp_path / "jobs")
        await earlier.open()
        earlier.put(TrainingRecord("a" * 32, "m", TrainingStatus.DONE, "no JSON"))
        earlier.put(TrainingRecord("b" * 32, "m", TrainingStatus.DONE, started_json("b" * 32, NOON, {})))
        await earlier.close()

        bench = Bench(file=tmp_path / "jobs")
        await bench.runs.open()
        assert [run.record.uuid for run in bench.runs.trainings_of("m")] == ["b" * 32]
        await bench.runs.close()

    done(work())


async def run_until(holds: Any) -> None:
    """Let the loop and its threads run; `done` limits the time."""
    while not holds():  # noqa: ASYNC110 - threads have no event
        await asyncio.sleep(0)


def test_a_training_removed_before_its_process_exists_never_runs() -> None:
    async def work() -> None:
        bench = Bench()
        run = await bench.runs.add("m", {}, b"asked")
        assert (await bench.runs.remove("m", run.record.uuid)) is run.record
        assert run.record.status is TrainingStatus.CANCELLED
        assert [trainer.ended for trainer in bench.trainers] == [True]

    done(work())


def test_the_first_reason_for_a_trainings_end_is_recorded() -> None:
    async def work() -> None:
        bench = Bench()
        uuid = await bench.add()
        unloading = asyncio.ensure_future(bench.runs.on_unload("m"))
        await asyncio.sleep(0)
        await bench.runs.close()
        await unloading
        run = bench.runs.find("m", uuid)
        assert run is not None
        assert message(run) == "model 'm' was unloaded while the training ran"

    done(work())


def test_a_training_removed_while_running_leaves_no_record(tmp_path: Path) -> None:
    async def work() -> None:
        bench = Bench(file=tmp_path / "jobs")
        await bench.runs.open()
        uuid = await bench.add()
        bench.trainers[0].line("a line")
        await bench.runs.remove("m", uuid)
        await bench.runs.close()
        later = Bench(file=tmp_path / "jobs")
        await later.runs.open()
        assert later.runs.trainings_of("m") == []
        await later.runs.close()

    done(work())
