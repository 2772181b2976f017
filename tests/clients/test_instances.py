"""Instance groups and the rate limiter as Triton's tests (qa/L0_instance_group, L0_rate_limiter) check them.

Over HTTP and gRPC. Instead of slow models, runs wait at a gate that the test controls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from penstock.server.repository.gpus import Gpus, UsableGpus
from tests.clients import models, sequence_models
from tests.clients.gated_onnxruntime import Gated
from tests.clients.parallel_requests import Asking, answers
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

FIRST = 'rate_limiter { resources [ { name: "resource1" count: 4 } ] }'
SECOND = (
    'rate_limiter { resources [ { name: "resource1" count: 2 }, { name: "resource2" global: true count: 2 } ] '
    "priority: 2 }"
)
LIMITED = "execution_count"


def short(name: str, limit: int, required: int) -> str:
    return (
        f'Resource count for "{name}" is limited to {limit} which will prevent scheduling of one or more model '
        f"instances, the minimum required count is {required}"
    )


def group(limiter: str = "", count: int = 1) -> str:
    return f"instance_group {{ kind: KIND_CPU count: {count} {limiter} }}"


def write(root: Path, name: str, config: str, rows: int = 1) -> None:
    models.write_identity(root, name, f"max_batch_size: {rows} {config}")
    (root / name / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def served(root: Path, *resources: str, rate_limit: str = LIMITED, **settings: Any) -> Iterator[tuple[Live, Gated]]:
    """Serve the models of the folder; their runs are recorded from now on."""
    gated = Gated()
    with live_server(
        root, loaders=gated.loaders, rate_limit=rate_limit, rate_limit_resource=resources, **settings
    ) as live:
        gated.runs.clear()
        yield live, gated


def client_of(live: Live, triton: Any) -> Any:
    grpc = triton is tritonclient.grpc
    return triton.InferenceServerClient(live.grpc_address if grpc else live.address)


def reasons(live: Live, triton: Any) -> dict[str, str]:
    """Return the reason why each model is unavailable, "" if it is ready."""
    with client_of(live, triton) as client:
        if triton is tritonclient.grpc:
            index = client.get_model_repository_index(as_json=True).get("models", [])
        else:
            index = client.get_model_repository_index()
    return {entry["name"]: "" if entry["state"] == "READY" else entry["reason"] for entry in index}


def config_of(live: Live, triton: Any, name: str) -> dict[str, Any]:
    with client_of(live, triton) as client:
        if triton is tritonclient.grpc:
            found: dict[str, Any] = client.get_model_config(name, as_json=True)["config"]
        else:
            found = client.get_model_config(name)
    return found


class TestInsufficientResources:
    @pytest.mark.parametrize(
        ("resources", "first", "second"),
        [
            (["resource1:1"], short("resource1", 1, 4), "is limited to"),
            (["resource1:3", "resource2:2"], short("resource1", 3, 4), ""),
            (["resource1:10:10", "resource2:2"], short("resource1", 0, 4), short("resource1", 0, 2)),
            (["resource1:4", "resource2:2"], "", ""),
            (["resource1:4:0", "resource2:2:9"], "", ""),
            ([], "", ""),
        ],
    )
    def test_a_model_that_needs_too_many_resources_is_not_loaded_and_the_index_has_the_reason(
        self, tmp_path: Path, triton: Any, resources: list[str], first: str, second: str
    ) -> None:
        write(tmp_path, "first", group(FIRST))
        write(tmp_path, "second", group(SECOND))
        with served(tmp_path, *resources) as (live, _):
            found = reasons(live, triton)

        assert bool(found["first"]) == bool(first)
        assert first in found["first"]
        assert bool(found["second"]) == bool(second)
        assert second in found["second"]

    def test_one_group_that_needs_too_many_resources_makes_the_whole_model_unavailable(
        self, tmp_path: Path, triton: Any
    ) -> None:
        write(tmp_path, "m", group(SECOND) + group(FIRST))
        with served(tmp_path, "resource1:3", "resource2:2") as (live, _):
            assert short("resource1", 3, 4) in reasons(live, triton)["m"]

    def test_a_resource_cannot_be_global_for_one_model_and_device_specific_for_another(
        self, tmp_path: Path, triton: Any
    ) -> None:
        write(tmp_path, "first", group(SECOND))
        write(tmp_path, "second", group(SECOND.replace("global: true", "global: false")))
        text = 'Resource "resource2" is present as both global and device-specific resource in the model configuration.'
        with served(tmp_path, model_control_mode="explicit") as (live, _), client_of(live, triton) as client:
            client.load_model("first")
            with pytest.raises(Exception, match="load failed for model 'second'") as failed:
                client.load_model("second")
            found = reasons(live, triton)
            client.unload_model("first")
            client.load_model("second")
            later = reasons(live, triton)

        assert text in str(failed.value)
        assert text in found["second"]
        assert later["second"] == ""

    def test_excessive_resources_are_accepted_while_the_rate_limiter_is_off(self, tmp_path: Path, triton: Any) -> None:
        write(tmp_path, "m", group(FIRST, count=2))
        with served(tmp_path, "resource1:1", rate_limit="off") as (live, gated), Asking(live, triton, "m") as asking:
            gated.gate.close()
            sent = asking.queue(1, 1)
            for _ in sent:
                live.call(gated.gate.entered())
            gated.gate.open()

            assert [answer.error for answer in answers(sent)] == ["", ""]


class TestCrossModelPriority:
    @pytest.mark.parametrize("resources", [["resource1:4", "resource2:2"], []], ids=["explicit", "implicit"])
    def test_priority_2_gets_half_the_executions_if_one_instance_runs_at_a_time(
        self, tmp_path: Path, triton: Any, resources: list[str]
    ) -> None:
        write(tmp_path, "first", group(FIRST))
        write(tmp_path, "second", group(SECOND))
        with (
            served(tmp_path, *resources) as (live, gated),
            Asking(live, triton, "first") as first,
            Asking(live, triton, "second") as second,
        ):
            gated.gate.close()
            held = first.ask(1, 0.0)
            live.call(gated.gate.entered())
            sent = [*first.queue(*[1] * 16, value=1.0), *second.queue(*[1] * 8, value=2.0)]
            second.until_in_line()
            alone = len(gated.runs)
            gated.gate.open()
            errors = {answer.error for answer in answers([held, *sent])}

            assert (alone, errors) == (1, {""})
            order = [1, *(int(value) for (value,) in gated.runs[1:])]
            for count in range(3, 24, 3):
                assert abs(order[:count].count(1) - 2 * order[:count].count(2)) <= 2, order
            assert first.counts() == ({1: 17}, 17, 17)
            assert second.counts() == ({1: 8}, 8, 8)

    def test_two_models_run_in_parallel_if_resources_suffice(self, tmp_path: Path, triton: Any) -> None:
        write(tmp_path, "first", group(FIRST))
        write(tmp_path, "second", group(SECOND))
        with (
            served(tmp_path, "resource1:6", "resource2:2") as (live, gated),
            Asking(live, triton, "first") as first,
            Asking(live, triton, "second") as second,
        ):
            gated.gate.close()
            sent = [first.ask(), second.ask()]
            for _ in sent:
                live.call(gated.gate.entered())
            gated.gate.open()

            assert [answer.error for answer in answers(sent)] == ["", ""]


class TestSeveralInstanceGroups:
    def test_batches_are_full_if_one_instance_runs_at_a_time(self, tmp_path: Path, triton: Any) -> None:
        batching = "dynamic_batching { preferred_batch_size: [4] }"
        write(tmp_path, "m", group(FIRST) + group(SECOND) + batching, rows=4)
        with served(tmp_path) as (live, gated), Asking(live, triton, "m") as asking:
            gated.gate.close()
            held = asking.ask(1)
            live.call(gated.gate.entered())
            sent = asking.queue(*[1] * 8)
            alone = len(gated.runs)
            gated.gate.open()
            errors = {answer.error for answer in answers([held, *sent])}

            assert (alone, errors) == (1, {""})
            assert asking.counts() == ({1: 1, 4: 2}, 3, 9)

    def test_two_groups_run_in_parallel_if_resources_suffice(self, tmp_path: Path, triton: Any) -> None:
        write(tmp_path, "m", group(FIRST) + group(SECOND))
        with served(tmp_path, "resource1:6", "resource2:2") as (live, gated), Asking(live, triton, "m") as asking:
            gated.gate.close()
            sent = asking.queue(1, 1)
            for _ in sent:
                live.call(gated.gate.entered())
            gated.gate.open()

            assert [answer.error for answer in answers(sent)] == ["", ""]

    def test_a_model_without_resources_does_not_wait_for_the_rate_limiter(self, tmp_path: Path, triton: Any) -> None:
        write(tmp_path, "m", group(FIRST, count=2))
        write(tmp_path, "free", group())
        with (
            served(tmp_path) as (live, gated),
            Asking(live, triton, "m") as limited,
            Asking(live, triton, "free") as free,
        ):
            gated.gate.close()
            sent = limited.queue(1, 1)
            live.call(gated.gate.entered())
            sent.append(free.ask())
            live.call(gated.gate.entered())
            waits = limited.waiting()
            gated.gate.open()

            assert (waits, [answer.error for answer in answers(sent)]) == (1, [""] * 3)


class TestSequences:
    @pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
    def test_a_sequence_keeps_its_state_across_groups_of_different_priorities(
        self, tmp_path: Path, strategy: str
    ) -> None:
        groups = group(FIRST) + group(SECOND) + group(SECOND.replace("priority: 2", "priority: 3"), 2)
        text = sequence_models.config(1, strategy + sequence_models.CONTROLS + sequence_models.STATE % "", groups)
        sequence_models.write_accumulator(tmp_path, "m", text)
        with (
            live_server(tmp_path, rate_limit=LIMITED) as live,
            tritonclient.grpc.InferenceServerClient(live.grpc_address) as client,
        ):
            for value in range(1, 10):
                tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
                tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
                more = {"sequence_start": value == 1, "sequence_end": value == 9}
                found = client.infer("m", [tensor], sequence_id=5, **more).as_numpy("y")
            (entry,) = client.get_inference_statistics("m").model_stats

        assert found.tolist() == [[45.0]]
        assert (entry.inference_count, entry.execution_count) == (9, 9)


class TestInstanceGroups:
    def test_as_many_batches_run_in_parallel_as_there_are_instances_and_all_are_counted(
        self, tmp_path: Path, triton: Any
    ) -> None:
        write(tmp_path, "m", group(count=2) + group(count=1))
        with served(tmp_path, rate_limit="off") as (live, gated), Asking(live, triton, "m") as asking:
            gated.gate.close()
            sent = asking.queue(*[1] * 5)
            for _ in range(3):
                live.call(gated.gate.entered())
            asking.until_waiting(2)
            running = len(gated.runs)
            gated.gate.open()

            assert [answer.error for answer in answers(sent)] == [""] * 5
            assert running == 3
            assert asking.counts() == ({1: 5}, 5, 5)

    def test_completed_groups_are_reported_in_the_model_configuration(self, tmp_path: Path, triton: Any) -> None:
        named = f'instance_group {{ name: "mine" kind: KIND_CPU count: 2 {SECOND} }}'
        write(tmp_path, "m", f"{named} instance_group {{ passive: true }} optimization {{ priority: PRIORITY_MAX }}")
        with served(tmp_path) as (live, _):
            config = config_of(live, triton, "m")
        mine, other = config["instance_group"]

        assert (mine["name"], mine["kind"], mine["count"]) == ("mine", "KIND_CPU", 2)
        assert mine["rate_limiter"]["priority"] == 2
        assert [each["name"] for each in mine["rate_limiter"]["resources"]] == ["resource1", "resource2"]
        assert [each.get("global", False) for each in mine["rate_limiter"]["resources"]] == [False, True]
        assert (other["name"], other["kind"], other["count"], other["passive"]) == ("m_1", "KIND_CPU", 1, True)
        assert config["optimization"]["priority"] == "PRIORITY_MAX"


class TestInstanceKinds:
    @pytest.fixture(autouse=True)
    def _no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Find no GPU, whatever the machine has."""
        monkeypatch.setattr(Gpus, "_usable_gpus", lambda _: UsableGpus((), "no driver"))

    @pytest.mark.parametrize(
        ("config", "kind", "count"),
        [
            ("", "KIND_CPU", 1),
            ("instance_group { }", "KIND_CPU", 1),
            ("instance_group { kind: KIND_AUTO count: 2 }", "KIND_CPU", 2),
            ("instance_group { kind: KIND_CPU count: 0 }", "KIND_CPU", 1),
            ("instance_group { kind: KIND_MODEL }", "KIND_MODEL", 1),
        ],
    )
    def test_a_model_that_does_not_require_a_gpu_runs_on_the_cpu_without_one(
        self, tmp_path: Path, triton: Any, config: str, kind: str, count: int
    ) -> None:
        write(tmp_path, "m", config)
        with served(tmp_path) as (live, _), Asking(live, triton, "m") as asking:
            (group,) = config_of(live, triton, "m")["instance_group"]
            assert answers([asking.ask()])[0].error == ""

        assert (group["kind"], group["count"], group.get("gpus", [])) == (kind, count, [])

    @pytest.mark.parametrize("gpus", ["", "gpus: [ 0 ]"])
    def test_a_model_that_requires_a_gpu_is_unavailable_without_one(
        self, tmp_path: Path, triton: Any, gpus: str
    ) -> None:
        write(tmp_path, "m", f"instance_group {{ kind: KIND_GPU {gpus} }}")
        with served(tmp_path) as (live, _):
            reason = reasons(live, triton)["m"]

        assert "instance group m_0 of model m has kind KIND_GPU but no GPUs are available" in reason


