"""Calls with a message of seldon.protos: what the component receives, and how its result is answered."""

from __future__ import annotations

import json
import logging
from typing import Any, NamedTuple

import numpy as np
import pytest
from google.protobuf import json_format, struct_pb2
from google.protobuf.any_pb2 import Any as AnyMessage

from penstock.server.seldon.inside import protobuf
from penstock.server.seldon.inside.component import Component
from penstock.server.seldon.inside.proto_bytes import pb
from penstock.server.seldon.inside.seldon_core_classes import (
    SeldonComponent,
    SeldonMicroserviceException,
    SeldonNotImplementedError,
    SeldonResponse,
)
from penstock.server.seldon.messages import Endpoint, read_answer

CALLING = "Exception calling application: "
OK, UNKNOWN, INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, UNIMPLEMENTED, INTERNAL = 0, 2, 3, 5, 7, 12, 13


class Answer(NamedTuple):
    """A decoded reply."""

    status: int
    body: bytes
    metrics: list[Any]

    @property
    def message(self) -> Any:
        assert self.status == OK, self.body
        return pb.SeldonMessage.FromString(self.body)

    @property
    def decoded(self) -> Any:
        return json_format.MessageToDict(self.message)

    @property
    def error(self) -> tuple[int, str]:
        return self.status, self.body.decode()


def ask(user: Any, message: Any, endpoint: Endpoint = Endpoint.PREDICT, *, strict: bool = True) -> Answer:
    payload = message if isinstance(message, bytes) else message.SerializeToString()
    status, metrics, lines, body = read_answer(protobuf.answer(Component(user, strict=strict), endpoint, payload))
    assert not lines
    return Answer(status, body, json.loads(metrics or b"[]"))


def message(**members: Any) -> Any:
    return json_format.ParseDict(members, pb.SeldonMessage())


def tensor(*values: float, **meta: Any) -> Any:
    members: dict[str, Any] = {"data": {"names": ["a"], "tensor": {"shape": [1, len(values)], "values": [*values]}}}
    return message(**members, **({"meta": meta} if meta else {}))


def giving(result: Any, **methods: Any) -> Any:
    """Make a component whose predict returns this."""
    members = {"predict": lambda self, x, names: result} | methods
    return type("Giving", (), members)()


class Ident:
    """Keeps the arguments of its last call."""

    received: tuple[Any, ...] = ()

    def predict(self, x: Any, names: Any, meta: Any = None) -> Any:
        self.received = (x, names, meta)
        return x


# -- what a component receives ---------------------------------------------------------------------------------


def test_predict_receives_a_tensor_as_float64_with_its_names_and_empty_meta() -> None:
    user = Ident()
    answer = ask(user, tensor(1, 2))
    values, names, meta = user.received
    assert (values.dtype, values.tolist(), list(names), meta) == (np.float64, [[1, 2]], ["a"], {})
    assert answer.decoded == {
        "meta": {}, "data": {"names": ["t:0", "t:1"], "tensor": {"shape": [1, 2], "values": [1.0, 2.0]}},
    }  # fmt: skip


@pytest.mark.parametrize(("members", "received"), [
    ({"strData": "x"}, "x"), ({"binData": "MTIz"}, b"123"), ({"jsonData": {"a": [1, None]}}, {"a": [1.0, None]}),
    ({"jsonData": 3}, 3.0),
], ids=str)  # fmt: skip
def test_predict_receives_texts_bytes_and_json_as_python_values(members: dict[str, Any], received: Any) -> None:
    user = Ident()
    ask(user, message(**members))
    assert (user.received[0], list(user.received[1])) == (received, [])


def test_predict_receives_meta_as_a_dict_and_the_answer_repeats_meta_without_routing() -> None:
    user = Ident()
    meta = {
        "puid": "p", "tags": {"a": 1.0}, "routing": {"r": 1}, "requestPath": {"x": "y"},
        "metrics": [{"key": "k", "value": 0.5}],
    }  # fmt: skip
    answer = ask(user, tensor(1, **meta))
    assert user.received[2] == meta
    assert answer.decoded["meta"] == {
        "puid": "p", "tags": {"a": 1.0}, "requestPath": {"x": "y"}, "metrics": [{"key": "k", "value": 0.5}],
    }  # fmt: skip
    assert answer.metrics == []


