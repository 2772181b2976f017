"""Combinations of scheduling features in one model: each works as it does alone, and all counts are exact."""

from __future__ import annotations

import json
import os
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import np_to_triton_dtype

from penstock.backends.backend import Array
from tests.backends.onnx_models import FLOAT, STRING, node
from tests.clients import ensembles, models
from tests.clients.ensembles import step, write_ensemble
from tests.clients.gated_onnxruntime import Gated
from tests.clients.parallel_requests import Answer, Asking, answers
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.fakes import PATIENCE_S, Gate
from tests.live import Live, live_server
from tests.server.python_models.repositories import write_model

pytestmark = pytest.mark.slow

CACHE = ("local,size=1000000",)
CACHED = "response_cache { enable: true }"
KEY = f"/combinations_{os.getpid()}"
AN_HOUR = "max_queue_delay_microseconds: 3600000000"
LEVELS = "priority_levels: 2 default_priority_level: 2"
INT32 = models.INT32


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


@contextmanager
def served(root: Path, text: str, *, hooked: bool = False, **settings: Any) -> Iterator[tuple[Live, Gated]]:
    """Serve the model `m`, which returns `x` [N,4] as `y`, on threads; its runs are recorded from now on."""
    row: models.Tensors = {"x": (FLOAT, ["N", 4])}
    models.write(root, "m", [node("Identity", ["x"], ["y"])], (row, {"y": (FLOAT, ["N", 4])}), config=text)
    hooks = '[hooks]\nfile = "hooks.py"\n' if hooked else ""
    (root / "m" / "penstock.toml").write_text(f'[batching]\nexecutor = "thread"\n{hooks}')
    gated = Gated()
    with live_server(root, loaders=gated.loaders, **settings) as live:
        gated.runs.clear()
        yield live, gated


def input_of(triton: Any, name: str, array: Array) -> Any:
    return triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def counted(live: Live, model: str) -> dict[str, int]:
    """The counts of a model's statistics."""
    with tritonclient.http.InferenceServerClient(live.address) as client:
        (entry,) = client.get_inference_statistics(model)["model_stats"]
    moved = {name: each["count"] for name, each in entry["inference_stats"].items() if each["count"]}
    return {**moved, "inferences": entry["inference_count"], "executions": entry["execution_count"]}


def values(sent: list[Future[Answer]]) -> list[float]:
    """Wait for answers; none of them is an error."""
    found = answers(sent)
    assert [each.error for each in found] == [""] * len(found)
    return [each.value for each in found]


class TestPreservedOrder:
    """`preserve_ordering`, of a model with two Instances."""

    TEXT = f"max_batch_size: 1 {CACHED} dynamic_batching {{ preserve_ordering: true }} instance_group {{ count: 2 }}"

    def test_a_cached_answer_waits_for_the_requests_before_it(self, tmp_path: Path, triton: Any) -> None:
        with (
            served(tmp_path, self.TEXT, cache_config=CACHE) as (live, gated),
            Asking(live, triton, "m") as asking,
        ):
            assert values([asking.ask(value=7)]) == [7]
            gated.gate.close()
            first = asking.ask(value=1)
            live.call(gated.gate.entered())
            found = asking.ask(value=7)
            asking.until(lambda: counted(live, "m").get("cache_hit") == 1)
            assert not found.done()
            gated.gate.open()

            assert values([first, found]) == [1, 7]
            assert gated.runs == [[7], [1]]

    def test_a_canceled_request_does_not_delay_the_answers_behind_it(self, tmp_path: Path) -> None:
        errors: queue.Queue[Any] = queue.Queue()
        with (
            served(tmp_path, self.TEXT) as (live, gated),
            Asking(live, tritonclient.grpc, "m") as asking,
            asking.client() as client,
        ):
            gated.gate.close()
            gated.gate_of[2] = Gate(list)
            gated.gate_of[2].close()
            sent = [asking.ask(value=1)]
            live.call(gated.gate.entered())
            sent.append(asking.ask(value=2))
            live.call(gated.gate_of[2].entered())
            row = input_of(tritonclient.grpc, "x", np.full((1, 4), 3, np.float32))
            call = client.async_infer("m", [row], lambda result, error: errors.put(error))
            asking.until_waiting(1)
            sent.append(asking.ask(value=4))
            asking.until_waiting(2)
            call.cancel()
            assert errors.get(timeout=PATIENCE_S).status() == "StatusCode.CANCELLED"
            gated.gate_of[2].open()
            asking.until_waiting(0)
            assert not any(each.done() for each in sent)
            gated.gate.open()

            assert values(sent) == [1, 2, 4]
            assert counted(live, "m") == {
                "success": 3, "fail": 1, "queue": 3, "compute_input": 3, "compute_infer": 3, "compute_output": 3,
                "inferences": 3, "executions": 3,
            }  # fmt: skip


