"""Ensembles as Triton's clients see them, over real models and both protocols."""

from __future__ import annotations

import asyncio
import json
import queue
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import tritonclient.grpc as rpc
from tritonclient import http
from tritonclient.utils import InferenceServerException

from penstock.backends.backend import Array, Backend
from penstock.backends.loading import LOADERS
from penstock.backends.signature import Signature, TensorSpec
from tests.clients import ensembles, sequence_models
from tests.clients.ensembles import CHAIN, config, step, write_ensemble, write_plus
from tests.fakes import PATIENCE_S, FakeBackend, Gate
from tests.live import Live, live_server
from tests.server.repository.folders import look_twice

pytestmark = pytest.mark.slow

Infer = Callable[..., dict[str, Any]]
WAITING = config(
    "waiting", ["in"], ["out"],
    [step("slow", [("x", "in")], [("y", "mid")]), step("plus", [("x", "mid")], [("y", "out")])],
)  # fmt: skip
COUNTED = ("queue", "compute_input", "compute_infer", "compute_output")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = ensembles.write_all(tmp_path_factory.mktemp("repository"))
    write_plus(root, "plus", 100, version=2)
    (root / "plus" / "config.pbtxt").write_text("version_policy { all { } }")
    write_ensemble(root, "pinned", ensembles.PINNED)
    with live_server(root) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def infer(request: pytest.FixtureRequest, live: Live) -> Iterator[Infer]:
    """Infer over one protocol, with inputs by name and the requested outputs."""
    module: Any = http if request.param == "http" else rpc
    address = live.address if request.param == "http" else live.grpc_address
    with module.InferenceServerClient(address) as client:

        def call(model: str, outputs: tuple[str, ...] = (), **inputs: Array) -> dict[str, Any]:
            return infer_with(module, client, model, outputs, **inputs)

        yield call


def infer_with(module: Any, client: Any, model: str, outputs: tuple[str, ...] = (), **inputs: Array) -> dict[str, Any]:
    tensors = []
    for name, array in inputs.items():
        datatype = {"f": "FP32", "i": "INT64", "O": "BYTES"}[array.dtype.kind]
        tensors.append(module.InferInput(name.rstrip("_"), list(array.shape), datatype))
        tensors[-1].set_data_from_numpy(array)
    requested = [module.InferRequestedOutput(name) for name in outputs] or None
    answer = client.infer(model, tensors, outputs=requested)
    spoken = answer.get_response(as_json=True) if module is rpc else answer.get_response()
    return {each["name"]: answer.as_numpy(each["name"]) for each in spoken.get("outputs", [])}


def row(value: float, rows: int = 1) -> Array:
    return np.full((rows, ensembles.WIDTH), value, np.float32)


def numbers(live: Live, model: str) -> dict[str, Any]:
    (entry,) = requests.get(f"{live.url}/v2/models/{model}/stats", timeout=10).json()["model_stats"][-1:]
    return {
        "inference_count": entry["inference_count"], "execution_count": entry["execution_count"],
        "success": entry["inference_stats"]["success"]["count"], "fail": entry["inference_stats"]["fail"]["count"],
        **{name: entry["inference_stats"][name]["ns"] for name in COUNTED},
    }  # fmt: skip


