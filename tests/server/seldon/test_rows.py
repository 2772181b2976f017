"""Rows: how requests of the v2 protocol run in a worker, and how their results are returned."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.server.seldon.inside.arrays import array_of, tensors_of
from penstock.server.seldon.inside.service import SeldonInside
from penstock.server.seldon.messages import APART, CALL, NEVER, TENSORS, TOGETHER, Endpoint, PayloadKind, read_answer
from penstock.server.seldon.tensors import DEFAULT, signature_of

OUTPUT = [["output", ""]]


def component(predict: Callable[[Any, Any], Any], **more: Any) -> Any:
    """Make a component of one function."""
    return type("Made", (), {"predict": lambda _, rows, names: predict(rows, names), **more})()


class Noting:
    """A predict that records its arguments, and returns the rows or `result`."""

    def __init__(self, result: Any = None) -> None:
        self.calls: list[Any] = []
        self._result = result

    def __call__(self, rows: Any, names: Any) -> Any:
        self.calls.append((rows, names))
        return rows if self._result is None else self._result


def call_rows(
    user: Any, arrays: Sequence[Any], rows: Sequence[int] = (1,), inputs: Sequence[Any] = (["input", "FP64"],),
    outputs: Sequence[Any] = tuple(OUTPUT),
) -> tuple[int, list[Any], list[Any]]:  # fmt: skip
    """Have it answer a TENSORS message. Returns: the outcome, the result of each request, and the tensors."""
    body = json.dumps({"inputs": inputs, "outputs": outputs, "rows": rows}).encode()
    reply, sent = SeldonInside(user, {"strict": True}).call(TENSORS, 1, body, list(arrays))
    return reply[0], json.loads(reply[1:] or b"[]"), list(sent or ())


def test_predict_receives_a_single_input_as_an_array() -> None:
    predict = Noting()

    outcome, answers, sent = call_rows(component(predict), [np.ones((2, 3))])

    assert (outcome, answers) == (TOGETHER, [{"outputs": [0]}])
    assert sent[0].tolist() == [[1.0] * 3] * 2
    assert (predict.calls[0][0].shape, predict.calls[0][1]) == ((2, 3), [])


def test_predict_receives_several_inputs_as_a_list_with_their_names() -> None:
    predict = Noting([1.0])
    arrays = [np.ones((1, 2)), np.zeros((1, 3))]

    call_rows(component(predict), arrays, inputs=(["a", "FP64"], ["b", "FP64"]))

    assert [each.shape for each in predict.calls[0][0]] == [(1, 2), (1, 3)]
    assert predict.calls[0][1] == ["a", "b"]


def test_several_requests_run_in_one_call_and_each_gets_its_own_rows() -> None:
    predict = Noting()

    outcome, answers, sent = call_rows(
        component(predict), [np.full((rows, 2), rows) for rows in (1, 3, 2)], rows=(1, 3, 2)
    )

    assert (outcome, [len(rows) for rows, _ in predict.calls]) == (TOGETHER, [6])
    assert [tensor[:, 0].tolist() for tensor in sent] == [[1], [3, 3, 3], [2, 2]]
    assert answers == [{"outputs": [0]}] * 3


@pytest.mark.parametrize(
    "predict", [lambda rows, _: rows[:1], lambda rows, _: 1 / 0, lambda rows, _: {"a": 1}, lambda rows, _: sys.exit(3)]
)
def test_a_failed_batch_reports_that_its_requests_must_run_apart(predict: Any) -> None:
    outcome, _, sent = call_rows(component(predict), [np.ones((1, 2)), np.ones((1, 2))], rows=(1, 1))

    assert (outcome, sent) == (APART, [])


def test_a_component_that_returns_tags_for_a_batch_is_never_batched_again() -> None:
    from seldon_core.user_model import SeldonResponse

    user = component(lambda rows, _: SeldonResponse(rows, tags={"a": 1}))

    assert call_rows(user, [np.ones((1, 2)), np.ones((1, 2))], rows=(1, 1))[0] == NEVER
    assert call_rows(user, [np.ones((1, 2))])[1] == [{"outputs": [0], "parameters": {"a": 1}}]


def test_tags_become_parameters_and_metrics_are_returned() -> None:
    metric = {"type": "GAUGE", "key": "g", "value": 2}
    user = component(lambda rows, _: rows, tags=lambda _: {"a": [1], "b": "x"}, metrics=lambda _: [metric])

    _, answers, _ = call_rows(user, [np.ones((1, 2))])

    assert answers[0]["parameters"] == {"a": "[1]", "b": "x"}
    assert json.loads(answers[0]["metrics"]) == [["g", "GAUGE", 2, None]]


def test_metrics_of_a_failed_request_are_not_counted_for_the_next_request() -> None:
    from seldon_core.user_model import SeldonResponse

    counted = [{"type": "GAUGE", "key": "g", "value": 2}]
    user = component(lambda rows, _: SeldonResponse(rows, metrics=counted), metrics=lambda _: 1 / 0)
    service = SeldonInside(user, {})
    head = json.dumps({"inputs": [["input", "FP64"]], "outputs": OUTPUT, "rows": [1]}).encode()

    reply, _ = service.call(TENSORS, 1, head, [np.ones((1, 2))])
    del type(user).predict
    following, _ = service.call(CALL, 2, bytes((Endpoint.HEALTH, PayloadKind.JSON)), [])

    assert json.loads(reply[1:])[0]["message"] == "division by zero"
    assert read_answer(following)[1] == b""


def test_an_exceptions_own_text_is_in_the_error() -> None:
    from seldon_core.flask_utils import SeldonMicroserviceException

    def raises(error: Exception) -> Any:
        def predict(rows: Any, names: Any) -> Any:
            raise error

        return call_rows(component(predict), [np.ones((1, 2))])[1][0]

    assert raises(ValueError("no")) == {"code": "INTERNAL", "message": "no"}
    assert raises(SeldonMicroserviceException("mine", status_code=403, reason="R")) == {
        "code": "INVALID", "message": "mine",
    }  # fmt: skip
    assert raises(SeldonMicroserviceException("ours", status_code=500))["code"] == "INTERNAL"


def test_a_result_that_is_not_a_tensor_is_rejected_with_seldon_cores_text() -> None:
    _, answers, _ = call_rows(component(lambda rows, _: None), [np.ones((1, 2))])

    assert answers[0]["message"] == "Unknown data type returned as payload (must be list or np array):None"


def test_a_component_with_only_predict_raw_is_called_with_a_message() -> None:
    user = type("Raw", (), {"predict_raw": lambda _, message: {"data": {"ndarray": message["data"]["ndarray"]}}})()

    _, answers, sent = call_rows(user, [np.ones((1, 2))])

    assert (answers, sent[0].tolist()) == ([{"outputs": [0]}], [[1.0, 1.0]])


def test_bytes_tensors_are_passed_as_text_when_their_elements_are_utf8() -> None:
    strings = np.array([[b"a", "é".encode()]], object)

    assert array_of(strings, "BYTES").tolist() == [["a", "é"]]
    assert array_of(strings, "BYTES").dtype.kind == "U"
    assert array_of(np.array([b"\xff"], object), "BYTES").tolist() == [b"\xff"]
    assert array_of(np.array([b"a\0"], object), "BYTES").tolist() == [b"a\0"]
    assert array_of(np.empty((0, 2), object), "BYTES").shape == (0, 2)


@pytest.mark.parametrize(
    ("result", "datatype", "expected"),
    [
        (np.array([1.5], np.float32), "FP64", np.array([1.5], np.float64)),
        (np.array([1.5]), "FP32", np.array([1.5], np.float32)),
        (np.array([1, 2]), "FP32", np.array([1, 2], np.float32)),
        (np.array([1.5]), "INT64", np.array([1.5])),
        (np.array([1, 2]), "", np.array([1, 2])),
        (np.array([True]), "", np.array([True])),
        ([[1.0, 2.0]], "", np.array([[1.0, 2.0]])),
        (2.5, "", np.array([2.5])),
        (np.array([1], ">i4"), "", np.array([1], "<i4")),
        ("text", "", np.array([b"text"], object)),
        (b"\xff", "", np.array([b"\xff"], object)),
        (np.array(["a", "bc"]), "FP64", np.array([b"a", b"bc"], object)),
        ({"a": 1}, "", np.array([b'{"a": 1}'], object)),
    ],
)
def test_results_are_converted_to_the_declared_datatype_if_the_conversion_is_safe(
    result: Any, datatype: str, expected: Any
) -> None:
    positions, (tensor,) = tensors_of(result, [("output", datatype)])

    assert positions == [0]
    assert (tensor.dtype, tensor.shape, tensor.tolist()) == (expected.dtype, expected.shape, expected.tolist())


def test_several_outputs_are_matched_by_name_or_by_order() -> None:
    outputs = [("a", "FP64"), ("b", "")]

    positions, tensors = tensors_of({"b": [1], "a": [2]}, outputs)
    assert (positions, [tensor.tolist() for tensor in tensors]) == ([1, 0], [[1], [2.0]])
    assert tensors_of((np.array([1.0]), [2]), outputs)[0] == [0, 1]
    assert tensors_of(np.array([[1.0], [2.0]]), outputs)[0] == [0]


def test_the_signature_uses_only_metadata_in_the_v2_format() -> None:
    metadata = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}], "outputs": [{"messagetype": "strData"}]}

    signature = signature_of(metadata, batched=False)

    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [("x", "FP32", (-1, 4))]
    assert signature.outputs == (DEFAULT["output"],)
    assert signature_of(None, batched=True).inputs == (DEFAULT["input"],)


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ({}, (-1, -1)),
        ({"shape": []}, (-1,)),
        ({"shape": [1]}, (-1,)),
        ({"shape": [5, -1]}, (-1, -1)),
        ({"shape": [5, -3]}, (-1, -1)),
        ({"shape": [1.0, 4.0]}, (-1, 4)),
    ],
)
def test_the_first_axis_of_the_signature_is_free(tensor: dict[str, Any], shape: tuple[int, ...]) -> None:
    (spec,) = signature_of({"inputs": [{"datatype": "BYTES", **tensor}]}, batched=False).inputs

    assert (spec.name, spec.shape) == ("input", shape)
    assert {type(dim) for dim in spec.shape} == {int}
