"""Files, configuration, versions and canceled requests of models, as Triton's users expect them, on a live server."""

from __future__ import annotations

import json
import queue
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.onnx_models import FLOAT, floats, node
from tests.clients import models
from tests.clients.gated_onnxruntime import Gated
from tests.clients.parallel_requests import Asking
from tests.fakes import PATIENCE_S
from tests.live import Live, live_server
from tests.server.repository.folders import look_twice

pytestmark = pytest.mark.slow

X = '{ name: "x" data_type: TYPE_FP32 dims: [ 4 ] }'
Y = '{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }'
WHOLE_X, WHOLE_Y = X.replace("[ 4 ]", "[ -1, 4 ]"), Y.replace("[ 4 ]", "[ -1, 4 ]")


def adds(root: Path, name: str, *versions: int, config: str = "", rows: Any = "N") -> Path:
    """Write versions of a model [rows,4] that gives `x` plus the version's number as `y`."""
    for version in versions:
        tensors = ({"x": (FLOAT, [rows, 4])}, {"y": (FLOAT, [rows, 4])})
        add = [node("Add", ["x", "n"], ["y"])]
        models.write(root, name, add, tensors, {"n": floats([version])}, version=version)
    if config:
        (root / name / "config.pbtxt").write_text(config)
    return root / name


def answer(client: Any, name: str, version: str = "", rows: int = 1) -> float:
    """Return the number that a version adds."""
    x = httpclient.InferInput("x", [rows, 4], "FP32")
    x.set_data_from_numpy(np.zeros((rows, 4), np.float32))
    found = client.infer(name, [x], model_version=version).as_numpy("y")
    assert found.shape == (rows, 4)
    return float(found[0, 0])


