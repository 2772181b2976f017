"""`model_warmup` of configurations on a live server: which samples run, and which make a model unavailable."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton

from tests.backends.onnx_models import FLOAT, INT64, STRING, floats, node
from tests.clients import models
from tests.clients.tensors import input_of
from tests.live import live_server
from tests.server.python_models.repositories import ONE, write_model

pytestmark = pytest.mark.slow

INT32 = models.INT32
IDENTITY = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""
SILENT = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
"""A decoupled model that never gives an answer."""


def warmup(*inputs: str, name: str = "regular sample", rows: int = 1, more: str = "") -> str:
    return f'model_warmup {{ name: "{name}" batch_size: {rows} {more} {" ".join(inputs)} }}\n'


def data(kind: str, name: str = "x", datatype: str = "TYPE_FP32", dims: str = "3") -> str:
    return f'inputs {{ key: "{name}" value {{ data_type: {datatype} dims: [ {dims} ] {kind} }} }}'


ZERO, RANDOM, FILE = "zero_data: true", "random_data: true", 'input_data_file: "raw"'


def write(root: Path, config: str, code: int = FLOAT) -> None:
    described: models.Tensors = {"x": (code, ["N", 3])}
    models.write(root, "m", [node("Identity", ["x"], ["y"])], (described, {"y": (code, ["N", 3])}), config=config)


def write_sequence(root: Path, code: int, config: str) -> None:
    """Write a model that returns its input if the controls START and READY are as expected."""
    tensors: models.Tensors = {"INPUT": (code, ["N", 1]), "START": (INT32, ["N", 1]), "READY": (INT32, ["N", 1])}
    nodes = [
        node("Add", ["START", "READY"], ["both"]), node("Identity", ["INPUT"], ["OUTPUT"]),
        node("Identity", ["both"], ["BOTH"]),
    ]  # fmt: skip
    outputs: models.Tensors = {"OUTPUT": (code, ["N", 1]), "BOTH": (INT32, ["N", 1])}
    models.write(root, "sequence", nodes, (tensors, outputs), config=config)


def controls(datatype: str) -> str:
    kinds = " ".join(
        f'control_input {{ name: "{kind}" control {{ kind: CONTROL_SEQUENCE_{kind} int32_false_true: [ 0, 1 ] }} }}'
        for kind in ("START", "READY")
    )
    return f"""
max_batch_size: 8
input {{ name: "INPUT" data_type: {datatype} dims: 1 }}
output [ {{ name: "OUTPUT" data_type: {datatype} dims: 1 }}, {{ name: "BOTH" data_type: TYPE_INT32 dims: 1 }} ]
sequence_batching {{ {kinds} }}
"""


def ran(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The samples that have run, and by which instance, according to the log."""
    messages = [record.getMessage() for record in caplog.records if "is running warmup sample" in record.getMessage()]
    return [each.partition("instance ")[2].replace(" is running warmup sample", "") for each in messages]


def refusal(root: Path) -> str:
    with live_server(root) as live:
        (entry,) = httpx.post(f"{live.url}/v2/repository/index").json()
    assert entry["state"] == "UNAVAILABLE"
    return str(entry["reason"])


def test_zero_random_and_file_samples_run_before_the_model_is_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = (
        warmup(data(ZERO), more="count: 2"),
        warmup(data(RANDOM), rows=4, name="four"),
        warmup(data(FILE), name="raw"),
    )
    write(tmp_path, "max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }\n" + "".join(samples))
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "raw").write_bytes(np.ones(3, np.float32).tobytes())
    with caplog.at_level(logging.DEBUG, "penstock.batching"), live_server(tmp_path) as live:
        messages = ran(caplog)
        with triton.InferenceServerClient(live.address) as client:
            array = np.ones((1, 3), np.float32)
            assert client.infer("m", [input_of("x", array)]).as_numpy("y").tolist() == array.tolist()
            (counted,) = client.get_inference_statistics("m")["model_stats"]
            config = client.get_model_config("m")

    each = ["'regular sample' for iteration 1", "'regular sample' for iteration 2", "'four' for iteration 1"]
    each.append("'raw' for iteration 1")
    assert messages == [f"{name} {line}" for name in ("0", "1", "loop") for line in each]
    assert (counted["execution_count"], counted["inference_count"]) == (1, 1)
    assert [sample["name"] for sample in config["model_warmup"]] == ["regular sample", "four", "raw"]


def test_string_samples_are_empty_random_or_read_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    samples = [warmup(data(kind, datatype="TYPE_STRING"), name=kind.split(":")[0]) for kind in (ZERO, RANDOM, FILE)]
    write(tmp_path, "max_batch_size: 4\n" + "".join(samples), STRING)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "raw").write_bytes(b"\3\0\0\x00233" * 3)
    with caplog.at_level(logging.DEBUG, "penstock.batching"), live_server(tmp_path):
        assert len(ran(caplog)) == 6