class TestPriorityLevels:
    def test_a_cached_answer_is_returned_although_the_queue_is_full(self, tmp_path: Path, triton: Any) -> None:
        policy = "default_queue_policy { max_queue_size: 1 }"
        text = f"max_batch_size: 1 {CACHED} dynamic_batching {{ {LEVELS} {policy} }}"
        with served(tmp_path, text, cache_config=CACHE) as (live, gated), Asking(live, triton, "m") as asking:
            assert values([asking.ask(value=7)]) == [7]
            gated.gate.close()
            sent = [asking.ask(value=1)]
            live.call(gated.gate.entered())
            sent += asking.queue(1, value=2)
            assert "Exceeds maximum queue size" in answers([asking.ask(value=3)])[0].error
            assert values([asking.ask(value=7)]) == [7]
            sent += asking.queue(1, value=3, priority=1)
            gated.gate.open()

            assert values(sent) == [1, 2, 3]
            assert gated.runs == [[7], [1], [3], [2]]
            assert counted(live, "m") == {
                "success": 5, "fail": 1, "queue": 5, "cache_hit": 1, "cache_miss": 4, "compute_input": 4,
                "compute_infer": 4, "compute_output": 4, "inferences": 4, "executions": 4,
            }  # fmt: skip

    def test_the_rate_limiter_runs_the_highest_priority_request_first(self, tmp_path: Path, triton: Any) -> None:
        group = "instance_group { rate_limiter { resources { name: 'R' count: 4 } priority: %d } }"
        batching = f"dynamic_batching {{ preferred_batch_size: [ 2 ] {LEVELS} }}"
        text = f"max_batch_size: 2 {group % 1} {group % 2} {batching}"
        with (
            served(tmp_path, text, rate_limit="execution_count") as (live, gated),
            Asking(live, triton, "m") as asking,
        ):
            gated.gate.close()
            sent = [asking.ask(value=9)]
            live.call(gated.gate.entered())
            for value, priority in ((1, 2), (2, 0), (3, 1), (4, 1), (5, 1)):
                sent += asking.queue(1, value=value, priority=priority)
            gated.gate.open()

            assert values(sent) == [9, 1, 2, 3, 4, 5]
            assert gated.runs == [[9], [3, 4], [5, 1], [2]]
            assert asking.counts() == ({1: 2, 2: 2}, 4, 6)

    def test_a_step_of_an_ensemble_has_the_priority_of_its_request(self, tmp_path: Path, triton: Any) -> None:
        text = ensembles.config("all", ["x"], ["y"], [step("m", [("x", "x")], [("y", "y")])], rows=1)
        write_ensemble(tmp_path, "all", text)
        with (
            served(tmp_path, f"max_batch_size: 1 dynamic_batching {{ {LEVELS} }}") as (live, gated),
            Asking(live, triton, "all") as asking,
            Asking(live, triton, "m") as steps,
        ):
            gated.gate.close()
            sent = [asking.ask(value=1)]
            live.call(gated.gate.entered())
            for value, priority in ((2, 2), (3, 1)):
                sent.append(asking.ask(value=value, priority=priority))
                steps.until_waiting(value - 1)
            gated.gate.open()

            assert values(sent) == [1, 2, 3]
            assert gated.runs == [[1], [3], [2]]


RAGGED = """
max_batch_size: 8
input { name: "x" data_type: %(type)s dims: -1 allow_ragged_batch: true }
output [ { name: "y" data_type: %(type)s dims: -1 }, { name: "told" data_type: TYPE_INT32 dims: %(dims)s } ]
batch_input { kind: %(kind)s target_name: "n" data_type: TYPE_INT32 source_input: "x" }
batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
dynamic_batching { preferred_batch_size: [ %(size)s ] %(more)s }
"""