def test_custom_data_is_returned_unchanged() -> None:
    class Custom:
        def predict(self, x: Any, names: Any) -> Any:
            assert isinstance(x, AnyMessage)
            return x

    request = pb.SeldonMessage()
    request.customData.Pack(struct_pb2.Value(number_value=1))
    assert ask(Custom(), request).message.customData == request.customData


def test_missing_methods_are_answered_as_in_seldon_core() -> None:
    assert ask(object(), tensor(1)).decoded == {"meta": {}, "data": {"tensor": {"shape": [0]}}}
    for endpoint in (Endpoint.TRANSFORM_INPUT, Endpoint.TRANSFORM_OUTPUT):
        assert ask(SeldonComponent(), tensor(1), endpoint).decoded["data"]["names"] == ["t:0"]
        assert ask(object(), message(strData="x"), endpoint).decoded == {"meta": {}, "strData": "x"}
    assert ask(object(), tensor(1), Endpoint.ROUTE).error == (UNKNOWN, CALLING)


def test_a_route_is_returned_as_a_tensor_without_the_requests_tags() -> None:
    user = type("Router", (), {"route": lambda self, x, names: 1})()
    answer = ask(user, tensor(1, puid="p", tags={"a": 1}), Endpoint.ROUTE)
    assert answer.decoded == {
        "meta": {"puid": "p"}, "data": {"names": ["t:0"], "tensor": {"shape": [1, 1], "values": [1.0]}},
    }  # fmt: skip


def test_aggregate_combines_the_data_and_meta_of_its_messages() -> None:
    class Mean:
        def aggregate(self, features: Any, names: Any) -> Any:
            self.names = [list(each) for each in names]
            return (features[0] + features[1]) / 2

    user = Mean()
    first = tensor(1, 2, puid="p", tags={"a": 1}, metrics=[{"key": "k", "value": 1}])
    second = message(data={"ndarray": [[3, 5]]}, meta={"tags": {"a": 2, "b": 3}})
    answer = ask(user, pb.SeldonMessageList(seldonMessages=[first, second]), Endpoint.AGGREGATE)
    assert user.names == [["a"], []]
    assert answer.decoded == {
        "meta": {"puid": "p", "tags": {"a": 2.0, "b": 3.0}, "metrics": [{"key": "k", "value": 1.0}]},
        "data": {"names": ["t:0", "t:1"], "tensor": {"shape": [1, 2], "values": [2.0, 3.5]}},
    }
    user = type("Any", (), {"aggregate": lambda self, x, names: 1})()
    assert ask(user, b"", Endpoint.AGGREGATE).error == (UNKNOWN, f"{CALLING}list index (0) out of range")


def test_methods_receive_names_as_lists() -> None:
    class Noting:
        def __init__(self) -> None:
            self.kinds: list[type] = []

        def predict(self, x: Any, names: Any) -> Any:
            self.kinds.append(type(names))
            return x

        def aggregate(self, features: Any, names: Any) -> Any:
            self.kinds += [type(each) for each in names]
            return features[0]

        def send_feedback(self, x: Any, names: Any, *_: Any, routing: Any) -> Any:
            self.kinds.append(type(names))

    user = Noting()
    ask(user, tensor(1))
    ask(user, pb.SeldonMessageList(seldonMessages=[tensor(1), message(data={"ndarray": [[1]]})]), Endpoint.AGGREGATE)
    ask(user, pb.Feedback(request=tensor(1)), Endpoint.FEEDBACK)
    assert user.kinds == [list] * 4


# -- results ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("result", "expected"), [
    ("é", {"strData": "é"}), (b"123", {"binData": "MTIz"}), ({"a": [1, None]}, {"jsonData": {"a": [1.0, None]}}),
    ([[1]], {"data": {"names": ["t:0"], "tensor": {"shape": [1, 1], "values": [1.0]}}}),
    ([["a"]], {"data": {"names": ["t:0"], "ndarray": [["a"]]}}),
    (np.array([True]), {"data": {"ndarray": [True]}}),
    (np.array([5], "timedelta64[ns]"), {"data": {"tensor": {"shape": [1], "values": [5.0]}}}),
    (np.ma.masked_array([1.0, 2.0], [True, False]), {"data": {"tensor": {"shape": [2], "values": [1.0, 2.0]}}}),
], ids=str)  # fmt: skip
def test_results_are_returned_in_the_field_for_their_type(result: Any, expected: dict[str, Any]) -> None:
    assert ask(giving(result), tensor(1)).decoded == {"meta": {}, **expected}