@pytest.mark.parametrize(("datatype", "code"), [("TYPE_INT32", INT32), ("TYPE_STRING", STRING)])
def test_the_sample_of_a_sequence_model_may_omit_the_controls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, datatype: str, code: int
) -> None:
    control_data = [data(ZERO, name, "TYPE_INT32", "1") for name in ("START", "READY")]
    sample = data(ZERO if code == INT32 else FILE, "INPUT", datatype, "1")
    samples = warmup(sample, *control_data, rows=8, name="sequence sample") + warmup(sample, rows=3, name="without")
    write_sequence(tmp_path, code, controls(datatype) + samples)
    (tmp_path / "sequence" / "warmup").mkdir()
    (tmp_path / "sequence" / "warmup" / "raw").write_bytes(b"\3\0\0\x00233")
    with caplog.at_level(logging.DEBUG, "penstock.batching"), live_server(tmp_path) as live:
        assert {line.split("'")[1] for line in ran(caplog)} == {"sequence sample", "without"}
        with triton_grpc.InferenceServerClient(live.grpc_address) as client:
            array = np.array([[7]], np.int32) if code == INT32 else np.array([[b"7"]], np.object_)
            sent = [triton_grpc.InferInput("INPUT", [1, 1], datatype.removeprefix("TYPE_").replace("STRING", "BYTES"))]
            sent[0].set_data_from_numpy(array)
            found = client.infer("sequence", sent, sequence_id=1, sequence_start=True, sequence_end=True)
            (counted,) = client.get_inference_statistics("sequence").model_stats

    assert found.as_numpy("BOTH").tolist() == [[2]]
    assert counted.execution_count == 1


@pytest.mark.parametrize(("code", "more"), [(IDENTITY, ""), (SILENT, "model_transaction_policy { decoupled: true }")])
def test_the_samples_of_a_python_model_run_on_each_instance_and_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: str, more: str
) -> None:
    samples = "instance_group { count: 2 kind: KIND_CPU }\n" + warmup(data(ZERO), more="count: 2", rows=3)
    write_model(tmp_path, "m", code, ONE + samples + more)
    with caplog.at_level(logging.DEBUG, "penstock.batching"), live_server(tmp_path) as live:
        assert httpx.get(f"{live.url}/v2/models/m/ready").status_code == 200

    assert ran(caplog) == [f"{name} 'regular sample' for iteration {n}" for n in (1, 2) for name in ("0", "1")]


def test_a_sample_without_rows_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, warmup(data(ZERO, "unknown"), rows=0))
    with caplog.at_level(logging.DEBUG, "penstock.batching"), live_server(tmp_path) as live:
        assert ran(caplog) == []
        assert httpx.get(f"{live.url}/v2/models/m/ready").status_code == 200


@pytest.mark.parametrize(
    ("sample", "why"),
    [
        (warmup(data(ZERO), rows=65), "sample 'regular sample': inference request batch-size must be <= 64"),
        (warmup(data(ZERO, "z")), "unexpected inference input 'z' for model 'm'"),
        (warmup(), "got 0 inputs for model 'm', but missing required input(s) ['x']"),
        (warmup(data(ZERO, datatype="TYPE_INT32")), "inference input 'x' data-type is 'INT32', but model 'm' expects"),
        (warmup(data(ZERO, dims="4")), "unexpected shape for input 'x' for model 'm'"),
        (warmup(data(ZERO, dims="-1")), "expects all variable-size dimensions are specified for input 'x'"),
        (warmup(data("")), "warmup setting expects input 'x' to have input_data_type set"),
        (warmup(data(ZERO, datatype="TYPE_INVALID")), "warmup setting expects input 'x' to have data_type set"),
        (warmup(data(FILE)), "warmup setting expects 12 bytes, but the data provided from raw only has 5 bytes"),
        (warmup(data('input_data_file: "gone"')), "failed to open text file for read warmup/gone: No such file"),
        (warmup(data('input_data_file: "../config.pbtxt"')), "'../config.pbtxt' is outside the model's folder"),
        (warmup(data('input_data_file: "/etc/hostname"')), "'/etc/hostname' is outside the model's folder warmup"),
    ],
)  # fmt: skip
def test_a_sample_that_does_not_fit_makes_the_model_unavailable(tmp_path: Path, sample: str, why: str) -> None:
    write(tmp_path, sample)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "raw").write_bytes(b"short")

    assert why in refusal(tmp_path)


