"""The module that model.py imports: its names, tensors, responses, requests, metrics and configuration, one by one."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock.backends
import penstock.batching
import penstock.server
from penstock.server.ipc.channel import Channel
from penstock.server.python_models.inside.model_config import ModelConfig
from penstock.server.python_models.inside.module import make_module
from penstock.server.python_models.inside.server_proxy import ServerProxy


@pytest.fixture
def pb_utils() -> Iterator[Any]:
    here, there = map(Channel, socket.socketpair())
    yield make_module(ServerProxy(here), "/models/m/1")
    here.close()
    there.close()


KINDS = ["uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


def test_datatypes_convert_to_and_from_numbers_and_names(pb_utils: Any) -> None:
    kinds = ["bool", *KINDS, "object"]

    assert [pb_utils.numpy_to_triton_type(np.dtype(kind)) for kind in kinds] == list(range(1, 14))
    assert [np.dtype(pb_utils.triton_to_numpy_type(number)) for number in range(1, 14)] == list(map(np.dtype, kinds))
    assert pb_utils.numpy_to_triton_type(np.float32) == 11
    assert pb_utils.numpy_to_triton_type(np.bytes_) == 13
    assert pb_utils.triton_to_numpy_type(14) is None
    assert pb_utils.triton_to_numpy_type("TYPE_FP32") is None  # what some models do in `initialize`
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.triton_string_to_numpy("TYPE_BOOL") is bool


def test_string_tensors_are_serialized_and_deserialized(pb_utils: Any) -> None:
    strings = np.array([[b"one", "zwölf"], [b"", 3]], np.object_)

    written = pb_utils.serialize_byte_tensor(strings)

    assert written == b"\x03\0\0\0one\x06\0\0\0zw\xc3\xb6lf\0\0\0\0\x01\0\0\0003"
    read = pb_utils.deserialize_bytes_tensor(np.frombuffer(written, np.uint8))
    assert read.tolist() == [b"one", "zwölf".encode(), b"", b"3"]
    with pytest.raises(ValueError, match="string extends beyond buffer: to byte 27 of 26"):
        pb_utils.deserialize_bytes_tensor(written[:-5] + b"\x02\0\0\0003")
    with pytest.raises(ValueError, match="incomplete length field"):
        pb_utils.deserialize_bytes_tensor(written + b"\1")
    assert pb_utils.serialize_byte_tensor(np.zeros(0, np.object_)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(1)) is None


def test_a_tensor_exposes_its_name_datatype_shape_and_array(pb_utils: Any) -> None:
    tensor = pb_utils.Tensor("x", np.zeros((2, 3), np.float16))

    assert (tensor.name(), tensor.triton_dtype(), tensor.shape(), tensor.is_cpu()) == ("x", 10, [2, 3], True)
    tensor.as_numpy()[0, 0] = 1
    assert tensor.as_numpy()[0, 0] == 1


def test_a_noncontiguous_array_is_copied(pb_utils: Any) -> None:
    tensor = pb_utils.Tensor("x", np.arange(6).reshape(2, 3).T)

    assert tensor.as_numpy().flags.c_contiguous
    assert tensor.shape() == [3, 2]
    assert pb_utils.Tensor("x", np.array(3)).shape() == []


def test_a_masked_array_is_sent_with_its_underlying_values(pb_utils: Any) -> None:
    masked = np.ma.array([1, 2], mask=[True, False], dtype=np.float32)

    assert pb_utils.Tensor("x", masked).outgoing.tobytes() == np.array([1, 2], np.float32).tobytes()


def test_strings_are_sent_as_of_the_creation_of_the_tensor(pb_utils: Any) -> None:
    array = np.array(["a", b"b", 7], np.object_)
    tensor = pb_utils.Tensor("x", array)
    array[0] = "c"

    assert tensor.outgoing.tolist() == [b"a", b"b", b"7"]
    assert pb_utils.Tensor("x", np.array([b"ab"])).outgoing.tolist() == [b"ab"]
    assert pb_utils.Tensor("x", np.array([b"ab"])).triton_dtype() == 13


@pytest.mark.parametrize(
    "array", [np.array(["text"]), np.zeros(1, np.complex64), np.zeros(1, ">f4"), np.zeros(1, "M8[s]")]
)
def test_a_numpy_dtype_that_triton_lacks_is_rejected(pb_utils: Any, array: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="NumPy dtype is not supported"):
        pb_utils.Tensor("x", array)


def test_a_tensor_requires_a_name_and_a_numpy_array(pb_utils: Any) -> None:
    with pytest.raises(TypeError):
        pb_utils.Tensor("x", [1, 2])
    with pytest.raises(TypeError):
        pb_utils.Tensor(3, np.zeros(1))


@pytest.mark.parametrize("kind", ["f4", "i8", "u1", "?", "f2"])
def test_dlpack_shares_the_memory_of_a_tensor(pb_utils: Any, kind: str) -> None:
    tensor = pb_utils.Tensor("x", np.ones((2, 2), kind))

    array = np.from_dlpack(tensor)
    back = pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack())

    assert array.ctypes.data == tensor.as_numpy().ctypes.data == back.as_numpy().ctypes.data
    assert (back.name(), back.triton_dtype()) == ("y", tensor.triton_dtype())
    assert tensor.__dlpack_device__() == (1, 0)
    assert pb_utils.Tensor.from_dlpack("z", np.ones(3)).shape() == [3]


def test_dlpack_rejects_strings_and_noncontiguous_tensors(pb_utils: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="string"):
        pb_utils.Tensor("x", np.array([b""], np.object_)).to_dlpack()
    with pytest.raises(pb_utils.TritonModelException, match="not contiguous"):
        pb_utils.Tensor.from_dlpack("x", np.zeros((2, 3)).T)
    with pytest.raises(pb_utils.TritonModelException, match="Provided tensor is not supported"):
        pb_utils.Tensor.from_dlpack("x", object())


def test_a_tensor_in_gpu_memory_is_rejected(pb_utils: Any) -> None:
    class OnGpu:
        def __dlpack__(self) -> None:
            raise AssertionError

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

    with pytest.raises(pb_utils.TritonModelException, match="GPU"):
        pb_utils.Tensor.from_dlpack("x", OnGpu())


def test_a_bf16_tensor_round_trips_through_dlpack(pb_utils: Any) -> None:
    from penstock.server.python_models.inside.tensors import BF16, received_tensor

    bits = np.array([0x3F80, 0x4000], np.uint16)
    back = pb_utils.Tensor.from_dlpack("y", received_tensor("x", bits, BF16).to_dlpack())

    assert back.triton_dtype() == BF16
    assert back.outgoing.tolist() == bits.tolist()
    with pytest.raises(pb_utils.TritonModelException, match="BF16"):
        back.as_numpy()


def test_a_response_contains_tensors_or_an_error(pb_utils: Any) -> None:
    tensor = pb_utils.Tensor("x", np.zeros(1))
    error = pb_utils.TritonError("gone", pb_utils.TritonError.NOT_FOUND)

    good, bad = pb_utils.InferenceResponse([tensor], parameters={"a": 1}), pb_utils.InferenceResponse(error=error)

    assert (good.has_error(), good.error(), good.output_tensors(), good.parameters()) == (
        False,
        None,
        [tensor],
        '{"a": 1}',
    )
    assert (bad.has_error(), bad.output_tensors(), bad.parameters()) == (True, [], "{}")
    assert (bad.error().message(), bad.error().code()) == ("gone", pb_utils.TritonError.NOT_FOUND)
    assert pb_utils.TritonError("x").code() == pb_utils.TritonError.INTERNAL
    assert pb_utils.get_output_tensor_by_name(good, "x") is tensor
    assert pb_utils.get_output_tensor_by_name(good, "y") is None


def test_an_invalid_response_is_rejected(pb_utils: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="Output tensor for inference response should not be empty"):
        pb_utils.InferenceResponse([None])
    with pytest.raises(TypeError):
        pb_utils.InferenceResponse([np.zeros(1)])
    with pytest.raises(TypeError):
        pb_utils.InferenceResponse(error="wrong")
    with pytest.raises(TypeError):
        pb_utils.TritonError(None)
    with pytest.raises(pb_utils.TritonModelException, match="values to have type bool/int/str"):
        pb_utils.InferenceResponse(parameters={"a": 1.5})
    with pytest.raises(pb_utils.TritonModelException, match="keys to have type str"):
        pb_utils.InferenceResponse(parameters={1: 1})


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, 1 << 64])
def test_an_integer_parameter_beyond_64_bits_is_rejected(pb_utils: Any, number: int) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="int to fit 64 bits, 'big' does not"):
        pb_utils.InferenceResponse(parameters={"big": number})
    with pytest.raises(pb_utils.TritonModelException, match="int to fit 64 bits, 'big' does not"):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[], parameters={"big": number})

    parameters = {"most": (1 << 63) - 1, "least": -(1 << 63), "yes": True}
    assert pb_utils.InferenceResponse(parameters=parameters).parameters() == json.dumps(parameters)


@pytest.mark.parametrize(
    ("name", "number", "bits"),
    [("correlation_id", 1 << 64, 64), ("correlation_id", -1, 64), ("timeout", 1 << 64, 64), ("flags", 1 << 32, 32)],
)
def test_an_out_of_range_number_in_a_request_is_rejected(pb_utils: Any, name: str, number: int, bits: int) -> None:
    with pytest.raises(TypeError, match=f"{name} is not an unsigned {bits}-bit number"):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[], **{name: number})


def test_a_created_request_exposes_its_properties(pb_utils: Any) -> None:
    tensor = pb_utils.Tensor("x", np.zeros(1))
    request = pb_utils.InferenceRequest(
        model_name="m", requested_output_names=["b", "a"], inputs=[tensor], request_id="i", correlation_id="c",
        model_version=2, flags=pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, timeout=7, parameters={"p": True},
        preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0), trace=pb_utils.InferenceTrace(),
    )  # fmt: skip
    request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)

    assert (request.request_id(), request.correlation_id(), request.flags(), request.timeout()) == ("i", "c", 2, 7)
    assert (request.requested_output_names(), request.parameters()) == ({"a", "b"}, '{"p": true}')
    assert pb_utils.get_input_tensor_by_name(request, "x") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "y") is None
    assert not request.is_cancelled()
    assert request.trace().get_context() is None
    with pytest.raises(pb_utils.TritonModelException, match="no reference"):
        request.get_response_sender()


def test_the_element_of_a_corrid_tensor_is_a_valid_correlation_id(pb_utils: Any) -> None:
    corrid = pb_utils.Tensor("CORRID", np.array([[2**64 - 1]], np.uint64)).as_numpy()[0][0]

    request = pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[], correlation_id=corrid)

    assert (type(request.correlation_id()), request.correlation_id()) == (int, 2**64 - 1)
    with pytest.raises(TypeError, match="correlation_id"):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[], correlation_id=np.int64(-1))


def test_an_invalid_request_is_rejected(pb_utils: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="Correlation ID must be integer or string"):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[], correlation_id=1.5)
    for missing in ("inputs", "requested_output_names", "model_name", "request_id"):
        arguments = {"inputs": [], "requested_output_names": [], "model_name": "m", "request_id": "i"} | {missing: None}
        with pytest.raises(TypeError, match="must be given"):
            pb_utils.InferenceRequest(**arguments)
    with pytest.raises(TypeError, match="requested_output_names"):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[None], inputs=[])
    with pytest.raises(pb_utils.TritonModelException, match="Requested output name for request with id 'i'"):
        pb_utils.InferenceRequest(request_id="i", model_name="m", requested_output_names=[""], inputs=[])
    with pytest.raises(pb_utils.TritonModelException, match="Input tensor for request with id ''"):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[None])


def test_text_arguments_accept_bytes(pb_utils: Any) -> None:
    strings = np.array([b"m", b"y", b"i"], np.object_)  # what a string tensor holds
    request = pb_utils.InferenceRequest(
        model_name=strings[0], requested_output_names=[strings[1]], inputs=[], request_id=strings[2]
    )

    assert (request.requested_output_names(), request.request_id()) == ({"y"}, "i")
    assert pb_utils.TritonError(b"gone").message() == "gone"
    assert pb_utils.Tensor(b"x", np.zeros(1)).name() == "x"
    pb_utils.Logger.log_info(b"a line")
    with pytest.raises(TypeError, match="str or bytes"):
        pb_utils.Logger.log_info(3)


def test_arguments_of_a_wrong_type_are_rejected_even_if_empty(pb_utils: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="Expect dict, got <class 'list'>"):
        pb_utils.InferenceResponse(parameters=[])
    for level in (None, 1):
        with pytest.raises(TypeError, match="level"):
            pb_utils.Logger.log("text", level)


def test_metrics_reject_operations_that_their_kind_does_not_support(pb_utils: Any) -> None:
    counter = pb_utils.MetricFamily("c", "", pb_utils.MetricFamily.COUNTER)
    histogram = pb_utils.MetricFamily("h", "", pb_utils.MetricFamily.HISTOGRAM)
    gauge = pb_utils.MetricFamily("g", "", pb_utils.MetricFamily.GAUGE)
    wrong = pb_utils.TritonModelException

    with pytest.raises(wrong, match=r"Failed to increment metric value: .*non-negative"):
        counter.Metric().increment(-1)
    with pytest.raises(
        wrong, match="Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Set"
    ):
        counter.Metric().set(1)
    with pytest.raises(wrong, match="KIND_HISTOGRAM does not support Value"):
        histogram.Metric(buckets=[1, 2]).value()
    with pytest.raises(wrong, match="KIND_GAUGE does not support Observe"):
        gauge.Metric().observe(1)
    with pytest.raises(wrong, match="a histogram requires buckets"):
        histogram.Metric()
    with pytest.raises(wrong, match="ascending"):
        histogram.Metric(labels={"a": "b"}, buckets=[2, 1])
    with pytest.raises(wrong, match="invalid label"):
        gauge.Metric({"a": 1})
    with pytest.raises(wrong, match="invalid metric name 'a b'"):
        pb_utils.MetricFamily("a b", "", pb_utils.MetricFamily.GAUGE)
    histogram.Metric({"empty": ""}, buckets=[])
    assert gauge.Metric({"a": "1"}) is gauge.Metric({"a": "1"})


def test_metric_families_of_the_same_name_share_their_state(pb_utils: Any) -> None:
    first = pb_utils.MetricFamily("same", "one", pb_utils.MetricFamily.COUNTER)
    second = pb_utils.MetricFamily("same", "two", pb_utils.MetricFamily.COUNTER)
    metric = first.Metric({"a": "b"})
    del first
    metric.increment(7.5)

    assert second.Metric({"a": "b"}).value() == 7.5
    with pytest.raises(pb_utils.TritonModelException, match="'same' already exists as a counter, not as a gauge"):
        pb_utils.MetricFamily("same", "one", pb_utils.MetricFamily.GAUGE)


def test_a_metric_is_unusable_after_its_family_is_deleted(pb_utils: Any) -> None:
    family = pb_utils.MetricFamily(name="g", description="", kind=pb_utils.MetricFamily.GAUGE)
    metric = family.Metric(labels={})
    del family

    with pytest.raises(pb_utils.TritonModelException, match="the corresponding 'MetricFamily' has been deleted"):
        metric.set(1)


def config(**known: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": []} | known))


def test_setters_add_to_the_configuration() -> None:
    known = config(input=[{"name": "a", "data_type": "TYPE_INVALID", "dims": []}])

    known.add_input({"name": "a", "data_type": "TYPE_INT8", "dims": [2]})
    known.add_output({"name": "b", "data_type": "TYPE_INT8", "dims": [2]})
    known.set_max_batch_size(3)
    known.set_dynamic_batching()
    known.set_model_transaction_policy({"decoupled": True})

    assert known.as_dict() == {
        "name": "m", "max_batch_size": 3, "input": [{"name": "a", "data_type": "TYPE_INT8", "dims": [2]}],
        "output": [{"name": "b", "data_type": "TYPE_INT8", "dims": [2]}], "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }  # fmt: skip


IN = {"name": "a", "data_type": "TYPE_INT8", "dims": [2]}


@pytest.mark.parametrize(
    ("known", "do", "text"),
    [
        ({"max_batch_size": 4}, lambda c: c.set_max_batch_size(2), "configuration specified max_batch_size 4, but in"),
        ({"sequence_batching": {}}, lambda c: c.set_dynamic_batching(), "scheduling_choice as 'sequence_batching'"),
        ({}, lambda c: c.add_input({"data_type": "TYPE_INT8"}), "input in auto-complete-config .* missing 'name'"),
        ({}, lambda c: c.add_input({"name": "a", "dims": [1]}), "input 'a' .* is missing 'data_type' property."),
        ({}, lambda c: c.add_output({"name": "a", "data_type": "TYPE_INT8"}), "output 'a' .* is missing 'dims'"),
        ({}, lambda c: c.add_output({**IN, "optional": True}), "contains property other than 'name', 'data_type' and"),
        ({"input": [IN]}, lambda c: c.add_input({**IN, "dims": [3]}), r"expects dims \[3\] but .* dims \[2\]"),
        ({"output": [IN]}, lambda c: c.add_output({**IN, "data_type": "TYPE_BOOL"}), "expects datatype TYPE_INT8"),
        (
            {"input": [{**IN, "optional": False}]},
            lambda c: c.add_input({**IN, "optional": True}),
            "expects optional True but the model configuration specifies optional False",
        ),
        ({}, lambda c: c.set_model_transaction_policy({"x": 1}), "contains property other than 'decoupled'."),
        (
            {"model_transaction_policy": {"decoupled": False}},
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
            "trying to change decoupled property .* already set to 'False'",
        ),
    ],
)
def test_setters_cannot_contradict_the_configuration(known: dict[str, Any], do: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        do(config(**known))


def test_configuration_lookups(pb_utils: Any) -> None:
    model = {"input": [IN], "output": [], "model_transaction_policy": {"decoupled": True}}

    assert pb_utils.get_input_config_by_name(model, "a") == IN
    assert pb_utils.get_input_config_by_name(model, "b") is None
    assert pb_utils.get_output_config_by_name({}, "a") is None
    assert pb_utils.using_decoupled_model_transaction_policy(model)
    assert not pb_utils.using_decoupled_model_transaction_policy({})
    assert pb_utils.get_model_dir() == "/models/m/1"


def test_every_public_name_is_documented(pb_utils: Any) -> None:
    text = (Path(__file__).parents[3] / "docs" / "python-models.md").read_text("utf-8")
    names = {name for name in vars(pb_utils) if not name.startswith("__")}

    assert {name for name in names if not re.search(rf"\| .*`{name}[`(.]", text)} == set()


@pytest.mark.slow
def test_a_worker_requires_only_numpy_and_python_3_10() -> None:
    folders = [f"{each.__name__.split('.')[1]}={next(iter(each.__path__))}" for each in _packages()]
    program = f"""
import ast
import sys

class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "penstock"):
            raise ImportError(name)

import asyncio, contextlib, datetime, hashlib
sys.stdlib_module_names -= {{"tomllib"}}  # of 3.11, as what follows
del asyncio.Runner, asyncio.TaskGroup, asyncio.timeout, contextlib.chdir, datetime.UTC, hashlib.file_digest
sys.path.insert(0, {str(next(iter(penstock.server.__path__)))!r} + "/workers")
import child
sys.meta_path.insert(0, Only())
child.make_importable({folders!r})
import penstock.server.python_models.inside.service, penstock.server.workers.service
for name, module in list(sys.modules.items()):
    if name.startswith("penstock.") and module.__file__:
        with open(module.__file__, encoding="utf-8") as file:
            text = file.read()
        ast.parse(text, feature_version=(3, 10))
        assert "StrEnum" not in text and "import Self" not in text, name
print("whole")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=False)

    assert (ended.stdout, ended.stderr) == ("whole\n", "")


def _packages() -> list[Any]:
    return [penstock.server, penstock.batching, penstock.backends]