@pytest.mark.parametrize(("members", "kind"), [
    ({"data": {"ndarray": [1]}}, "ndarray"), ({"data": {"tensor": {"shape": [1], "values": [1]}}}, "tensor"),
    ({"data": {}}, "ndarray"), ({"data": {"tftensor": {"dtype": "DT_FLOAT", "floatVal": [1]}}}, "tftensor"),
    ({"strData": "x"}, "tensor"),
], ids=str)  # fmt: skip
def test_numbers_are_returned_in_the_encoding_of_the_request(members: dict[str, Any], kind: str) -> None:
    assert ask(giving(np.ones((1, 2))), message(**members)).message.data.WhichOneof("data_oneof") == kind


@pytest.mark.parametrize(("result", "text"), [
    (1.5, 'can only concatenate str (not "float") to str'),
    (None, 'can only concatenate str (not "NoneType") to str'),
    (bytearray(b"1"), "bytearray(b'1') has type bytearray, but expected one of: bytes"),
    ({"a": np.int64(1)}, "Value 1 has unexpected type <class 'numpy.int64'> at Value.a"),
], ids=str)  # fmt: skip
def test_unsupported_results_fail_with_seldon_cores_error(result: Any, text: str) -> None:
    assert ask(giving(result), tensor(1)).error == (UNKNOWN, CALLING + text)


def test_tags_metrics_and_class_names_are_in_the_answer() -> None:
    user = giving(
        SeldonResponse(np.ones((1, 1)), tags={"b": 2}, metrics=[{"type": "GAUGE", "key": "g", "value": 3}]),
        tags=lambda self: {"a": "x", "b": 1},
        metrics=lambda self: [{"type": "COUNTER", "key": "c", "value": 1}],
        class_names=lambda self: ["only"],
    )
    answer = ask(user, tensor(1))
    assert answer.decoded["meta"] == {
        "tags": {"a": "x", "b": 2.0},
        "metrics": [{"key": "c", "value": 1.0}, {"key": "g", "type": "GAUGE", "value": 3.0}],
    }
    assert answer.decoded["data"]["names"] == ["only"]
    assert answer.metrics == [["g", "GAUGE", 3, None], ["c", "COUNTER", 1, None]]


def test_the_request_path_is_in_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREDICTIVE_UNIT_ID", "classifier")
    monkeypatch.setenv("PREDICTIVE_UNIT_IMAGE", "org/img:0.3")
    assert ask(Ident(), tensor(1)).decoded["meta"] == {"requestPath": {"classifier": "org/img:0.3"}}


# -- methods that take messages --------------------------------------------------------------------------------


def test_a_raw_method_receives_and_returns_a_message() -> None:
    class Raw:
        def predict_raw(self, message: Any) -> Any:
            assert type(message) is pb.SeldonMessage
            message.meta.metrics.add(key="k", value=2)
            return message

    answer = ask(Raw(), message(strData="x"))
    assert answer.decoded == {"strData": "x", "meta": {"metrics": [{"key": "k", "value": 2.0}]}}
    assert [row[:3] for row in answer.metrics] == [["k", "COUNTER", 2]]


def test_a_raw_method_that_is_not_implemented_falls_back_to_predict() -> None:
    class Raw(Ident):
        def predict_raw(self, message: Any) -> Any:
            raise SeldonNotImplementedError("not here")

    assert ask(Raw(), message(strData="x")).decoded == {"meta": {}, "strData": "x"}


@pytest.mark.parametrize("name", ["predict_grpc", "transform_input_grpc", "transform_input_rest"])
def test_legacy_methods_receive_and_return_the_message(name: str) -> None:
    user = type("Old", (), {name: lambda self, message: message})()
    endpoint = Endpoint.PREDICT if name == "predict_grpc" else Endpoint.TRANSFORM_INPUT
    assert ask(user, message(strData="x"), endpoint).decoded == {"strData": "x"}


