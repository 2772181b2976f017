"""Features with a single configuration field, on a live server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from penstock.backends.signature import Signature, TensorSpec
from tests.backends.onnx_models import FLOAT, node
from tests.clients import ensembles, models
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.fakes import PATIENCE_S, FakeBackend, fake_loader
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

GRAPH = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),))
CACHE = ("local,size=1000000",)
AN_HOUR = "max_queue_delay_microseconds: 3600000000"


def infer(live: Live, model: str, value: float, width: int = 4, **options: Any) -> float:
    x = httpclient.InferInput("x", [1, width], "FP32")
    x.set_data_from_numpy(np.full((1, width), value, np.float32))
    with httpclient.InferenceServerClient(live.address) as client:
        return float(client.infer(model, [x], **options).as_numpy("y")[0, 0])


def described(live: Live, model: str) -> Any:
    with httpclient.InferenceServerClient(live.address) as client:
        return client.get_model_config(model)


class TestSlotUtilization:
    """`direct { minimum_slot_utilization }`: a batch waits until this fraction of its slots has a request."""

    @pytest.fixture
    def live(self, tmp_path: Path) -> Iterator[Live]:
        inside = f"direct {{ minimum_slot_utilization: 0.5 {AN_HOUR} }}" + CONTROLS + STATE % ""
        write_accumulator(tmp_path, "m", config(4, inside))
        with live_server(tmp_path) as server:
            yield server

    def test_a_request_waits_until_the_minimum_slot_utilization_is_reached(self, live: Live) -> None:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(infer, live, "m", 1, 1, sequence_id=1, sequence_start=True)
            second = pool.submit(infer, live, "m", 2, 1, sequence_id=2, sequence_start=True)
            assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (1, 2)
        with httpclient.InferenceServerClient(live.address) as client:
            (counted,) = client.get_inference_statistics("m")["model_stats"]

        assert (counted["inference_count"], counted["execution_count"]) == (2, 1)
        assert described(live, "m")["sequence_batching"]["direct"]["minimum_slot_utilization"] == 0.5


def test_models_of_any_priority_are_served_and_report_their_priority(tmp_path: Path) -> None:
    for name in ("max", "min"):
        models.write_identity(tmp_path, name, f"optimization {{ priority: PRIORITY_{name.upper()} }}")
    with live_server(tmp_path) as live:
        assert (infer(live, "max", 1), infer(live, "min", 2)) == (1, 2)
        assert [described(live, name)["optimization"]["priority"] for name in ("max", "min")] == [
            "PRIORITY_MAX", "PRIORITY_MIN",
        ]  # fmt: skip


def test_an_ensemble_may_limit_the_requests_in_flight_at_a_step(tmp_path: Path) -> None:
    models.write_identity(tmp_path, "one", "max_batch_size: 4")
    tensors = "{kind} [ {{ name: '{name}' data_type: TYPE_FP32 dims: [ -1 ] }} ]"
    signature = " ".join(tensors.format(kind=kind, name=name) for kind, name in (("input", "x"), ("output", "y")))
    maps = "input_map { key: 'x' value: 'x' } output_map { key: 'y' value: 'y' }"
    step = f"step [ {{ model_name: 'one' model_version: -1 {maps} }} ]"
    (tmp_path / "all" / "1").mkdir(parents=True)
    (tmp_path / "all" / "config.pbtxt").write_text(
        f"platform: 'ensemble' max_batch_size: 4 {signature} ensemble_scheduling {{ {step} max_inflight_requests: 2 }}"
    )
    with live_server(tmp_path) as live:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda value: infer(live, "all", value), range(16)))

        assert answers == list(range(16))
        assert described(live, "all")["ensemble_scheduling"]["max_inflight_requests"] == 2


def test_a_host_policy_pins_its_instances_to_its_cpus(tmp_path: Path) -> None:
    own = min(os.sched_getaffinity(0))
    affinities: list[set[int]] = []

    def looks(inputs: list[Any]) -> list[Any]:
        affinities.append(os.sched_getaffinity(0))
        return inputs

    models.write_identity(tmp_path, "m", 'instance_group { kind: KIND_CPU host_policy: "few" }')
    (tmp_path / "m" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    loaders = {"onnxruntime": fake_loader(FakeBackend(GRAPH, looks))}
    with live_server(tmp_path, loaders=loaders, host_policy=(f"few,cpu-cores={own}-{own}",)) as live:
        assert infer(live, "m", 3) == 3

    assert affinities[-1] == {own}


X = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ %s ] %s } ]'
Y = 'output [ { name: "y" data_type: TYPE_FP32 dims: [ %s ] %s } ]'
KINDS = {
    "plain": "",
    "unbatched": f"max_batch_size: 0 {X % ('-1, -1', '')} {Y % ('-1, -1', '')}",
    "levels": "max_batch_size: 8 dynamic_batching { priority_levels: 3 default_priority_level: 2 "
    "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100000 max_queue_size: 200 } "
    "priority_queue_policy { key: 1 value { allow_timeout_override: true } } }",
    "ordered": "max_batch_size: 8 dynamic_batching { preserve_ordering: true preferred_batch_size: [ 2, 4 ] }",
    "cached": "max_batch_size: 8 response_cache { enable: true }",
    "warm": "max_batch_size: 8 model_warmup { name: 'w' batch_size: 2 inputs { key: 'x' "
    "value { data_type: TYPE_FP32 dims: [ 4 ] random_data: true } } }",
    "decoupled": "max_batch_size: 8 model_transaction_policy { decoupled: true }",
    "limited": "instance_group { count: 2 rate_limiter { priority: 2 resources { name: 'R' global: true count: 1 } } }",
    "passive": "instance_group [ { count: 1 }, { passive: true } ]",
    "reshaped": "max_batch_size: 4 "
    f"{X % ('2, 2', 'reshape { shape: [ 4 ] }')} {Y % ('1, -1', 'reshape { shape: [ -1 ] }')}",
}
COUNTS = "kind: BATCH_ELEMENT_COUNT target_name: 'n' data_type: TYPE_FP32 source_input: 'x'"
SCATTERED = "kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: 'y' source_input: 'x'"
RAGGED = (
    f"max_batch_size: 8 {X % ('-1', 'allow_ragged_batch: true')} {Y % ('-1', '')} "
    f"batch_input {{ {COUNTS} }} batch_output {{ {SCATTERED} }}"
)


def test_a_reported_configuration_can_be_loaded_and_is_reported_unchanged(tmp_path: Path) -> None:
    for name, text in KINDS.items():
        models.write_identity(tmp_path, name, text)
    for name, strategy in (("direct", ""), ("oldest", "oldest { max_candidate_sequences: 4 }")):
        write_accumulator(tmp_path, name, config(4, strategy + CONTROLS + STATE % ""))
    flat = {"x": (FLOAT, ["N"]), "n": (FLOAT, ["M"])}
    nodes = [node("Identity", ["x"], ["y"]), node("Identity", ["n"], ["counts"])]
    models.write(tmp_path, "ragged", nodes, (flat, {"y": flat["x"], "counts": flat["n"]}), config=RAGGED)
    ensembles.write_plus(tmp_path, "double", 1)
    ensembles.write_plus(tmp_path, "plus", 1)
    ensembles.write_ensemble(tmp_path, "chain", ensembles.CHAIN)
    with (
        live_server(tmp_path, model_control_mode="explicit", load_model=("*",), cache_config=CACHE) as live,
        httpclient.InferenceServerClient(live.address) as client,
    ):
        names = sorted(each.name for each in tmp_path.iterdir())
        before = {name: (client.get_model_config(name), client.get_model_metadata(name)) for name in names}
        for name, (reported, _) in before.items():
            client.load_model(name, config=json.dumps(reported))
        after = {name: (client.get_model_config(name), client.get_model_metadata(name)) for name in names}

    assert after == before
    assert [name for name in names if "null" in json.dumps(before[name])] == []
    assert {name for name in names if "sequence_batching" in before[name][0]} == {"direct", "oldest"}
    assert {name for name in names if "dynamic_batching" in before[name][0]} == {
        *names,
    } - {"direct", "oldest", "chain", "unbatched"}
    assert before["direct"][0]["sequence_batching"]["max_sequence_idle_microseconds"] == 1_000_000
    assert before["oldest"][0]["sequence_batching"]["oldest"]["preferred_batch_size"] == [4]
    assert "optimization" not in before["chain"][0]