class TestAnswers:
    def test_two_steps_in_a_row_are_computed(self, infer: Infer) -> None:
        assert (infer("chain", in_=row(3, 2))["out"] == row(106, 2)).all()

    def test_two_branches_are_joined(self, infer: Infer) -> None:
        answer = infer("diamond", in_=row(5))

        assert {name: array[0, 0] for name, array in answer.items()} == {"sum": 115, "difference": -95}

    def test_only_requested_outputs_are_returned(self, infer: Infer) -> None:
        assert list(infer("diamond", ("difference",), in_=row(5))) == ["difference"]

    def test_an_ensemble_can_contain_an_ensemble(self, infer: Infer) -> None:
        assert infer("outer", in_=row(1))["out"][0, 0] == 304

    def test_a_step_can_pin_a_model_version(self, infer: Infer) -> None:
        assert infer("pinned", in_=row(1))["out"][0, 0] == 2

    def test_strings_pass_through_an_ensemble(self, infer: Infer) -> None:
        words = np.array([["1", "22", "333", "-4"]], np.object_)

        assert [each.decode() for each in infer("words", in_=words)["out"][0]] == ["1", "22", "333", "-4"]

    def test_the_error_of_a_step_names_the_ensemble(self, infer: Infer) -> None:
        assert infer("lookup", in_=np.array([[0, 1, 2, 0]], np.int64))["out"][0].tolist() == [110, 120, 130, 110]
        with pytest.raises(InferenceServerException, match="in ensemble 'lookup', ") as raised:
            infer("lookup", in_=np.array([[0, 1, 2, 99]], np.int64))

        assert "99" in raised.value.message()

    def test_more_rows_than_the_ensembles_batch_size_are_rejected(self, infer: Infer) -> None:
        with pytest.raises(InferenceServerException, match="inference request batch-size must be <= 8 for 'chain'"):
            infer("chain", in_=row(1, 9))

    def test_many_parallel_requests_are_all_answered(self, live: Live) -> None:
        def ask(number: int) -> float:
            with http.InferenceServerClient(live.address) as client:
                return float(infer_with(http, client, "diamond", in_=row(number))["sum"][0, 0])

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(ask, range(64))) == [3 * number + 100 for number in range(64)]


class TestReporting:
    def test_metadata_and_configuration_are_those_of_the_ensemble(self, live: Live) -> None:
        with http.InferenceServerClient(live.address) as client:
            metadata, declared = client.get_model_metadata("chain"), client.get_model_config("chain")

            assert (metadata["platform"], metadata["inputs"]) == (
                "ensemble", [{"name": "in", "datatype": "FP32", "shape": [-1, 4]}],
            )  # fmt: skip
            assert (declared["platform"], declared["backend"], declared["max_batch_size"]) == ("ensemble", "", 8)
            assert declared["ensemble_scheduling"]["step"][0] == {
                "model_name": "double", "model_version": -1, "input_map": {"x": "in"}, "output_map": {"y": "mid"},
                "model_namespace": "",
            }  # fmt: skip
            assert (declared["instance_group"], "dynamic_batching" in declared) == ([], False)
            assert client.is_model_ready("chain")

    def test_statistics_of_an_ensemble_are_the_sums_of_its_steps(self, live: Live, infer: Infer) -> None:
        names = ("chain", "double", "plus")
        before = [numbers(live, name) for name in names]
        for _ in range(3):
            infer("chain", in_=row(1, 2))
        moved = [
            {each: after[each] - was[each] for each in after}
            for after, was in zip([numbers(live, name) for name in names], before, strict=True)
        ]

        assert [each["inference_count"] for each in moved] == [6, 6, 6]
        assert [(each["success"], each["execution_count"], each["fail"]) for each in moved] == [(3, 3, 0)] * 3
        for name in COUNTED:
            assert moved[0][name] == moved[1][name] + moved[2][name]

    def test_metrics_include_the_ensemble(self, live: Live) -> None:
        page = requests.get(f"http://127.0.0.1:{live.metrics_port}/metrics", timeout=10).text

        assert 'nv_inference_request_success{model="chain",version="1"}' in page


