"""Counting: how many Instances are kept, with invented measurements and with runs of a fake model."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.devices import memory
from penstock.batching.loading import counting, opening
from penstock.batching.loading.counting import (
    Split,
    Trial,
    Trials,
    candidate_splits,
    choose_split,
    count_instances,
    run_concurrently,
)
from penstock.batching.running.instance import ThreadInstance
from penstock.batching.spec import THREADS_OPTION, BatchPolicy, InstanceGroup, ModelSpec
from tests.fakes import FakeBackend, Function

MB = 1 << 20
GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
SPEC = ModelSpec("m", 1, Path("model"), "fake", policy=BatchPolicy(max_batch_rows=8), instances=(InstanceGroup(0),))


class Measured:
    """A machine with a given throughput for each number of Instances, and a given memory for each Instance."""

    def __init__(self, rows_per_s: Mapping[int, float], each_bytes: int = MB) -> None:
        self._rows_per_s = rows_per_s
        self._each_bytes = each_bytes

    def __call__(self, split: Split) -> Trial | None:
        rate = self._rows_per_s.get(split.count)
        return None if rate is None else Trial(split, rate, 10 * MB + self._each_bytes * split.count)


def counts(tried: list[Trial]) -> list[int]:
    return [trial.split.count for trial in tried]


class TestCandidateSplits:
    @pytest.mark.parametrize(
        ("cpus", "expected"),
        [
            (1, [(1, 1)]),
            (2, [(1, 2), (2, 1)]),
            (6, [(1, 6), (2, 5), (4, 3), (6, 1)]),
            (8, [(1, 8), (2, 7), (4, 5), (8, 1)]),
        ],
    )
    def test_threads_are_divided_among_the_instances_of_a_cpu(self, cpus: int, expected: list[tuple[int, int]]) -> None:
        assert candidate_splits("cpu", cpus, None) == [Split(*each) for each in expected]

    def test_configured_thread_counts_are_kept(self) -> None:
        assert candidate_splits("cpu", 4, 2) == [Split(1, 2), Split(2, 2), Split(4, 2)]
        for options, thread_count in (
            ({THREADS_OPTION: "2"}, 2),
            ({THREADS_OPTION: "0"}, 0),
            ({}, 0),
            ({"TF_NUM_INTRA_THREADS": "3"}, 3),
        ):
            assert replace(SPEC, options=options).threads == thread_count

    def test_a_gpu_is_tried_with_one_to_four_instances(self) -> None:
        assert candidate_splits("cuda:0", 64, None) == [Split(1), Split(2), Split(3), Split(4)]


class TestChooseSplit:
    @pytest.mark.parametrize(
        ("rows_per_s", "instance_count", "tried"),
        [
            ({1: 100, 2: 190, 4: 360, 8: 700}, 8, [1, 2, 4, 8]),
            ({1: 100, 2: 190, 4: 200, 8: 700}, 2, [1, 2, 4]),
            ({1: 100, 2: 109, 4: 400}, 1, [1, 2]),
            ({1: 100, 2: 111, 4: 90}, 2, [1, 2, 4]),
            ({1: 100, 2: 60}, 1, [1, 2]),
        ],
    )
    def test_more_instances_are_kept_while_each_step_raises_throughput_enough(
        self, rows_per_s: dict[int, float], instance_count: int, tried: list[int]
    ) -> None:
        split, trials = choose_split(candidate_splits("cpu", 8, 1), Measured(rows_per_s), 1 << 40)

        assert (split.count, counts(trials)) == (instance_count, tried)

    def test_an_instance_count_measured_to_exceed_the_memory_budget_is_not_kept(self) -> None:
        split, trials = choose_split(
            candidate_splits("cpu", 8, 1), Measured({1: 1, 2: 2, 4: 4, 8: 8}, 100 * MB), 200 * MB
        )

        assert (split.count, counts(trials)) == (1, [1, 2])

    def test_an_instance_count_that_cannot_fit_the_memory_budget_is_not_tried(self) -> None:
        split, trials = choose_split(
            candidate_splits("cpu", 8, 1), Measured({1: 1, 2: 2, 4: 4, 8: 8}, 100 * MB), 300 * MB
        )

        assert (split.count, counts(trials)) == (2, [1, 2])

    def test_one_instance_is_kept_even_beyond_the_memory_budget(self) -> None:
        split, _ = choose_split(candidate_splits("cpu", 8, 1), Measured({1: 1, 2: 9}, 100 * MB), MB)

        assert split.count == 1

    @pytest.mark.parametrize(("rows_per_s", "instance_count"), [({}, 1), ({1: 100}, 1), ({1: 100, 2: 200}, 2)])
    def test_an_instance_count_that_cannot_be_measured_is_not_kept(
        self, rows_per_s: dict[int, float], instance_count: int
    ) -> None:
        split, _ = choose_split(candidate_splits("cpu", 8, 1), Measured(rows_per_s), 1 << 40)

        assert split.count == instance_count

    def test_the_memory_budget_is_the_configured_one_or_half_of_the_free_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(counting, "free_bytes", lambda: 100 * MB)

        assert counting.budget_bytes(ModelSpec("m", 1, Path("model"), memory_budget_bytes=7)) == 7
        assert counting.budget_bytes(SPEC) == 50 * MB


class Loads:
    """A `load` that records the threads of each session that it opened."""

    def __init__(self, function: Function = list, most: int = 99) -> None:
        self.threads: list[int] = []
        self.backends: list[FakeBackend] = []
        self._function = function
        self._most = most

    def __call__(self, threads: int) -> FakeBackend:
        if len(self.threads) == self._most:
            raise InferError(Code.INTERNAL, "no memory")
        self.threads.append(threads)
        self.backends.append(FakeBackend(GRAPH, self._function))
        return self.backends[-1]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement is one run."""
    monkeypatch.setattr(counting, "TRIAL_NS", 0)


