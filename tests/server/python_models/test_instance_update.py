"""Python models that are reloaded with other instance groups: which instances are initialized and finalized.

The cases are those of Triton's own L0_model_update.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from tests.live import Live, live_server
from tests.server.python_models.repositories import wait_until, write_model

pytestmark = pytest.mark.slow
GUARD_S = 60.0
CODE = """
import os, time
import triton_python_backend_utils as pb_utils

NOTES = {notes!r}


def note(what):
    with open(os.path.join(NOTES, what), "a") as file:
        file.write("x")


def pass_gate(what):
    if os.path.exists(os.path.join(NOTES, "no_" + what)):
        note(what + "_begun")
    while os.path.exists(os.path.join(NOTES, "no_" + what)):
        time.sleep(0.005)


class TritonPythonModel:
    def initialize(self, args):
        pass_gate("initialize")
        note("initialized")

    def execute(self, requests):
        pass_gate("execute")
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(each, "x").as_numpy())])
            for each in requests
        ]

    def finalize(self):
        note("finalized")
"""
CONFIG = """
backend: "python"
max_batch_size: {rows}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
instance_group [ {groups} ]
"""


def cpu(count: int, more: str = "") -> str:
    return f"{{ count: {count} kind: KIND_CPU {more} }}"


@dataclass
class Stage:
    """A server with one model, and the notes that its instances make."""

    live: Live
    client: triton_grpc.InferenceServerClient
    root: Path
    notes: Path

    def says(self, groups: str, rows: int = 4) -> None:
        write_model(self.root, "m", CODE.format(notes=str(self.notes)), CONFIG.format(rows=rows, groups=groups))

    def configure(self, groups: str, rows: int = 4) -> None:
        written = self.notes / "config.pbtxt"
        written.write_text(CONFIG.format(rows=rows, groups=groups))
        # at once: the load before may read it just now
        written.replace(self.root / "m" / "config.pbtxt")

    def load(self, groups: str, rows: int = 4) -> tuple[int, int]:
        """Load it as configured. Returns: how many were initialized and finalized by then."""
        self.configure(groups, rows)
        self.client.load_model("m")
        assert self.ask()
        return self.counts

    @property
    def counts(self) -> tuple[int, int]:
        return self.noted("initialized"), self.noted("finalized")

    def noted(self, what: str) -> int:
        file = self.notes / what
        return len(file.read_text()) if file.exists() else 0

    def step(self, sequence: int, *, start: bool = False, end: bool = False) -> bool:
        tensor = triton_grpc.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
        answer = self.client.infer("m", [tensor], sequence_id=sequence, sequence_start=start, sequence_end=end)
        return bool(answer.as_numpy("y").tolist() == [[1, 2]])

    def ask(self) -> bool:
        tensor = triton_grpc.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
        with triton_grpc.InferenceServerClient(self.live.grpc_address) as client:
            return bool(client.infer("m", [tensor]).as_numpy("y").tolist() == [[1, 2]])

    def unload(self) -> None:
        self.client.unload_model("m")
        wait_until(lambda: self.noted("initialized") == self.noted("finalized"))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    root, notes = tmp_path / "models", tmp_path / "notes"
    root.mkdir()
    notes.mkdir()
    server = live_server(root, model_control_mode="explicit", rate_limit="execution_count")
    with server as live, triton_grpc.InferenceServerClient(live.grpc_address) as client:
        new_stage = Stage(live, client, root, notes)
        new_stage.says(cpu(1))
        yield new_stage
        for gate in notes.glob("no_*"):
            gate.unlink()


def test_changing_the_count_adds_or_ends_only_the_difference(stage: Stage) -> None:
    assert stage.load(cpu(3)) == (3, 0)
    assert stage.load(cpu(4)) == (4, 0)
    assert stage.load(cpu(3)) == (4, 1)
    assert stage.load(cpu(4)) == (5, 1)
    stage.unload()
    assert stage.counts == (5, 5)
    with pytest.raises(InferenceServerException):
        stage.ask()


def test_groups_that_differ_only_in_name_are_treated_as_one(stage: Stage) -> None:
    other = 'host_policy: "other"'
    assert stage.load(f"{cpu(2)}, {cpu(1, other)}") == (3, 0)
    assert stage.load(f"{cpu(1)}, {cpu(3, other)}") == (5, 1)
    named = 'name: "named"'
    assert stage.load(f"{cpu(1, other)}, {cpu(1, other)}, {cpu(2, named)}") == (6, 2)


def test_an_invalid_configuration_changes_nothing(stage: Stage) -> None:
    assert stage.load(cpu(3)) == (3, 0)

    with pytest.raises(InferenceServerException):
        stage.load("--- wrong ---")
    with pytest.raises(InferenceServerException):
        stage.load(cpu(-1))

    assert stage.ask()
    assert stage.counts == (3, 0)
    assert stage.load(cpu(2)) == (3, 1)


def test_a_changed_file_replaces_all_instances(stage: Stage) -> None:
    assert stage.load(cpu(2)) == (2, 0)
    with (stage.root / "m" / "1" / "model.py").open("a") as file:
        file.write("\n# another\n")

    assert stage.load(cpu(3)) == (5, 2)


def test_a_change_of_another_field_replaces_all_instances(stage: Stage) -> None:
    assert stage.load(cpu(2)) == (2, 0)
    assert stage.load(cpu(1), rows=8) == (3, 2)


def test_an_instance_is_added_while_another_instance_is_busy(stage: Stage) -> None:
    stage.load(cpu(1))
    (stage.notes / "no_execute").touch()
    with ThreadPoolExecutor() as pool:
        busy = pool.submit(stage.ask)
        wait_until(lambda: stage.noted("execute_begun") == 1)
        stage.configure(cpu(2))

        stage.client.load_model("m")

        assert not busy.done()
        assert stage.counts == (2, 0)
        (stage.notes / "no_execute").unlink()
        assert busy.result()


def test_a_busy_instance_ends_after_its_answer_without_delaying_the_load(stage: Stage) -> None:
    stage.load(cpu(2))
    (stage.notes / "no_execute").touch()
    with ThreadPoolExecutor() as pool:
        busy = [pool.submit(stage.ask) for _ in range(2)]
        wait_until(lambda: stage.noted("execute_begun") == 2)
        stage.configure(cpu(1))

        stage.client.load_model("m")

        assert stage.counts == (2, 0)
        (stage.notes / "no_execute").unlink()
        assert all(each.result() for each in busy)
    wait_until(lambda: stage.counts == (2, 1))


def test_requests_are_answered_while_an_instance_is_being_added(stage: Stage) -> None:
    stage.load(cpu(1))
    (stage.notes / "no_initialize").touch()
    stage.configure(cpu(2))
    with ThreadPoolExecutor() as pool:
        load = pool.submit(stage.client.load_model, "m")
        wait_until(lambda: stage.noted("initialize_begun") == 1)

        assert stage.ask()

        assert not load.done()
        (stage.notes / "no_initialize").unlink()
        load.result()
    assert stage.counts == (2, 0)


@pytest.mark.parametrize("strategy", ["direct {}", "oldest { max_candidate_sequences: 2 }"])
def test_sequences_stay_on_their_instance_which_ends_after_them(stage: Stage, strategy: str) -> None:
    def load(count: int) -> tuple[int, int]:
        stage.configure(cpu(count))
        with (stage.root / "m" / "config.pbtxt").open("a") as file:
            file.write(f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {strategy} }}")
        stage.client.load_model("m")
        return stage.counts

    assert load(2) == (2, 0)
    assert all(stage.step(number, start=True) for number in (1, 2))
    assert load(1) == (2, 0)
    assert all(stage.step(number) for number in (1, 2, 1))
    assert load(3) == (4, 0)
    assert stage.step(2, end=True)
    wait_until(lambda: stage.counts == (4, 1))
    assert load(1) == (4, 3)
    assert stage.step(1, end=True)


def test_changed_rate_limiter_resources_replace_the_instances(stage: Stage) -> None:
    needs = "rate_limiter {{ resources [ {{ name: 'r' count: {} }} ] }}"
    assert stage.load(cpu(2, needs.format(2))) == (2, 0)
    assert stage.load(cpu(3, needs.format(2))) == (3, 0)
    stage.load(cpu(3, needs.format(4)))
    wait_until(lambda: stage.counts == (6, 3))


def test_concurrent_loads_run_in_order_and_lose_no_requests(stage: Stage) -> None:
    stage.load(cpu(2))
    stop = threading.Event()

    def ask_repeatedly() -> int:
        count = 0
        while not stop.is_set():
            assert stage.ask()
            count += 1
        return count

    with ThreadPoolExecutor() as pool, ExitStack() as at_last:
        at_last.callback(stop.set)
        asking = [pool.submit(ask_repeatedly) for _ in range(3)]
        for counts in ((1, 3), (2, 4), (1, 2)):
            loads = []
            for count in counts:
                stage.configure(cpu(count))
                loads.append(pool.submit(stage.client.load_model, "m"))
            for load in loads:
                load.result()
        stop.set()
        assert all(each.result() for each in asking)
    wait_until(lambda: stage.noted("initialized") - stage.noted("finalized") == 2)


def test_the_reported_configuration_has_the_current_instance_count(stage: Stage) -> None:
    stage.load(cpu(1))
    stage.load(cpu(3))

    assert stage.client.get_model_config("m").config.instance_group[0].count == 3


def test_a_load_request_can_specify_the_instance_groups(stage: Stage) -> None:
    stage.load(cpu(1))
    config = stage.client.get_model_config("m", as_json=True)["config"]
    sent = {key: config[key] for key in ("name", "backend", "input", "output")} | {"max_batch_size": 4}

    stage.client.load_model("m", config=json.dumps({**sent, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]}))

    assert stage.counts == (3, 0)