class TestHostPolicies:
    @pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="every thread is kept to the only CPU")
    def test_instances_and_the_threads_of_their_runtime_are_pinned_to_the_policys_cpus(self, tmp_path: Path) -> None:
        (cpu, *_) = os.sched_getaffinity(0)
        threads = 'parameters { key: "intra_op_thread_count" value { string_value: "4" } }'
        models.write_identity(tmp_path, "m", f'instance_group {{ count: 2 host_policy: "few" }} {threads}')
        before = threads_on(cpu)
        with live_server(tmp_path, host_policy=(f"few,cpu-cores={cpu}-{cpu}",)) as live:
            with tritonclient.http.InferenceServerClient(live.address) as client:
                assert client.is_model_ready("m")
            pinned = threads_on(cpu) - before

        assert len(pinned) == 2 + 3

    def test_a_host_policy_with_unavailable_cpus_fails_the_load(self, tmp_path: Path, triton: Any) -> None:
        write(tmp_path, "m", group())
        with served(tmp_path, host_policy=("cpu,cpu-cores=4000-4001",)) as (live, _):
            assert "host policy: this process cannot run on any of its CPUs" in reasons(live, triton)["m"]


def threads_on(cpu: int) -> set[str]:
    """Return the threads of this process that are pinned to this one CPU."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if f"Cpus_allowed_list:\t{cpu}\n" in (task / "status").read_text("ascii"):
                found.add(task.name)
    return found


class TestPassiveInstances:
    def test_a_model_with_only_passive_instances_is_ready_and_its_requests_fail(
        self, tmp_path: Path, triton: Any
    ) -> None:
        write(tmp_path, "m", "instance_group { passive: true }")
        with served(tmp_path) as (live, gated), Asking(live, triton, "m") as asking:
            with client_of(live, triton) as client:
                ready = client.is_model_ready("m")
            (answer,) = answers([asking.ask()])
            runs = list(gated.runs)

        assert ready
        assert "Unable to find the payload queue for the model m" in answer.error
        assert runs == []

    def test_passive_instances_leave_all_work_to_the_active_ones(self, tmp_path: Path, triton: Any) -> None:
        write(tmp_path, "m", "instance_group { passive: true count: 3 } instance_group { }")
        with served(tmp_path) as (live, gated), Asking(live, triton, "m") as asking:
            gated.gate.close()
            sent = asking.queue(1, 1)
            live.call(gated.gate.entered())
            asking.until_waiting(1)
            running = len(gated.runs)
            gated.gate.open()

            assert [answer.error for answer in answers(sent)] == ["", ""]
            assert running == 1