def write_ragged(root: Path, text: str, code: int, axes: models.Axes) -> None:
    """Write a model that returns `x` and its derived inputs."""
    flat: models.Axes = ["R"]
    nodes = [node("Identity", ["x"], ["y"]), node("Identity", ["n"], ["told"])]
    tensors: models.Tensors = {"x": (code, flat), "n": (INT32, axes)}
    models.write(root, "ragged", nodes, (tensors, {"y": (code, flat), "told": (INT32, axes)}), config=text)


class TestRaggedBatches:
    def test_strings_of_different_lengths_share_a_batch_and_are_cached_separately(
        self, tmp_path: Path, triton: Any
    ) -> None:
        how = {"type": "TYPE_STRING", "kind": "BATCH_ELEMENT_COUNT", "dims": "1 reshape { shape: [ ] }"}
        write_ragged(tmp_path, RAGGED % {**how, "size": 3, "more": AN_HOUR} + CACHED, STRING, ["B"])
        sent = [np.full((1, width), b"ab", np.object_) for width in (1, 3, 2)]
        with live_server(tmp_path, cache_config=CACHE) as live, Asking(live, triton, "ragged") as asking:
            for _ in range(2):
                found = together(asking, triton, [[input_of(triton, "x", array)] for array in sent])
                for array, answer in zip(sent, found, strict=True):
                    assert answer.as_numpy("y").tolist() == array.tolist()
                    assert answer.as_numpy("told").tolist() == [[array.size]]

            assert asking.counts() == ({3: 1}, 1, 3)
            assert counted(live, "ragged")["cache_hit"] == 3

    def test_requests_of_higher_priority_come_first_in_a_ragged_batch(self, tmp_path: Path, triton: Any) -> None:
        how = {"type": "TYPE_FP32", "kind": "BATCH_ITEM_SHAPE", "dims": "1", "size": 7}
        write_ragged(tmp_path, RAGGED % {**how, "more": f"{AN_HOUR} {LEVELS}"}, FLOAT, ["B", 1])
        sent = [np.full(shape, shape[1], np.float32) for shape in ((2, 3), (1, 5), (4, 2))]
        levels = [{"priority": level} for level in (2, 1, 2)]
        with live_server(tmp_path) as live, Asking(live, triton, "ragged") as asking:
            found = together(asking, triton, [[input_of(triton, "x", array)] for array in sent], levels)

            for array, answer in zip(sent, found, strict=True):
                np.testing.assert_array_equal(answer.as_numpy("y"), array)
                assert answer.as_numpy("told").tolist() == [[array.shape[1]]] * len(array)
            assert asking.counts() == ({7: 1}, 1, 7)


def together(asking: Asking, triton: Any, inputs: list[list[Any]], options: list[dict[str, Any]] | None = None) -> Any:
    """Send requests that share a batch, and return their answers."""

    def ask(each: list[Any], terms: dict[str, Any]) -> Any:
        with asking.client() as client:
            return client.infer(asking.model, each, **terms)

    sent = [
        asking.pool.submit(ask, each, terms) for each, terms in zip(inputs, options or [{}] * len(inputs), strict=True)
    ]
    return [each.result(PATIENCE_S) for each in sent]