def test_a_raw_or_legacy_result_that_is_not_a_message_is_an_error() -> None:
    user = type("Old", (), {"predict_grpc": lambda self, message: {"strData": "x"}})()
    assert ask(user, message(strData="x")).error == (INTERNAL, "Failed to serialize response!")
    raw = type("Raw", (), {"predict_raw": lambda self, message: {}})()
    assert ask(raw, message()).error == (UNKNOWN, f"{CALLING}'dict' object has no attribute 'meta'")


# -- feedback --------------------------------------------------------------------------------------------------

FEEDBACK = {
    "request": {"data": {"names": ["a", "b"], "ndarray": [[1, 2]]}, "meta": {"puid": "p"}},
    "response": {"meta": {"routing": {"0": 3}}, "data": {"ndarray": [[0.9]]}},
    "reward": 0.1, "truth": {"data": {"ndarray": [[1]]}},
}  # fmt: skip


class Fed:
    """Keeps the feedback it received."""

    def send_feedback(self, features: Any, names: Any, reward: Any, truth: Any, routing: Any = None) -> Any:
        self.received = (features.tolist(), list(names), reward, truth.tolist(), routing)


def test_send_feedback_receives_features_names_reward_truth_and_routing() -> None:
    user = Fed()
    answer = ask(user, json_format.ParseDict(FEEDBACK, pb.Feedback()), Endpoint.FEEDBACK)
    reward = 0.10000000149011612
    assert user.received == ([[1.0, 2.0]], ["a", "b"], reward, [[1.0]], 3)
    assert answer.decoded == {"meta": {"puid": "p"}, "data": {"ndarray": []}}
    assert answer.metrics == [
        ["seldon_api_model_feedback", "COUNTER", 1, None],
        ["seldon_api_model_feedback_reward", "COUNTER", reward, None],
    ]


@pytest.mark.parametrize("feedback", [{}, {"request": {"strData": "x"}}], ids=str)
def test_feedback_without_arrays_is_passed_as_empty_arrays(feedback: dict[str, Any]) -> None:
    user = Fed()
    answer = ask(user, json_format.ParseDict(feedback, pb.Feedback()), Endpoint.FEEDBACK)
    assert user.received == ([], [], 0.0, [], None)
    assert (answer.decoded, answer.metrics) == ({"meta": {}, "data": {"tensor": {"shape": [0]}}}, [])


def test_feedback_over_rest_is_parsed_into_a_message() -> None:
    feedback = protobuf.feedback_of(FEEDBACK)
    assert type(feedback) is pb.Feedback
    assert type(protobuf.feedback(Component(Fed()), feedback)) is pb.SeldonMessage
    with pytest.raises(SeldonMicroserviceException) as raised:
        protobuf.feedback_of({"other": 1})
    assert raised.value.message.startswith('Invalid JSON: Message type "seldon.protos.Feedback" has no field named')


def test_a_feedback_field_name_that_is_not_utf8_is_reported_as_invalid_json() -> None:
    with pytest.raises(SeldonMicroserviceException) as raised:
        protobuf.feedback_of({"\udc00": 1})
    assert raised.value.message.startswith("Invalid JSON: ")
    assert "surrogates not allowed" in raised.value.message


def test_an_exception_whose_text_cannot_be_read_gets_grpcios_message() -> None:
    class WithoutATextError(Exception):
        def __str__(self) -> str:
            raise ValueError

    for strict in (True, False):
        assert protobuf.grpc_error(WithoutATextError(), strict=strict) == (
            UNKNOWN, "Calling application raised unprintable Exception!",
        )  # fmt: skip


@pytest.mark.parametrize("name", ["send_feedback_rest", "send_feedback_grpc"])
def test_legacy_feedback_methods_return_json(name: str) -> None:
    received = []

    def method(self: Any, feedback: Any) -> Any:
        received.append(json.loads(feedback) if name.endswith("rest") else feedback)
        return {"strData": "thanks"}

    user = type("Old", (), {name: method})()
    feedback = json_format.ParseDict(FEEDBACK, pb.Feedback())
    assert ask(user, feedback, Endpoint.FEEDBACK).decoded == {"strData": "thanks"}
    assert received == [json_format.MessageToDict(feedback) if name.endswith("rest") else feedback]


# -- errors ----------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """A user's own exception, as in the documentation of Seldon's error handlers."""

    status_code = 404