class TestTrials:
    def test_a_trial_runs_all_of_its_instances_in_parallel(self) -> None:
        meeting = threading.Barrier(3)

        def meet(inputs: list[Any]) -> list[Any]:
            if threading.current_thread() is not threading.main_thread():
                meeting.wait(10)
            return list(inputs)

        trials = Trials(SPEC, Loads(meet), 1)
        trial = trials(Split(3, 1))

        assert trial is not None
        assert trial.rows_per_s > 0

    def test_trials_run_batches_of_the_size_that_the_model_mostly_runs_in(self) -> None:
        loads = Loads()
        trials = Trials(SPEC, loads, 1)
        trials(Split(2, 1))

        assert trials.rows in {1, 2, 4, 8}
        assert loads.backends[0].runs[-1].rows == trials.rows

    def test_trials_run_only_allowed_sizes(self) -> None:
        loads = Loads()
        spec = ModelSpec("m", 1, Path("model"), policy=BatchPolicy(max_batch_rows=8, allowed_rows=(3, 8)))
        Trials(spec, loads, 1)(Split(1, 1))

        assert {run.rows for run in loads.backends[0].runs} <= {3, 8}

    def test_a_session_is_reused_while_its_thread_count_is_the_same(self) -> None:
        loads = Loads()
        trials = Trials(SPEC, loads, 4)
        for split in (Split(1, 4), Split(2, 4), Split(4, 1)):
            trials(split)

        assert loads.threads == [4, 1]
        assert [backend.closed for backend in loads.backends] == [True, False]

    @pytest.mark.parametrize("error", [InferError(Code.INVALID, "no zeros"), ZeroDivisionError()])
    def test_a_model_that_does_not_run_on_zeros_is_not_measured(self, error: Exception) -> None:
        def fails(inputs: list[Any]) -> list[Any]:
            raise error

        assert Trials(SPEC, Loads(fails), 1)(Split(1, 1)) is None

    def test_no_further_trial_runs_after_the_time_budget_is_spent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(counting, "BUDGET_NS", -1)

        assert Trials(SPEC, Loads(), 1)(Split(1, 1)) is None

    def test_a_spec_that_does_not_fit_the_model_is_refused_and_its_backend_is_closed(self) -> None:
        loads = Loads()
        wrong = ModelSpec("m", 1, Path("model"), inputs=(TensorSpec("z", "FP32", (4,)),), outputs=GRAPH.outputs)
        with pytest.raises(InferError, match="'z'"):
            Trials(wrong, loads, 1)

        assert loads.backends[0].closed

    def test_an_error_on_one_thread_ends_the_other_threads_and_is_raised(self) -> None:
        def fails() -> None:
            raise InferError(Code.INTERNAL, "out of memory")

        with pytest.raises(InferError, match="out of memory"):
            run_concurrently([lambda: None, fails, lambda: None])

    def test_if_a_thread_cannot_start_no_started_thread_is_left_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        begun: list[threading.Thread] = []
        start = threading.Thread.start

        def first_only(thread: threading.Thread) -> None:
            if begun:
                raise RuntimeError("can't start new thread")
            begun.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", first_only)
        with pytest.raises(RuntimeError, match="can't start"):
            run_concurrently([lambda: None, lambda: None])

        assert [thread.is_alive() for thread in begun] == [False]

    @pytest.mark.parametrize("stands_still_ns", [0, 100_000_000, 20_000_000_000])
    def test_a_momentary_stall_of_the_machine_does_not_change_the_measured_rate(
        self, monkeypatch: pytest.MonkeyPatch, stands_still_ns: int
    ) -> None:
        now, runs = [1], [0]

        def run() -> None:
            runs[0] += 1
            now[0] += 10_000_000 + (stands_still_ns if runs[0] == 5 else 0)

        monkeypatch.setattr(counting, "time", SimpleNamespace(monotonic_ns=lambda: now[0]))
        monkeypatch.setattr(counting, "TRIAL_NS", 250_000_000)

        assert run_concurrently([run]) == [pytest.approx(100.0)]

    def test_every_function_runs_at_least_once_after_all_threads_are_ready(self) -> None:
        runs: list[int] = []
        rates = run_concurrently([lambda: runs.append(1), lambda: runs.append(2)])

        assert sorted(runs) == [1, 1, 2, 2]
        assert all(rate > 0 for rate in rates)