def test_a_sample_that_fails_in_the_model_is_in_the_error(tmp_path: Path) -> None:
    described: models.Tensors = {"x": (INT64, ["N"])}
    nodes = [node("Gather", ["table", "x"], ["y"])]
    models.write(tmp_path, "m", nodes, (described, {"y": (FLOAT, ["N"])}), {"table": floats([1, 2])},
                 config=warmup(data(FILE, datatype="TYPE_INT64", dims=""), name="far out"))  # fmt: skip
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "raw").write_bytes(np.array([9], np.int64).tobytes())

    reason = refusal(tmp_path)
    assert "failed to run warmup sample 'far out': " in reason
    assert "indices element out of data bounds" in reason


def test_samples_with_ragged_reshaped_or_derived_inputs_run_like_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flat: models.Tensors = {"x": (FLOAT, ["T"]), "counts": (FLOAT, ["N"])}
    nodes = [node("Identity", ["counts"], ["y"]), node("ReduceSum", ["x"], ["sum"], keepdims=0)]
    ragged = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: -1 allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: 1 reshape { shape: [] } }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_FP32 source_input: "x" }
"""
    sample = warmup(data(RANDOM, dims="5"), rows=3)
    models.write(tmp_path, "ragged", nodes, (flat, {"y": (FLOAT, ["N"]), "sum": (FLOAT, [])}), config=ragged + sample)
    reshaped = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 6 reshape { shape: [ 2, 3 ] } }
output { name: "y" data_type: TYPE_FP32 dims: [ 2, 3 ] }
"""
    square: models.Tensors = {"x": (FLOAT, ["N", 2, 3])}
    outputs: models.Tensors = {"y": (FLOAT, ["N", 2, 3])}
    models.write(tmp_path, "reshaped", [node("Neg", ["x"], ["y"])], (square, outputs),
                 config=reshaped + warmup(data(ZERO, dims="6"), rows=4))  # fmt: skip
    with caplog.at_level(logging.DEBUG, "penstock.batching"), live_server(tmp_path) as live:
        index = httpx.post(f"{live.url}/v2/repository/index").json()

    assert [entry["state"] for entry in index] == ["READY", "READY"], index
    assert len(ran(caplog)) == 4


@pytest.mark.parametrize(("first", "why"), [(1, ""), (2, "failed to run warmup sample 'regular sample': shape tensor")])
def test_the_sample_of_a_shape_tensor_must_begin_with_one_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, why: str
) -> None:
    shapes = """
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: 4 }, { name: "v" data_type: TYPE_INT64 dims: 2 is_shape_tensor: true } ]
output { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] }
"""
    sample = warmup(data(RANDOM, dims="4"), data(FILE, "v", "TYPE_INT64"), rows=3)
    tensors: models.Tensors = {"x": (FLOAT, ["N", 4]), "v": (INT64, [3])}
    models.write(tmp_path, "m", [node("Reshape", ["x", "v"], ["y"])], (tensors, {"y": (FLOAT, ["N", "A", "B"])}),
                 config=shapes + sample)  # fmt: skip
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "raw").write_bytes(np.array([first, 2, 2], np.int64).tobytes())
    with caplog.at_level(logging.DEBUG, "penstock.batching"), live_server(tmp_path) as live:
        (entry,) = httpx.post(f"{live.url}/v2/repository/index").json()

    assert entry["state"] == ("UNAVAILABLE" if why else "READY")
    assert why in entry.get("reason", "")
    assert len(ran(caplog)) == (1 if why else 2)


def test_sequence_states_are_reset_after_a_sample(tmp_path: Path) -> None:
    tensors: models.Tensors = {"INPUT": (INT32, ["N", 1]), "before": (INT32, ["N", 1])}
    nodes = [node("Add", ["INPUT", "before"], ["OUTPUT"]), node("Add", ["INPUT", "before"], ["after"])]
    state = """
max_batch_size: 4
input { name: "INPUT" data_type: TYPE_INT32 dims: 1 }
output { name: "OUTPUT" data_type: TYPE_INT32 dims: 1 }
sequence_batching { state { input_name: "before" output_name: "after" data_type: TYPE_INT32 dims: 1 } }
"""
    sample = warmup(data(RANDOM, "INPUT", "TYPE_INT32", "1"), rows=4)
    outputs: models.Tensors = {"OUTPUT": (INT32, ["N", 1]), "after": (INT32, ["N", 1])}
    models.write(tmp_path, "m", nodes, (tensors, outputs), config=state + sample)
    with live_server(tmp_path) as live, triton_grpc.InferenceServerClient(live.grpc_address) as client:
        sent = [triton_grpc.InferInput("INPUT", [1, 1], "INT32")]
        sent[0].set_data_from_numpy(np.array([[7]], np.int32))
        found = [
            client.infer("m", sent, sequence_id=1, sequence_start=first, sequence_end=not first)
            .as_numpy("OUTPUT")
            .item()
            for first in (True, False)
        ]

    assert found == [7, 14]