FORWARD = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        given = [request.inputs() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y" + x.name()[1:], x.as_numpy()) for x in each]) for each in given]
"""
"""A model that gives y0 for x0 and y1 for x1, each if it got it."""
TENSORS = " ".join(
    f'{side} {{ name: "{name}{i}" data_type: TYPE_STRING dims: [ -1 ] {more} }}'
    for side, name, more in (("input", "x", "optional: true"), ("output", "y", ""))
    for i in (0, 1)
)


class TestOptionalInputs:
    def test_requests_share_a_batch_only_with_those_that_have_the_same_inputs(
        self, tmp_path: Path, triton: Any
    ) -> None:
        batching = f"dynamic_batching {{ preferred_batch_size: [ 3 ] {AN_HOUR} }}"
        write_model(tmp_path, "forward", FORWARD, f'backend: "python" max_batch_size: 8 {TENSORS} {batching}')
        word = np.array([[b"a"]], np.object_)
        both, one = [input_of(triton, name, word) for name in ("x0", "x1")], [input_of(triton, "x0", word)]
        with live_server(tmp_path) as live, Asking(live, triton, "forward") as asking:
            options = [{"outputs": [triton.InferRequestedOutput("y0")]}] * 6
            found = together(asking, triton, [both, one] * 3, options)

            assert [answer.as_numpy("y0").tolist() for answer in found] == [[[b"a"]]] * 6
            assert asking.counts() == ({3: 2}, 2, 6)

    def test_nested_ensembles_cache_requests_with_and_without_an_optional_input_separately(
        self, tmp_path: Path, triton: Any
    ) -> None:
        write_model(tmp_path, "forward", FORWARD, f'backend: "python" max_batch_size: 8 {CACHED} {TENSORS}')
        pairs = [(f"x{i}", f"x{i}") for i in (0, 1)], [(f"y{i}", f"y{i}") for i in (0, 1)]
        for name, inner in (("inner", "forward"), ("outer", "inner")):
            steps = f"ensemble_scheduling {{ step [ {step(inner, *pairs)} ] }}"
            write_ensemble(tmp_path, name, f'platform: "ensemble" max_batch_size: 8 {CACHED} {TENSORS} {steps}')
        word, other = (np.array([[each]], np.object_) for each in ("é".encode(), b"b"))
        with live_server(tmp_path, cache_config=CACHE) as live, Asking(live, triton, "outer") as asking:

            def ask(outputs: list[str], **inputs: Array) -> list[Any]:
                requested = [triton.InferRequestedOutput(name) for name in outputs]
                sent = [input_of(triton, name, array) for name, array in inputs.items()]
                with asking.client() as client:
                    found = client.infer("outer", sent, outputs=requested)
                arrays = [found.as_numpy(name) for name in outputs]
                return [None if array is None else array.item() for array in arrays]

            for _ in range(2):
                assert ask(["y0", "y1"], x0=word, x1=other) == ["é".encode(), b"b"]
                assert ask(["y0"], x0=word) == ["é".encode()]
                assert ask(["y1"], x1=word) == ["é".encode()]
                assert ask(["y0", "y1"], x0=word) == ["é".encode(), None]
            found = {name: counted(live, name) for name in ("outer", "inner", "forward")}

        # an answer without all outputs is not cached
        ran = {"compute_input": 5, "compute_infer": 5, "compute_output": 5, "inferences": 5, "executions": 5}
        assert found["outer"] == {"success": 8, "queue": 8, "cache_hit": 3, "cache_miss": 5, **ran}
        assert found["inner"] == found["forward"] == {"success": 5, "queue": 5, "cache_miss": 5, **ran}


class TestSharedMemory:
    """Tensors in shared memory, of models whose batches are not simply stacked rows."""

    @pytest.fixture
    def region(self) -> Iterator[Any]:
        new_region = shm.create_shared_memory_region("r", KEY, 256)
        yield new_region
        shm.destroy_shared_memory_region(new_region)

    def test_tensors_in_shared_memory_can_be_ragged_and_accumulated(
        self, tmp_path: Path, triton: Any, region: Any
    ) -> None:
        how = {"type": "TYPE_FP32", "kind": "BATCH_ELEMENT_COUNT", "dims": "1 reshape { shape: [ ] }", "size": 2}
        write_ragged(tmp_path, RAGGED % {**how, "more": AN_HOUR}, FLOAT, ["B"])
        write_accumulator(tmp_path, "sum", config(4, "direct { }" + CONTROLS + STATE % ""))
        shm.set_shared_memory_region(region, [np.arange(5, dtype=np.float32)])

        def tensors(width: int, at: int, to: int) -> tuple[list[Any], list[Any]]:
            sent, requested = triton.InferInput("x", [1, width], "FP32"), triton.InferRequestedOutput("y")
            sent.set_shared_memory("r", 4 * width, at)
            requested.set_shared_memory("r", 4 * width, to)
            return [sent], [requested]

        with (
            live_server(tmp_path, allow_client_shm=True) as live,
            Asking(live, triton, "ragged") as asking,
            asking.client() as client,
        ):
            client.register_system_shared_memory("r", KEY, 256)
            five, three = tensors(5, 0, 64), tensors(3, 0, 128)
            together(asking, triton, [five[0], three[0]], [{"outputs": five[1]}, {"outputs": three[1]}])
            assert shm.get_contents_as_numpy(region, np.float32, [5], 64).tolist() == [0, 1, 2, 3, 4]
            assert shm.get_contents_as_numpy(region, np.float32, [3], 128).tolist() == [0, 1, 2]
            assert asking.counts() == ({2: 1}, 1, 2)

            sums = []
            for start in (True, False, False):
                sent, requested = tensors(1, 8, 192)
                client.infer("sum", sent, outputs=requested, sequence_id=4, sequence_start=start)
                sums.append(shm.get_contents_as_numpy(region, np.float32, [1], 192).item())
            client.unregister_system_shared_memory("r")

        assert sums == [2, 4, 6]


HOOKS = """
def pre_inference(sample, metadata):
    return sample

def post_inference(prediction, metadata):
    return {"y": prediction[0]}
"""
ALONE = "preferred_batch_size: [ 4 ] " + AN_HOUR
EXPLICIT: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}


class TestUnloading:
    """A model that is unloaded does not wait for further requests to fill a batch or continue a sequence."""

    @pytest.mark.parametrize("around", ["hooks", "ensemble"])
    @pytest.mark.parametrize("action", ["unload", "load"])
    def test_a_delayed_batch_is_answered_when_its_model_is_unloaded_behind_hooks_or_an_ensemble(
        self, tmp_path: Path, triton: Any, around: str, action: str
    ) -> None:
        asked_model = "all" if around == "ensemble" else "m"
        text = f"max_batch_size: 4 dynamic_batching {{ {ALONE} }}"
        write_around(tmp_path, around)
        with (
            served(tmp_path, text, hooked=around == "hooks", **EXPLICIT) as (live, gated),
            Asking(live, triton, asked_model) as asking,
            Asking(live, triton, "m") as steps,
            asking.client() as client,
        ):
            sent = [asking.ask(value=1)]
            steps.until_waiting(1)
            if action == "unload":
                client.unload_model("m")
            else:
                client.load_model("m", config=json.dumps({"max_batch_size": 8}))

            assert values(sent) == [1]
            assert [1] in gated.runs

    @pytest.mark.parametrize("action", ["unload", "load"])
    def test_a_request_that_waits_for_a_sequence_slot_runs_when_its_model_is_unloaded(
        self, tmp_path: Path, triton: Any, action: str
    ) -> None:
        idle = "oldest { } max_sequence_idle_microseconds: 3600000000"
        write_accumulator(tmp_path, "m", config(1, idle + CONTROLS + STATE % ""))
        text = ensembles.config("all", ["x"], ["y"], [step("m", [("x", "x")], [("y", "y")])], rows=1)
        write_ensemble(tmp_path, "all", text.replace("[ 4 ]", "[ 1 ]"))
        with (
            live_server(tmp_path, **EXPLICIT) as live,
            Asking(live, triton, "all") as asking,
            Asking(live, triton, "m") as steps,
            asking.client() as client,
        ):
            assert values([asking.ask(width=1, sequence_id=1, sequence_start=True)]) == [1]
            sent = [asking.ask(value=2, width=1, sequence_id=2, sequence_start=True)]
            steps.until_waiting(1)
            if action == "unload":
                client.unload_model("m")
            else:
                (tmp_path / "m" / "config.pbtxt").write_text(config(2, idle + CONTROLS + STATE % ""))
                client.load_model("m")

            assert values(sent) == [2]


def write_around(root: Path, around: str) -> None:
    """Write hooks for `m`, or an ensemble `all` around it."""
    if around == "ensemble":
        text = ensembles.config("all", ["x"], ["y"], [step("m", [("x", "x")], [("y", "y")])], rows=4)
        write_ensemble(root, "all", text)
        return
    (root / "m").mkdir()
    (root / "m" / "hooks.py").write_text(HOOKS)