def measured(monkeypatch: pytest.MonkeyPatch, rows_per_s: Mapping[int, float]) -> None:
    def call(trials: Trials, split: Split) -> Trial | None:
        trials.session(split.threads)
        trials.rows = 16
        return Measured(rows_per_s)(split)

    monkeypatch.setattr(Trials, "__call__", call)
    monkeypatch.setattr(counting, "usable_cpus", lambda: 4)


class TestCountInstances:
    def test_count_instances_returns_the_chosen_session_and_closes_all_others(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measured(monkeypatch, {1: 100, 2: 190, 4: 191})
        loads = Loads()
        split, backends, tried = count_instances(SPEC, "cpu", loads, None)

        assert (split, counts(tried)) == (Split(2, 3), [1, 2, 4])
        assert loads.threads == [4, 3, 1, 3]
        assert [each.closed for each in loads.backends] == [True, True, True, False]
        assert backends == loads.backends[-1:]

    def test_the_measurements_are_logged_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        measured(monkeypatch, {1: 100, 2: 190, 4: 191})
        with caplog.at_level(logging.INFO):
            count_instances(SPEC, "cpu", Loads(), None)

        line = "model m on cpu: 2 instances x 3 threads, chosen from 1 instance x 4 threads 100 rows/s, "
        line += "2 instances x 3 threads 190 rows/s, 4 instances x 1 thread 191 rows/s, in batches of 16"
        assert caplog.messages == [line]

    def test_one_instance_is_chosen_when_throughput_cannot_be_measured(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        measured(monkeypatch, {})
        with caplog.at_level(logging.INFO):
            split, _, tried = count_instances(SPEC, "cpu", Loads(), None)

        assert (split, tried) == (Split(1, 4), [])
        assert "throughput could not be measured" in caplog.text

    def test_an_error_from_reopening_the_chosen_session_is_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measured(monkeypatch, {1: 100, 2: 50})
        loads = Loads(most=2)
        with pytest.raises(InferError, match="no memory"):
            count_instances(SPEC, "cpu", loads, None)

        assert all(backend.closed for backend in loads.backends)


class TestOpening:
    @pytest.fixture(autouse=True)
    def _measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measured(monkeypatch, {1: 100, 2: 190, 4: 191})

    def test_an_opened_model_has_the_chosen_instances_in_its_spec_and_the_trials_behind_them(self) -> None:
        loads: list[tuple[str, str]] = []

        def load(path: Path, device: str, options: Mapping[str, str]) -> FakeBackend:
            loads.append((device, options.get("intra_op_thread_count", "")))
            return FakeBackend(GRAPH, list)

        model = opening.open_model(SPEC, {"fake": load}, lambda *_: None)
        try:
            assert model.spec.instances == (InstanceGroup(2, ("cpu",)),)
            assert dict(model.spec.options) == {"intra_op_thread_count": "3"}
            assert [*model.instance_trials] == [(1, 100), (2, 190), (4, 191)]
            assert len(model.instances) == 2
            assert loads == [("cpu", threads) for threads in ("4", "3", "1", "3")]
        finally:
            model.close()

    def test_instances_are_counted_per_device_without_dividing_threads_among_several_devices(self) -> None:
        loads: list[tuple[str, str]] = []

        def load(path: Path, device: str, options: Mapping[str, str]) -> FakeBackend:
            loads.append((device, options.get("intra_op_thread_count", "")))
            return FakeBackend(GRAPH, list)

        groups = (InstanceGroup(0, ("cpu", "cuda:0")), InstanceGroup(3, ("cuda:1",)))
        spec = ModelSpec("m", 1, Path("model"), "fake", policy=SPEC.policy, instances=groups)
        model = opening.open_model(spec, {"fake": load}, lambda *_: None)
        try:
            assert [(group.count, group.devices) for group in model.spec.instances] == [
                (2, ("cpu",)), (2, ("cuda:0",)), (3, ("cuda:1",)),
            ]  # fmt: skip
            assert loads == [("cpu", ""), *[("cuda:0", "")] * 2, *[("cuda:1", "")] * 3]
            assert len({id(place.backend) for place in model.placements}) == 6
        finally:
            model.close()

    def test_a_lost_device_is_reloaded_with_the_chosen_thread_count(self) -> None:
        loads: list[tuple[str, str]] = []

        def load(path: Path, device: str, options: Mapping[str, str]) -> FakeBackend:
            loads.append((device, options.get("intra_op_thread_count", "")))
            return FakeBackend(GRAPH, list)

        model = opening.open_model(SPEC, {"fake": load}, lambda *_: None)
        try:
            instance = model.instances[0]
            assert isinstance(instance, ThreadInstance)
            instance.placement.rebind([instance.binding], model.signature, model.max_rows)

            assert loads[-1] == ("cpu", "3")
        finally:
            model.close()


class TestMemory:
    def test_free_memory_is_the_smaller_of_the_machines_and_the_containers(self, tmp_path: Path) -> None:
        proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
        proc.mkdir()
        cgroup.mkdir()
        (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
        alone = memory.free_bytes(proc, cgroup)
        (cgroup / "memory.max").write_text("max\n")
        (cgroup / "memory.current").write_text("1000000\n")
        unlimited = memory.free_bytes(proc, cgroup)
        (cgroup / "memory.max").write_text("3000000\n")

        assert (alone, unlimited, memory.free_bytes(proc, cgroup)) == (5000 * 1024, 5000 * 1024, 2_000_000)

    @pytest.mark.parametrize(
        ("membership", "limit", "used", "files"),
        [
            ("0::/a/b\n", "a/memory.max", "a/memory.current", "inactive_file"),
            (
                "7:cpu:/\n5:memory:/a\n", "memory/a/memory.limit_in_bytes", "memory/a/memory.usage_in_bytes",
                "total_inactive_file",
            ),
        ],
        ids=["version 2", "version 1"],
    )  # fmt: skip
    def test_a_limit_of_a_parent_cgroup_reduces_free_memory_except_for_reclaimable_page_cache(
        self, membership: str, limit: str, used: str, files: str, tmp_path: Path
    ) -> None:
        proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (cgroup / limit).parent.mkdir(parents=True)
        (proc / "meminfo").write_text("MemAvailable:    5000 kB\n")
        (proc / "self" / "cgroup").write_text(membership)
        (cgroup / limit).write_text("3000000\n")
        (cgroup / used).write_text("1000000\n")
        free_bytes = memory.free_bytes(proc, cgroup)
        (cgroup / used).with_name("memory.stat").write_text(f"anon 300000\n{files} 700000\nslab 1\n")

        assert (free_bytes, memory.free_bytes(proc, cgroup)) == (2_000_000, 2_700_000)

    def test_without_system_information_free_memory_is_unknown(self, tmp_path: Path) -> None:
        assert memory.free_bytes(tmp_path, tmp_path) is None
        assert memory.resident_bytes(tmp_path) == 0

    def test_resident_memory_of_the_test_process_is_reported(self) -> None:
        assert memory.resident_bytes() > MB
