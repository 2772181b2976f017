"""Decoding ModelInferRequest in full."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.server.v2.call_parameters import BINARY, DEFAULT_OPTIONS, Classes, PerOutputPlan
from penstock.server.v2.rpc.decode import decode
from tests.fakes import NoSink, fake_model
from tests.server.v2.held_engine import ROW
from tests.server.v2.rpc.calls import pb, request

CONTENTS: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-32768, 32767]),
    "INT32": ("int_contents", [-(2**31), 2**31 - 1]),
    "INT64": ("int64_contents", [-(2**63), 2**63 - 1]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 2**32 - 1]),
    "UINT64": ("uint64_contents", [0, 2**64 - 1]),
    "FP32": ("fp32_contents", [0.5, float("inf")]),
    "FP64": ("fp64_contents", [0.1, -1e300]),
    "BYTES": ("bytes_contents", [b"", b"\xff\0x"]),
}
AREA = (TensorSpec("y", "FP32", (-1, 4)),)


def model_of(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = AREA) -> Model:
    return fake_model(signature=Signature(inputs, outputs, batched=True))


def decoded(message: Any, model: Model | None = None) -> list[Array | None]:
    return decode(model or fake_model(), message, NoSink(), None)[0].inputs


def refused(message: Any, model: Model | None = None) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        decoded(message, model)
    return caught.value.code, caught.value.message


def typed(datatype: str, contents: dict[str, Any], shape: tuple[int, ...] = (1, 2)) -> Any:
    return pb.ModelInferRequest(
        model_name="m", inputs=[{"name": "x", "datatype": datatype, "shape": shape, "contents": contents}]
    )


@pytest.mark.parametrize("datatype", CONTENTS)
def test_typed_contents_of_every_datatype_are_decoded(datatype: str) -> None:
    field, values = CONTENTS[datatype]
    model = model_of(TensorSpec("x", datatype, (-1, 2)))

    (array,) = decoded(typed(datatype, {field: values}), model)
    assert array is not None
    assert array.dtype == model.signature.inputs[0].type.dtype
    assert array.tolist() == [values]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (typed("INT8", {"int_contents": [1, 128]}), "a value of input 'x' is out of range for INT8"),
        (typed("UINT16", {"uint_contents": [65536, 1]}), "a value of input 'x' is out of range for UINT16"),
        (typed("INT8", {"int_contents": [1]}), "size mismatch for input 'x' for model 'm'. Expected 2, got 1"),
        (typed("INT8", {"fp32_contents": [1, 2]}), "in 'fp32_contents', expected datatype 'INT8'"),
        (typed("INT8", {"int_contents": [1, 2], "fp32_contents": [1]}), "in 'fp32_contents', expected datatype 'INT8'"),
        (typed("FP16", {"fp32_contents": [1, 2]}), "in 'fp32_contents', expected datatype 'FP16'"),
        (typed("BF16", {}), "input byte size mismatch"),
        (typed("BYTES", {"bytes_contents": [b"a"]}), "expected 2 strings for inference input 'x' for model 'm', got 1"),
        (typed("INT8", {"int_contents": [1, 2]}, (2, -1)), "must be >= 0"),
        (
            typed("INT8", {"int_contents": [1, 2]}, (2**62, 4)),
            f"shape [{2**62},4] of input 'x' causes total element count to exceed maximum size of {2**63 - 1}",
        ),
        (typed("INT32", {"int_contents": [1, 2]}, (2**31, 2**31)), "byte size overflow for input 'x', its shape is ["),
        (typed("INT8", {"int_contents": [1, 2]}, (1,) * 33), "33 dims"),
        (typed("INT8", {"int_contents": [1, 2]}, (2, 1)), "unexpected shape for input 'x' for model 'm'."),
    ],
)  # fmt: skip
def test_typed_contents_that_do_not_fit_are_rejected(message: Any, text: str) -> None:
    model = model_of(TensorSpec("x", message.inputs[0].datatype, (-1, 2)))

    code, error = refused(message, model)
    assert code is Code.INVALID
    assert error.startswith("[request id: <id_unknown>] ")
    assert text in error


def test_typed_contents_beside_raw_data_are_rejected() -> None:
    message = request()
    message.inputs[0].contents.fp32_contents.extend([1, 2, 3, 4])

    assert "contents field must not be specified when using raw_input_contents for 'x'" in refused(message)[1]


def test_raw_data_is_assigned_to_the_inputs_in_the_order_of_the_request() -> None:
    model = model_of(TensorSpec("a", "FP32", (-1, 4)), TensorSpec("b", "INT8", (-1, 2)))
    message = request(np.array([[1, 2]], np.int8), "b", "INT8")
    message.inputs.add(name="a", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(ROW.tobytes())

    first, second = decoded(message, model)
    assert first is not None
    assert second is not None
    assert (first.tolist(), second.tolist()) == (ROW.tolist(), [[1, 2]])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.raw_input_contents.pop(), "unable to find data for input tensor 'x' for model 'm' in request."),
        (lambda m: m.raw_input_contents.append(b""), "unexpected additional input data for model 'm'"),
        (lambda m: m.inputs.append(m.inputs[0]), "input 'x' already exists in request"),
        (lambda m: m.inputs.pop(), "unexpected additional input data for model 'm'"),
        (lambda m: (m.inputs.pop(), m.raw_input_contents.pop()), "but missing required input(s) ['x']"),
        (lambda m: m.outputs.add(name="q"), "unexpected inference output 'q' for model 'm'"),
        (lambda m: m.outputs.extend(2 * [m.InferRequestedOutputTensor(name="y")]), "Duplicate output name 'y'"),
        (lambda m: m.parameters["priority"].MergeFrom(param(string_param="1")), "int64_param or uint64_param."),
        (lambda m: m.parameters["priority"].MergeFrom(param(int64_param=-1)), "'priority', expected value >= 0."),
        (lambda m: m.parameters["timeout"].MergeFrom(param(uint64_param=1)), "expected int64_param."),
        (lambda m: m.parameters["sequence_id"].MergeFrom(param(bool_param=True)), "int64_param or string_param."),
        (lambda m: m.parameters["sequence_start"].MergeFrom(param(int64_param=1)), "expected bool_param."),
        (lambda m: m.parameters["mine"].MergeFrom(param(uint64_param=1)), "invalid value type for 'mine' parameter"),
        (lambda m: m.parameters["mine"].MergeFrom(param()), "invalid value type for 'mine' parameter"),
        (lambda m: m.parameters["triton_x"].MergeFrom(param(int64_param=1)), "are reserved for Triton usage"),
        (lambda m: m.parameters["binary_data_output"].MergeFrom(param(bool_param=True)), "is reserved for Triton"),
        (lambda m: m.parameters["headers"].MergeFrom(param(bool_param=True)), "is reserved for Triton usage"),
        (lambda m: m.parameters["hooks"].MergeFrom(param(int64_param=1)), "Unable to parse 'hooks'"),
        (lambda m: place(m.inputs[0], shared_memory_region=param(int64_param=1)), "'x', expected string_param."),
        (lambda m: place(m.inputs[0], shared_memory_offset=param(int64_param=1)), "can not be specified without"),
        (lambda m: place(m.outputs.add(name="y"), classification=param(string_param="3")), "expected int64_param."),
        (lambda m: place(m.outputs.add(name="y"), classification=param(int64_param=-1)), "Unable to set"),
    ],
)  # fmt: skip
def test_an_invalid_message_is_rejected(change: Any, text: str) -> None:
    message = request()
    change(message)

    code, error = refused(message)
    assert code is Code.INVALID
    assert text in error


def test_shared_memory_is_unsupported_without_regions() -> None:
    message = request()
    place(
        message.inputs[0], shared_memory_region=param(string_param="r"), shared_memory_byte_size=param(int64_param=16)
    )

    assert refused(message)[0] is Code.UNSUPPORTED


def test_parameters_and_outputs_become_options() -> None:
    message = request(
        id="i", outputs=[{"name": "y"}],
        parameters={
            "timeout": {"int64_param": 7}, "priority": {"uint64_param": 1}, "hooks": {"bool_param": False},
            "sequence_id": {"string_param": "s"}, "mine": {"double_param": 0.5},
        },
    )  # fmt: skip
    found, options = decode(fake_model(), message, NoSink(), None)

    assert (found.id, found.output_positions, found.rows) == ("i", (0,), 1)
    assert (options.timeout_us, options.hooks, options.parameters) == (7, False, {"mine": 0.5})
    assert decode(fake_model(), request(), NoSink(), None)[1] is DEFAULT_OPTIONS


def test_a_classification_parameter_becomes_a_plan() -> None:
    message = request()
    place(message.outputs.add(name="y"), classification=param(int64_param=2))

    plan = decode(fake_model(), message, NoSink(), None)[1].plan
    assert isinstance(plan, PerOutputPlan)
    assert plan.modes == (Classes(2, not BINARY),)


def param(**members: Any) -> Any:
    return pb.InferParameter(**members)


def place(tensor: Any, **parameters: Any) -> None:
    for key, value in parameters.items():
        tensor.parameters[key].CopyFrom(value)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1 << 14,), "unexpected shape for input 'x' for model 'm'. Expected [-1,2], got [16384]"),
        ((1 << 14, 1), "unexpected shape for input 'x'"),
        ((1 << 14, 2), "inference request batch-size must be <= "),
    ],
)
def test_strings_of_a_tensor_whose_shape_does_not_fit_are_not_parsed(shape: tuple[int, ...], text: str) -> None:
    model = model_of(TensorSpec("x", "BYTES", (-1, 2)))
    message = typed("BYTES", {}, shape)
    message.inputs[0].ClearField("contents")
    message.raw_input_contents.append(b"no length")

    assert text in refused(message, model)[1]