def refusal(client: Any, *args: Any, **named: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        answer(client, *args, **named)
    return str(caught.value.message())


def states(client: Any) -> dict[str, dict[str, str]]:
    """The versions of each model: READY, or the reason why not."""
    found: dict[str, dict[str, str]] = {}
    for row in client.get_model_repository_index():
        held = found.setdefault(row["name"], {})
        if row.get("state"):
            held[row.get("version", "")] = row["state"] if row["state"] == "READY" else row.get("reason", "")
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    for name, config in {
        "latest": "",
        "latest_two": "version_policy { latest { num_versions: 2 } }",
        "all": "version_policy { all {} }",
        "specific": "version_policy { specific { versions: [ 1, 3 ] } }",
        "absent": "version_policy { specific { versions: [ 2, 9 ] } }",
    }.items():
        adds(root, name, 1, 2, 3, config=config)
    layout(root)
    completion(root)
    for name, (config, _) in REFUSED.items():
        adds(root, name, 1, config=config)
    adds(
        root, "tagged", 1, config='metric_tags { key: "team" value: "flowers" } metric_tags { key: "tier" value: "1" }'
    )
    with live_server(root) as server:
        yield server


def layout(root: Path) -> None:
    """Write folders that are versions and folders that are not."""
    folder = adds(root, "folders", 1)
    for name in ("02", "three", "4x", "-5", "0", "7.0"):
        shutil.copytree(folder / "1", folder / name)
    (folder / "config.pbtxt").write_text("version_policy { all {} }")
    named = adds(root, "named", 1)
    (named / "1" / "model.onnx").rename(named / "1" / "net.onnx")
    (named / "config.pbtxt").write_text('default_model_filename: "net.onnx"')
    inner = adds(root, "inner", 1)
    (inner / "1" / "model.onnx").rename(inner / "1" / "file")
    (inner / "1" / "model.onnx").mkdir()
    (inner / "1" / "file").rename(inner / "1" / "model.onnx" / "model.onnx")
    shutil.copytree(folder / "1", root / ".hidden" / "1")


def completion(root: Path) -> None:
    """Write models whose configuration must be completed from the model file."""
    for name, config, rows in (
        ("silent", "", "N"),
        ("both_named", f"input [ {WHOLE_X} ] output [ {WHOLE_Y} ]", "N"),
        ("both_named_batched", f"max_batch_size: 3 input [ {X} ] output [ {Y} ]", "N"),
        ("inputs_named", f"input [ {X} ]", "N"),
        ("fixed_rows", "", 1),
        ("no_rows_said", "max_batch_size: 0", "N"),
        ("own_size", "max_batch_size: 5", "N"),
        ("one_at_a_time", "max_batch_size: 1", "N"),
        ("delays", "dynamic_batching { max_queue_delay_microseconds: 100 }", "N"),
        ("too_many_named", f"input [ {X}, {X.replace('x', 'z', 1)} ] output [ {Y} ] max_batch_size: 2", "N"),
    ):
        adds(root, name, 1, config=config, rows=rows)
    neg = [node("Neg", ["x"], ["y"])]
    models.write(root, "scalar", neg, ({"x": (FLOAT, [])}, {"y": (FLOAT, [])}))
    one_fixed = [node("Identity", ["x"], ["y"]), node("ReduceSum", ["x"], ["total"], keepdims=1)]
    tensors: Any = ({"x": (FLOAT, ["N", 4])}, {"y": (FLOAT, ["N", 4]), "total": (FLOAT, [1, 1])})
    models.write(root, "one_fixed", one_fixed, tensors)


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with httpclient.InferenceServerClient(live.address) as new_client:
        yield new_client


# -- the repository --------------------------------------------------------------------------------------------


class TestRepositoryLayout:
    def test_only_positive_integers_without_leading_zeros_are_versions(self, client: Any) -> None:
        assert states(client)["folders"] == {"1": "READY"}
        assert answer(client, "folders") == 1

    @pytest.mark.parametrize("name", ["named", "inner"])
    def test_the_model_file_may_be_named_and_may_be_a_folder(self, client: Any, name: str) -> None:
        assert answer(client, name) == 1

    def test_a_hidden_folder_is_not_a_model(self, client: Any) -> None:
        assert ".hidden" not in states(client)


class TestVersionPolicy:
    @pytest.mark.parametrize(
        ("name", "versions"), [("latest", "3"), ("latest_two", "23"), ("all", "123"), ("specific", "13")]
    )
    def test_only_the_versions_of_the_policy_are_served(self, client: Any, name: str, versions: str) -> None:
        assert states(client)[name] == dict.fromkeys(versions, "READY")
        assert client.get_model_metadata(name)["versions"] == list(versions)
        assert [answer(client, name, version) for version in versions] == [float(version) for version in versions]
        assert answer(client, name) == float(versions[-1])
        for other in set("1234") - set(versions):
            text = f"Request for unknown model: '{name}' version {other} is not found"
            assert refusal(client, name, other) == text

    def test_the_version_policy_is_reported(self, client: Any) -> None:
        policies = {name: client.get_model_config(name)["version_policy"] for name in ("latest", "all", "specific")}

        assert policies == {
            "latest": {"latest": {"num_versions": 1}},
            "all": {"all": {}},
            "specific": {"specific": {"versions": [1, 3]}},
        }

    def test_a_missing_specific_version_does_not_affect_the_others(self, client: Any) -> None:
        assert states(client)["absent"] == {"2": "READY"}
        assert answer(client, "absent") == 2
        assert refusal(client, "absent", "9") == "Request for unknown model: 'absent' version 9 is not found"


@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_versions_are_loaded_and_unloaded_as_their_folders_appear_and_disappear(tmp_path: Path, mode: str) -> None:
    folder = adds(tmp_path, "m", 1, 2, config="version_policy { all {} }")
    elsewhere = adds(tmp_path.parent / f"{tmp_path.name}-made", "m", 3, 4)
    loaded = ("m",) if mode == "explicit" else ()
    with (
        live_server(tmp_path, model_control_mode=mode, load_model=loaded, repository_poll_secs=3600) as live,
        httpclient.InferenceServerClient(live.address) as client,
    ):

        def look() -> None:
            if mode == "poll":
                live.call(look_twice(live.server.control))
            else:
                client.load_model("m")

        assert states(client) == {"m": {"1": "READY", "2": "READY"}}
        (elsewhere / "3").rename(folder / "3")
        shutil.rmtree(folder / "1")
        assert answer(client, "m", "1") == 1  # the repository has not been polled yet
        look()
        assert states(client) == {"m": {"1": "unloaded", "2": "READY", "3": "READY"}}
        assert (answer(client, "m"), answer(client, "m", "2")) == (3, 2)
        assert refusal(client, "m", "1") == "Request for unknown model: 'm' version 1 is not at ready state"

        shutil.rmtree(folder / "3")
        (elsewhere / "4").rename(folder / "3")  # the same version, another model
        look()
        assert answer(client, "m", "3") == 4

        (folder / "config.pbtxt").write_text("version_policy { specific { versions: [ 2 ] } }")
        look()
        assert states(client)["m"] == {"1": "unloaded", "2": "READY", "3": "unloaded"}
        assert answer(client, "m") == 2


# -- what is completed -----------------------------------------------------------------------------------------


class TestAutoCompletion:
    def test_an_empty_configuration_is_completed(self, client: Any) -> None:
        config = client.get_model_config("silent")

        assert (config["backend"], config["platform"]) == ("onnxruntime", "onnxruntime_onnx")
        assert config["max_batch_size"] == 64
        assert [(each["name"], each["data_type"], each["dims"]) for each in config["input"]] == [
            ("x", "TYPE_FP32", [4])
        ]
        assert [(each["name"], each["data_type"], each["dims"]) for each in config["output"]] == [
            ("y", "TYPE_FP32", [4])
        ]
        assert "dynamic_batching" in config

    @pytest.mark.parametrize(
        ("name", "rows", "batches"),
        [
            ("both_named", 0, False),  # nothing is completed: the dims hold every axis
            ("both_named_batched", 3, True),
            ("inputs_named", 64, True),
            ("fixed_rows", 0, False),
            ("one_fixed", 0, False),  # the first axis of every tensor must be free
            ("scalar", 0, False),
            ("own_size", 5, True),
            ("one_at_a_time", 1, False),
            ("delays", 64, True),
        ],
    )
    def test_the_batch_size_is_completed_from_the_batch_axes_of_the_model(
        self, client: Any, name: str, rows: int, batches: bool
    ) -> None:
        config = client.get_model_config(name)

        assert (config["max_batch_size"], "dynamic_batching" in config) == (rows, batches)

    @pytest.mark.parametrize(
        ("name", "shape"), [("both_named", [-1, 4]), ("own_size", [-1, 4]), ("fixed_rows", [1, 4])]
    )
    def test_metadata_has_the_batch_axis_whether_configured_or_completed(
        self, client: Any, name: str, shape: list[int]
    ) -> None:
        assert [each["shape"] for each in client.get_model_metadata(name)["inputs"]] == [shape]

    def test_a_model_with_batch_size_0_takes_any_number_of_rows_on_a_free_axis(self, client: Any) -> None:
        assert answer(client, "both_named", rows=100) == 1

    def test_max_batch_size_limits_the_rows_of_a_request(self, client: Any) -> None:
        assert answer(client, "own_size", rows=5) == 1
        assert "batch-size must be <= 5 for 'own_size'" in refusal(client, "own_size", rows=6)

    def test_a_scalar_is_exposed_as_one_element(self, client: Any) -> None:
        x = httpclient.InferInput("x", [1], "FP32")
        x.set_data_from_numpy(np.array([3], np.float32))

        assert client.infer("scalar", [x]).as_numpy("y").tolist() == [-3]
        assert client.get_model_metadata("scalar")["inputs"][0]["shape"] == [1]

    def test_a_configured_input_that_the_model_lacks_is_an_error(self, client: Any) -> None:
        text = "unable to load model 'too_many_named', configuration expects 2 inputs, model provides 1: 'x'"
        assert states(client)["too_many_named"] == {"1": text}

    @pytest.mark.parametrize(
        "rules", [("onnxruntime,default-max-batch-size=4",), ("default-max-batch-size=4",)], ids=["backend", "all"]
    )
    def test_the_default_batch_size_can_be_set_with_backend_config(
        self, tmp_path: Path, rules: tuple[str, ...]
    ) -> None:
        adds(tmp_path, "m", 1)
        with (
            live_server(tmp_path, backend_config=rules) as live,
            httpclient.InferenceServerClient(live.address) as client,
        ):
            assert client.get_model_config("m")["max_batch_size"] == 4

    def test_a_default_batch_size_of_0_disables_batching_for_models_without_a_batch_size(self, tmp_path: Path) -> None:
        adds(tmp_path, "m", 1)
        adds(tmp_path, "own_size", 1, config="max_batch_size: 5")
        with (
            live_server(tmp_path, backend_config=("onnxruntime,default-max-batch-size=0",)) as live,
            httpclient.InferenceServerClient(live.address) as client,
        ):
            assert client.get_model_config("m")["max_batch_size"] == 0
            assert "dynamic_batching" not in client.get_model_config("m")
            assert client.get_model_config("own_size")["max_batch_size"] == 5
            assert answer(client, "m", rows=3) == 1

    def test_a_model_must_configure_its_inputs_and_outputs_if_completion_is_disabled(self, tmp_path: Path) -> None:
        adds(tmp_path, "whole", 1, config=f"max_batch_size: 2 input [ {X} ] output [ {Y} ]")
        adds(tmp_path, "silent", 1)
        adds(tmp_path, "no_outputs", 1, config=f"max_batch_size: 2 input [ {X} ]")
        with (
            live_server(tmp_path, disable_auto_complete_config=True) as live,
            httpclient.InferenceServerClient(live.address) as client,
        ):
            text = "configuration expects 0 {0}, model provides 1: '{1}'"
            assert states(client) == {
                "whole": {"1": "READY"},
                "silent": {"1": f"unable to load model 'silent', {text.format('inputs', 'x')}"},
                "no_outputs": {"1": f"unable to load model 'no_outputs', {text.format('outputs', 'y')}"},
            }
            assert answer(client, "whole", rows=2) == 1


# -- what is refused -------------------------------------------------------------------------------------------

REFUSED = {
    "own_batching": (
        'parameters { key: "TRITON_BATCH_STRATEGY_PATH" value { string_value: "/lib/batch.so" } }',
        "TRITON_BATCH_STRATEGY_PATH",
    ),
    "in_tensorrt": ('platform: "tensorrt_plan"', "'tensorrt_plan'"),
    "in_tensorflow_graphs": ('platform: "tensorflow_graphdef"', "'tensorflow_graphdef'"),
    "has_agents": ('model_repository_agents { agents [ { name: "checksum" } ] }', "model_repository_agents"),
    "iterates": (
        "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 1 } }",
        "field 'sequence_batching.iterative_sequence' is for Python models",
    ),
    "in_a_namespace": (
        (
            'platform: "ensemble" ensemble_scheduling { step [ '
            '{ model_name: "silent" model_version: -1 model_namespace: "b" } ] }'
        ),
        "field 'ensemble_scheduling.step.model_namespace' is not supported",
    ),
    "has_profiles": ('instance_group { profile: "1" }', "field 'instance_group.profile' is not supported"),
    "has_other_devices": (
        "instance_group { secondary_devices { device_id: 1 } }",
        "field 'instance_group.secondary_devices' is not supported",
    ),
    "another_name": ('name: "not_the_folder"', "not_the_folder"),
    "too_large_a_size": (
        "max_batch_size: 4 dynamic_batching { preferred_batch_size: [ 5 ] }",
        "dynamic batching preferred size must be <= max batch size for too_large_a_size",
    ),
    "no_default_level": (
        "max_batch_size: 4 dynamic_batching { priority_levels: 2 }",
        "default priority level must be in range [1, 2] for no_default_level",
    ),
    "a_policy_of_no_level": (
        (
            "max_batch_size: 4 dynamic_batching { priority_levels: 2 default_priority_level: 1 "
            "priority_queue_policy { key: 3 value { } } }"
        ),
        "priority queue policy must have priority level in range [1, 2] for a_policy_of_no_level",
    ),
    "in_order_by_levels": (
        "max_batch_size: 4 dynamic_batching { preserve_ordering: true priority_levels: 2 default_priority_level: 1 }",
        "Only one priority level is allowed when 'preserve_ordering' is true for in_order_by_levels",
    ),
    "in_order_and_delayed": (
        (
            "max_batch_size: 4 dynamic_batching { preserve_ordering: true "
            "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 5 } }"
        ),
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for in_order_and_delayed",
    ),
    "of_two_schedulers": ("max_batch_size: 4 dynamic_batching { } sequence_batching { }", "scheduling_choice"),
    "cpu_with_gpus": (
        "instance_group { kind: KIND_CPU gpus: [ 0 ] }",
        "instance group cpu_with_gpus_0 of model cpu_with_gpus has kind KIND_CPU but specifies one or more GPUs",
    ),
    "less_than_none": ("instance_group { count: -1 }", "count must be from 1 to 1024"),
}
"""Configurations that no model is served with, and the words that the reason has."""


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_configuration_is_rejected_with_the_name_of_the_field(client: Any, name: str) -> None:
    (reason,) = states(client)[name].values()

    assert reason.startswith("config.pbtxt:1: ")
    assert REFUSED[name][1] in reason
    assert not client.is_model_ready(name)


# -- metrics ---------------------------------------------------------------------------------------------------


def test_metric_tags_are_labels_of_the_models_metrics(live: Live, client: Any) -> None:
    answer(client, "tagged")
    page = httpx.get(f"http://127.0.0.1:{live.metrics_port}/metrics").text

    (line,) = re.findall(r'^nv_inference_request_success\{.*model="tagged".*$', page, re.MULTILINE)
    assert line == 'nv_inference_request_success{_team="flowers",_tier="1",model="tagged",version="1"} 1'


# -- requests given up -----------------------------------------------------------------------------------------


class TestCancellation:
    """Requests canceled by their client: queued requests count as CANCELED and never run."""

    @pytest.fixture
    def gated(self) -> Iterator[Gated]:
        new_gated = Gated()
        yield new_gated
        new_gated.gate.open()

    @pytest.fixture
    def live(self, tmp_path: Path, gated: Gated) -> Iterator[Live]:
        models.write_identity(tmp_path, "m", "max_batch_size: 1")
        (tmp_path / "m" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
        with live_server(tmp_path, loaders=gated.loaders) as server:
            gated.runs.clear()
            gated.gate.close()
            yield server
            gated.gate.open()

    def test_requests_canceled_over_grpc_never_run(self, live: Live, gated: Gated) -> None:
        errors: queue.Queue[Any] = queue.Queue()
        with grpcclient.InferenceServerClient(live.grpc_address) as client, Asking(live, grpcclient, "m") as asking:
            (first,) = asking.queue(1, value=1)
            live.call(gated.gate.entered())
            given_up = [
                client.async_infer("m", [grpc_row(value)], lambda result, error: errors.put(error)) for value in (2, 3)
            ]
            asking.until_waiting(2)
            for call in given_up:
                call.cancel()
            assert {errors.get(timeout=PATIENCE_S).status() for _ in given_up} == {"StatusCode.CANCELLED"}
            asking.until_waiting(0)
            (last,) = asking.queue(1, value=4)
            gated.gate.open()
            assert (first.result(PATIENCE_S).value, last.result(PATIENCE_S).value) == (1, 4)

        assert gated.runs == [[1], [4]]
        assert counted(live) == 2

    def test_requests_of_closed_http_connections_never_run(self, live: Live, gated: Gated) -> None:
        with Asking(live, httpclient, "m") as asking:
            (first,) = asking.queue(1, value=1)
            live.call(gated.gate.entered())
            given_up = [http_row(live, value) for value in (2, 3)]
            asking.until_waiting(2)
            for connection in given_up:
                connection.close()
            asking.until_waiting(0)
            (last,) = asking.queue(1, value=4)
            gated.gate.open()
            assert (first.result(PATIENCE_S).value, last.result(PATIENCE_S).value) == (1, 4)

        assert gated.runs == [[1], [4]]
        assert counted(live) == 2

    def test_a_running_request_finishes_after_its_cancellation_without_delaying_the_next(
        self, live: Live, gated: Gated
    ) -> None:
        errors: queue.Queue[Any] = queue.Queue()
        with grpcclient.InferenceServerClient(live.grpc_address) as client:
            call = client.async_infer("m", [grpc_row(1)], lambda result, error: errors.put(error))
            live.call(gated.gate.entered())
            call.cancel()
            assert errors.get(timeout=PATIENCE_S).status() == "StatusCode.CANCELLED"
            gated.gate.open()
            with Asking(live, grpcclient, "m") as asking:
                assert asking.ask(1, 2).result(PATIENCE_S).value == 2

        assert gated.runs == [[1], [2]]


def grpc_row(value: float) -> Any:
    x = grpcclient.InferInput("x", [1, 4], "FP32")
    x.set_data_from_numpy(np.full((1, 4), value, np.float32))
    return x


def http_row(live: Live, value: float) -> socket.socket:
    row = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [value] * 4}
    body = json.dumps({"inputs": [row]}).encode()
    connection = socket.create_connection(("127.0.0.1", live.http_port), timeout=PATIENCE_S)
    head = b"POST /v2/models/m/infer HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    connection.sendall(head + body)
    return connection


def counted(live: Live) -> float:
    page = httpx.get(f"http://127.0.0.1:{live.metrics_port}/metrics").text
    (found,) = re.findall(r'^nv_inference_request_failure\{[^}]*reason="CANCELED"[^}]*\} (\S+)$', page, re.MULTILINE)
    return float(found)