def raising(error: Exception) -> Any:
    def predict(self: Any, x: Any, names: Any) -> Any:
        raise error

    return type("Raising", (), {"predict": predict})()


@pytest.mark.parametrize(("error", "strict", "mapped"), [
    (ValueError("bad"), "bad", (UNKNOWN, "bad")),
    (ValueError(), "", (UNKNOWN, "ValueError")),
    (SeldonMicroserviceException("no", status_code=403), "", (PERMISSION_DENIED, "no")),
    (SeldonMicroserviceException("no"), "", (INVALID_ARGUMENT, "no")),
    (SeldonMicroserviceException("no", status_code=418), "", (INVALID_ARGUMENT, "no")),
    (SeldonMicroserviceException("no", status_code=599), "", (INTERNAL, "no")),
    (SeldonMicroserviceException("no", status_code=200), "", (UNKNOWN, "no")),
    (NotImplementedError("later"), "later", (UNIMPLEMENTED, "later")),
    (RefusedError("gone"), "gone", (NOT_FOUND, "gone")),
], ids=repr)  # fmt: skip
def test_exceptions_have_status_unknown_unless_strict_is_off(
    error: Exception, strict: str, mapped: tuple[int, str]
) -> None:
    assert ask(raising(error), tensor(1)).error == (UNKNOWN, CALLING + strict)
    assert ask(raising(error), tensor(1), strict=False).error == mapped


@pytest.mark.parametrize(("payload", "strict", "mapped"), [
    (b"\xff", (INTERNAL, "Exception deserializing request!"), "Exception deserializing request!"),
    (b"", (UNKNOWN, CALLING), "Unknown data in SeldonMessage"),
    (tensor(1).SerializeToString().replace(b"\x01\x01", b"\x01\x02"),
     (UNKNOWN, f"{CALLING}buffer is smaller than requested size"), "buffer is smaller than requested size"),
], ids=["no message", "empty", "too few"])  # fmt: skip
def test_unreadable_payloads_are_invalid_argument_when_strict_is_off(
    payload: bytes, strict: tuple[int, str], mapped: str
) -> None:
    assert ask(Ident(), payload).error == strict
    assert ask(Ident(), payload, strict=False).error == (INVALID_ARGUMENT, mapped)


def test_a_unicode_error_in_the_protobuf_parser_is_a_deserialization_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protobuf, "_PARSERS", [bytes.decode] * len(Endpoint))
    assert ask(Ident(), b"\xff").error == (INTERNAL, "Exception deserializing request!")


def test_an_error_text_that_is_not_unicode_is_answered_with_a_replacement(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "seldon_core")  # pytest's workers could not send the text if it were logged
    assert ask(raising(ValueError("\udc80")), tensor(1)).error == (UNKNOWN, f"{CALLING}?")


def test_metrics_of_a_failed_call_are_counted() -> None:
    user = giving("x", metrics=lambda self: [{"type": "GAUGE", "key": "g", "value": 1}], tags=lambda self: 1 / 0)
    answer = ask(user, tensor(1))
    assert answer.error == (UNKNOWN, f"{CALLING}division by zero")
    assert answer.metrics == [["g", "GAUGE", 1, None]]


@pytest.mark.parametrize(("result", "expected"), [
    ({"a": np.int64(1), "b": (1, 2)}, {"jsonData": {"a": 1.0, "b": [1.0, 2.0]}}),
    (bytearray(b"123"), {"binData": "MTIz"}),
], ids=str)  # fmt: skip
def test_numpy_values_and_bytearrays_are_accepted_when_strict_is_off(result: Any, expected: dict[str, Any]) -> None:
    assert ask(giving(result), tensor(1), strict=False).decoded == {"meta": {}, **expected}


def test_each_call_of_a_batch_gets_its_own_meta_and_error() -> None:
    component = Component(giving(None, tags=lambda self: {"a": 1}))
    reply = protobuf.finish(component, Endpoint.PREDICT, tensor(1, puid="p"), np.ones((1, 1)), {}, [])
    message = json_format.MessageToDict(pb.SeldonMessage.FromString(read_answer(reply)[3]))
    assert message["meta"] == {"puid": "p", "tags": {"a": 1.0}}
    failed = protobuf.finish(component, Endpoint.PREDICT, tensor(1), 1.5, {}, [])
    assert read_answer(failed)[0] == UNKNOWN