@contextmanager
def gated(root: Path, **settings: Any) -> Iterator[tuple[Live, Gate]]:
    """Serve the ensemble `waiting`, whose first step waits at a gate."""
    described = (TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),)
    gate = Gate(lambda inputs: [inputs[0]])

    def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
        if path.parents[1].name == "slow":
            return FakeBackend(Signature(*described), gate)
        return LOADERS["onnxruntime"](path, device, options)

    ensembles.write_models(root)
    (root / "slow" / "1").mkdir(parents=True)
    (root / "slow" / "1" / "model.onnx").touch()
    (root / "slow" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n[instances]\ncount = 1\n')
    write_ensemble(root, "waiting", WAITING)
    try:
        with live_server(root, loaders={"onnxruntime": load}, **settings) as server:
            yield server, gate
    finally:
        gate.open()


def entered(live: Live, gate: Gate) -> None:
    live.call(gate.entered())


def wait_for(live: Live, model: str, **expected: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(numbers(live, model)[name] != value for name, value in expected.items()):
        if time.monotonic() > deadline:
            pytest.fail(f"{model}: {numbers(live, model)}")
        time.sleep(0.002)  # leave the processor to the server


class TestCancellation:
    def test_a_canceled_call_does_not_reach_the_next_step(self, tmp_path: Path) -> None:
        with gated(tmp_path) as (live, gate), rpc.InferenceServerClient(live.grpc_address) as client:
            gate.close()
            tensor = rpc.InferInput("in", [1, 4], "FP32").set_data_from_numpy(row(1))
            ended: list[Any] = []
            over = threading.Event()

            def end(result: Any, error: Any) -> None:
                ended.append(error)
                over.set()

            call = client.async_infer("waiting", [tensor], callback=end)
            entered(live, gate)
            call.cancel()
            assert over.wait(PATIENCE_S)
            wait_for(live, "waiting", fail=1)
            gate.open()
            wait_for(live, "slow", success=1)

            assert "CANCELLED" in str(ended[0].status())
            assert numbers(live, "plus")["inference_count"] == 0

    def test_a_request_is_canceled_when_its_connection_is_closed(self, tmp_path: Path) -> None:
        with gated(tmp_path) as (live, gate):
            gate.close()
            body: Any = {"inputs": [{"name": "in", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
            with pytest.raises(requests.Timeout):
                requests.post(f"{live.url}/v2/models/waiting/infer", json=body, timeout=0.3)
            wait_for(live, "waiting", fail=1)
            gate.open()
            wait_for(live, "slow", success=1)

            assert numbers(live, "plus")["inference_count"] == 0

    def test_a_timeout_in_the_queue_of_a_step_is_reported_by_the_ensemble(self, tmp_path: Path) -> None:
        first: queue.Queue[Any] = queue.Queue()
        with gated(tmp_path) as (live, gate), rpc.InferenceServerClient(live.grpc_address) as client:
            gate.close()
            tensor = rpc.InferInput("in", [1, 4], "FP32").set_data_from_numpy(row(1))
            client.async_infer("waiting", [tensor], lambda result, error: first.put(error or result))
            entered(live, gate)
            with pytest.raises(InferenceServerException, match="in ensemble 'waiting', Request timeout expired"):
                client.infer("waiting", [tensor], timeout=20_000)
            gate.open()

            assert first.get(timeout=PATIENCE_S).as_numpy("out")[0, 0] == 2


class TestLoading:
    def test_an_ensemble_is_loaded_and_unloaded_with_its_steps(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        with (
            live_server(tmp_path, model_control_mode="explicit") as live,
            http.InferenceServerClient(live.address) as client,
        ):
            client.load_model("chain")
            assert states(client) == {"chain": "READY", "double": "READY", "plus": "READY"}
            client.unload_model("chain")
            assert states(client) == {"chain": "UNAVAILABLE", "double": "READY", "plus": "READY"}
            client.load_model("outer")
            assert states(client)["chain"] == "READY"
            client.load_model("plus")
            client.unload_model("outer", unload_dependents=True)
            assert states(client) == {
                "outer": "UNAVAILABLE", "chain": "UNAVAILABLE", "double": "UNAVAILABLE", "plus": "READY",
            }  # fmt: skip

    def test_a_step_that_another_ensemble_needs_stays_loaded(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        with (
            live_server(tmp_path, model_control_mode="explicit", load_model=("chain", "diamond")) as live,
            http.InferenceServerClient(live.address) as client,
        ):
            client.unload_model("diamond", unload_dependents=True)

            assert states(client) == {
                "chain": "READY", "double": "READY", "plus": "READY", "diamond": "UNAVAILABLE",
                "both": "UNAVAILABLE",
            }  # fmt: skip
            assert infer_with(http, client, "chain", in_=row(1))["out"][0, 0] == 3

    def test_an_ensemble_becomes_unavailable_with_its_step_and_ready_when_the_step_is_reloaded(
        self, tmp_path: Path
    ) -> None:
        ensembles.write_all(tmp_path)
        with (
            live_server(tmp_path, model_control_mode="explicit", load_model=("outer",)) as live,
            http.InferenceServerClient(live.address) as client,
        ):
            client.unload_model("plus")
            assert not client.is_model_ready("chain")
            reasons = {entry["name"]: entry.get("reason") for entry in client.get_model_repository_index()}
            text = "unloaded: ensemble 'chain' depends on 'plus' which has no loaded version"
            assert reasons["chain"] == text
            assert client.is_server_ready()
            with pytest.raises(InferenceServerException):
                infer_with(http, client, "outer", in_=row(1))
            client.load_model("plus")
            assert states(client) == dict.fromkeys(("outer", "chain", "double", "plus"), "READY")
            assert infer_with(http, client, "outer", in_=row(1))["out"][0, 0] == 7

    def test_an_ensemble_unloaded_by_name_stays_unloaded_when_its_step_is_reloaded(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        with (
            live_server(tmp_path, model_control_mode="explicit", load_model=("chain",)) as live,
            http.InferenceServerClient(live.address) as client,
        ):
            client.unload_model("plus")
            client.unload_model("chain")
            client.load_model("plus")

            assert states(client) == {"chain": "UNAVAILABLE", "double": "READY", "plus": "READY"}

    def test_the_load_request_of_an_ensemble_may_include_its_configuration(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        with (
            live_server(tmp_path, model_control_mode="explicit") as live,
            http.InferenceServerClient(live.address) as client,
        ):
            client.load_model("chain")
            declared = client.get_model_config("chain")
            declared["ensemble_scheduling"]["step"][1]["model_name"] = "double"
            client.load_model("chain", config=json.dumps(declared))
            assert infer_with(http, client, "chain", in_=row(3))["out"][0, 0] == 12
            client.load_model("chain")
            assert infer_with(http, client, "chain", in_=row(3))["out"][0, 0] == 7

    def test_a_missing_step_is_in_the_error(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        shutil.rmtree(tmp_path / "plus")
        with (
            live_server(tmp_path, model_control_mode="explicit") as live,
            http.InferenceServerClient(live.address) as client,
        ):
            text = "ensemble 'chain' depends on 'plus' which has no loaded version"
            with pytest.raises(InferenceServerException, match=text):
                client.load_model("chain")
            write_plus(tmp_path, "plus", 1)
            client.load_model("plus")

            assert states(client)["chain"] == "READY"

    def test_circular_ensembles_are_rejected_and_the_others_are_served(self, tmp_path: Path) -> None:
        ensembles.write_models(tmp_path)
        for name, other in (("one", "two"), ("two", "one")):
            write_ensemble(
                tmp_path, name, config(name, ["in"], ["out"], [step(other, [("in", "in")], [("out", "out")])])
            )
        with live_server(tmp_path) as live, http.InferenceServerClient(live.address) as client:
            reasons = {entry["name"]: entry.get("reason", "") for entry in client.get_model_repository_index()}

            assert reasons["one"].endswith("circular dependency between ensembles: one -> ... -> two -> one")
            assert states(client)["plus"] == "READY"

    def test_polling_adopts_a_compatible_new_step_and_rejects_an_incompatible_one(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        with (
            live_server(tmp_path, model_control_mode="poll", repository_poll_secs=3600) as live,
            http.InferenceServerClient(live.address) as client,
        ):
            write_plus(tmp_path, "plus", 10, version=2)
            live.call(look_twice(live.server.control))
            assert infer_with(http, client, "chain", in_=row(1))["out"][0, 0] == 12
            write_plus(tmp_path, "plus", 20, version=3, width=5)
            live.call(look_twice(live.server.control))
            (entry,) = [each for each in client.get_model_repository_index() if each["name"] == "chain"]
            assert entry["state"] == "UNAVAILABLE"
            assert entry["reason"].startswith("in ensemble chain, ensemble tensor mid: inconsistent shape")
            shutil.rmtree(tmp_path / "plus" / "3")
            live.call(look_twice(live.server.control))
            assert infer_with(http, client, "chain", in_=row(1))["out"][0, 0] == 12

    def test_steps_are_replaced_under_load_without_failures(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        with live_server(tmp_path, model_control_mode="explicit", load_model=("outer",)) as live:
            over, failures, answers = threading.Event(), list[Exception](), set[float]()

            def ask() -> None:
                with http.InferenceServerClient(live.address) as client:
                    while not over.is_set():
                        try:
                            answers.add(float(infer_with(http, client, "outer", in_=row(1))["out"][0, 0]))
                        except InferenceServerException as error:
                            failures.append(error)

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            with http.InferenceServerClient(live.address) as client:
                for number in range(2, 8):
                    write_plus(tmp_path, "plus", number, version=number)
                    client.load_model("plus")
            over.set()
            for thread in threads:
                thread.join()

            assert failures == []
            assert {7.0, 4 + 3 * 7.0} <= answers

    def test_a_stopping_server_finishes_requests_between_two_steps(self, tmp_path: Path) -> None:
        results: queue.Queue[Any] = queue.Queue()
        with gated(tmp_path) as (live, gate), rpc.InferenceServerClient(live.grpc_address) as client:
            gate.close()
            tensor = rpc.InferInput("in", [1, 4], "FP32").set_data_from_numpy(row(1))
            client.async_infer("waiting", [tensor], lambda result, error: results.put(error or result))
            entered(live, gate)
            stopping = asyncio.run_coroutine_threadsafe(live.server.drain(), live.loop)
            live.call(asyncio.sleep(0))
            assert not live.server.health.live()
            gate.open()

            assert results.get(timeout=PATIENCE_S).as_numpy("out")[0, 0] == 2
            assert stopping.result(PATIENCE_S) == 0


def test_a_step_may_be_a_sequence_model(tmp_path: Path) -> None:
    control = sequence_models.CONTROLS + sequence_models.STATE % ""
    sequence_models.write_accumulator(tmp_path, "sum", sequence_models.config(4, "direct {}" + control))
    write_plus(tmp_path, "plus", 10, width=1)
    steps = [step("plus", [("x", "in")], [("y", "mid")]), step("sum", [("x", "mid")], [("y", "out")])]
    text = config("running", ["in"], ["out"], steps, rows=4).replace("dims: [ 4 ]", "dims: [ 1 ]")
    write_ensemble(tmp_path, "running", text)
    with live_server(tmp_path) as live, rpc.InferenceServerClient(live.grpc_address) as client:
        answers = []
        for number in range(3):
            tensor = rpc.InferInput("in", [1, 1], "FP32").set_data_from_numpy(np.full((1, 1), number, np.float32))
            how = {"sequence_id": 5, "sequence_start": number == 0, "sequence_end": number == 2}
            answers.append(client.infer("running", [tensor], **how).as_numpy("out")[0, 0])
        with pytest.raises(InferenceServerException, match=r"in ensemble 'running', inference request .* correlation"):
            client.infer("running", [tensor])

        assert answers == [10, 21, 33]


FORWARD = """
import triton_python_backend_utils as pb

class TritonPythonModel:
    def execute(self, requests):
        given = [request.inputs() for request in requests]
        return [pb.InferenceResponse([pb.Tensor("y" + x.name()[1:], x.as_numpy()) for x in each]) for each in given]
"""
"""A model that gives y0 for x0 and y1 for x1, each if it got it."""


@pytest.fixture(scope="module")
def forwarding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Serve two of these models in a row, and one before a step with a required input."""
    root = tmp_path_factory.mktemp("repository")
    sides = [f'{side} {{ name: "{name}{i}" data_type: TYPE_FP32 dims: [ {ensembles.WIDTH} ] %s }}'
             for side, name in (("input", "x"), ("output", "y")) for i in (0, 1)]  # fmt: skip
    tensors = " ".join(each % ("optional: true" if each.startswith("input") else "") for each in sides)
    write_ensemble(root, "forward", f'backend: "python" max_batch_size: 8 {tensors}')
    (root / "forward" / "1" / "model.py").write_text(FORWARD)
    write_plus(root, "plus", 1)
    first = step("forward", [("x0", "a"), ("x1", "b")], [("y0", "c"), ("y1", "d")])
    for name, second in (
        ("may", step("forward", [("x0", "c"), ("x1", "d")], [("y0", "y"), ("y1", "z")])),
        ("must", f"{step('forward', [('x0', 'c')], [('y0', 'y')])}, {step('plus', [('x', 'd')], [('y', 'z')])}"),
    ):
        text = config(name, ["a", "b"], ["y", "z"], [first, second])
        write_ensemble(root, name, re.sub(r"(input {[^}]*)}", r"\1 optional: true }", text))
    with live_server(root) as live:
        yield live


@pytest.mark.parametrize("module", [http, rpc], ids=["http", "grpc"])
class TestMissingOutputsOfSteps:
    """As in qa/L0_optional_input: an optional input is omitted if the step before has not produced it."""

    def infer_sums(self, live: Live, module: Any, model: str, *requested: str, **inputs: Array) -> dict[str, float]:
        with module.InferenceServerClient(live.address if module is http else live.grpc_address) as client:
            answer = infer_with(module, client, model, requested, **inputs)
        return {name: float(array[0, 0]) for name, array in answer.items()}

    def test_an_optional_input_of_a_later_step_is_omitted_if_an_earlier_step_did_not_produce_it(
        self, forwarding: Live, module: Any
    ) -> None:
        assert self.infer_sums(forwarding, module, "may", "y", a=row(3)) == {"y": 3}
        assert self.infer_sums(forwarding, module, "may", "z", b=row(4)) == {"z": 4}
        assert self.infer_sums(forwarding, module, "may", a=row(3), b=row(4)) == {"y": 3, "z": 4}

    def test_an_output_that_no_step_produced_is_omitted_from_the_answer(self, forwarding: Live, module: Any) -> None:
        assert self.infer_sums(forwarding, module, "may", a=row(3)) == {"y": 3}
        assert self.infer_sums(forwarding, module, "may", "z", a=row(3)) == {}

    def test_a_required_input_that_no_step_produced_is_an_error(self, forwarding: Live, module: Any) -> None:
        with pytest.raises(InferenceServerException) as failed:
            self.infer_sums(forwarding, module, "must", a=row(3))
        text = "in ensemble 'must', model 'forward': the answer lacks the requested output 'y1'"
        assert text in failed.value.message()


class TestHooks:
    HOOKS = """
import numpy as np


def pre_inference(sample, metadata):
    return {"in": [sample["value"]] * 4}


def post_inference(prediction, metadata):
    return {"answer": float(np.ravel(prediction)[0])}
"""

    def test_an_ensemble_may_have_hooks(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        (tmp_path / "chain" / "hooks.py").write_text(self.HOOKS)
        (tmp_path / "chain" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
        with live_server(tmp_path) as live:
            answer = requests.post(f"{live.url}/v2/models/chain/predict", json={"value": 5}, timeout=10)

            assert (answer.status_code, answer.json()) == (200, {"answer": 11.0})

    def test_a_step_with_hooks_makes_the_ensemble_unavailable(self, tmp_path: Path) -> None:
        ensembles.write_all(tmp_path)
        (tmp_path / "plus" / "hooks.py").write_text("def pre_inference(sample, metadata):\n    return sample\n")
        (tmp_path / "plus" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
        with live_server(tmp_path) as live, http.InferenceServerClient(live.address) as client:
            reasons = {entry["name"]: entry.get("reason", "") for entry in client.get_model_repository_index()}

            assert "in ensemble chain, model plus has hooks" in reasons["chain"]


def states(client: Any) -> dict[str, str]:
    """Return the state of each model that was ever loaded."""
    return {entry["name"]: entry["state"] for entry in client.get_model_repository_index() if "state" in entry}


def test_an_instance_group_in_the_configuration_of_an_ensemble_is_rejected(tmp_path: Path) -> None:
    write_ensemble(tmp_path, "chain", CHAIN.replace("ensemble_scheduling", "instance_group { } ensemble_scheduling"))
    with live_server(tmp_path) as live, http.InferenceServerClient(live.address) as client:
        (entry,) = client.get_model_repository_index()

        assert "instance group should not be specified for ensemble 'chain'" in entry["reason"]
