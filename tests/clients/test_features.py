"""Features that a configuration has one field for: what a live server makes of each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from penstock.backends.signature import Signature, TensorSpec
from tests.clients import models
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.fakes import PATIENCE_S, FakeBackend, fake_loader
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
AN_HOUR = "max_queue_delay_microseconds: 3600000000"


def infer(live: Live, model: str, value: float, width: int = 4, **said: Any) -> float:
    x = httpclient.InferInput("x", [1, width], "FP32")
    x.set_data_from_numpy(np.full((1, width), value, np.float32))
    with httpclient.InferenceServerClient(live.address) as client:
        return float(client.infer(model, [x], **said).as_numpy("y")[0, 0])


def described(live: Live, model: str) -> Any:
    with httpclient.InferenceServerClient(live.address) as client:
        return client.get_model_config(model)


class TestSlots:
    """`direct { minimum_slot_utilization }`: a batch waits until so many of its slots have something to run."""

    @pytest.fixture
    def live(self, tmp_path: Path) -> Iterator[Live]:
        inside = f"direct {{ minimum_slot_utilization: 0.5 {AN_HOUR} }}" + CONTROLS + STATE % ""
        write_accumulator(tmp_path, "m", config(4, inside))
        with live_server(tmp_path) as server:
            yield server

    def test_half_of_them_run_together_and_fewer_wait(self, live: Live) -> None:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(infer, live, "m", 1, 1, sequence_id=1, sequence_start=True)
            second = pool.submit(infer, live, "m", 2, 1, sequence_id=2, sequence_start=True)
            assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (1, 2)
        with httpclient.InferenceServerClient(live.address) as client:
            (counted,) = client.get_inference_statistics("m")["model_stats"]

        assert (counted["inference_count"], counted["execution_count"]) == (2, 1)
        assert described(live, "m")["sequence_batching"]["direct"]["minimum_slot_utilization"] == 0.5


def test_models_of_any_priority_are_served_and_say_it(tmp_path: Path) -> None:
    for name in ("max", "min"):
        models.write_identity(tmp_path, name, f"optimization {{ priority: PRIORITY_{name.upper()} }}")
    with live_server(tmp_path) as live:
        assert (infer(live, "max", 1), infer(live, "min", 2)) == (1, 2)
        assert [described(live, name)["optimization"]["priority"] for name in ("max", "min")] == [
            "PRIORITY_MAX", "PRIORITY_MIN",
        ]  # fmt: skip


def test_an_ensemble_may_bound_what_is_under_way_at_a_step(tmp_path: Path) -> None:
    models.write_identity(tmp_path, "one", "max_batch_size: 4")
    tensors = "{kind} [ {{ name: '{name}' data_type: TYPE_FP32 dims: [ -1 ] }} ]"
    said = " ".join(tensors.format(kind=kind, name=name) for kind, name in (("input", "x"), ("output", "y")))
    maps = "input_map { key: 'x' value: 'x' } output_map { key: 'y' value: 'y' }"
    step = f"step [ {{ model_name: 'one' model_version: -1 {maps} }} ]"
    (tmp_path / "all" / "1").mkdir(parents=True)
    (tmp_path / "all" / "config.pbtxt").write_text(
        f"platform: 'ensemble' max_batch_size: 4 {said} ensemble_scheduling {{ {step} max_inflight_requests: 2 }}"
    )
    with live_server(tmp_path) as live:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda value: infer(live, "all", value), range(16)))

        assert answers == list(range(16))
        assert described(live, "all")["ensemble_scheduling"]["max_inflight_requests"] == 2


def test_a_host_policy_keeps_its_instances_on_its_cpus(tmp_path: Path) -> None:
    own = min(os.sched_getaffinity(0))
    seen: list[set[int]] = []

    def looks(inputs: list[Any]) -> list[Any]:
        seen.append(os.sched_getaffinity(0))
        return inputs

    models.write_identity(tmp_path, "m", 'instance_group { kind: KIND_CPU host_policy: "few" }')
    (tmp_path / "m" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    loaders = {"onnxruntime": fake_loader(FakeBackend(GRAPH, looks))}
    with live_server(tmp_path, loaders=loaders, host_policy=(f"few,cpu-cores={own}-{own}",)) as live:
        assert infer(live, "m", 3) == 3

    assert seen[-1] == {own}
