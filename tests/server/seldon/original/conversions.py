"""What seldon_core's functions return. Recorded by `python conversions.py > conversions.json` with seldon-core.

Recorded from seldon-core 1.17.1 on CPython 3.8, numpy 1.24.4, protobuf 3.20.3. `test_shim_utils.py` compares.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.struct_pb2 import ListValue
from seldon_core import utils
from seldon_core.microservice import parse_parameters
from seldon_core.proto import prediction_pb2 as pb

TENSOR: dict[str, Any] = {
    "data": {"names": ["a", "b"], "tensor": {"shape": [1, 2], "values": [1, 2]}},
    "meta": {
        "puid": "p",
        "tags": {"t": "v"},
        "requestPath": {"m": "i"},
        "metrics": [{"key": "k", "type": "GAUGE", "value": 1}],
    },
}
NDARRAY: dict[str, Any] = {"data": {"names": ["a"], "ndarray": [[1, "x"]]}}
ARRAYS = {
    "integers": np.array([[1, 2]]),
    "floats": np.array([[0.5], [1.5]], np.float32),
    "one axis": np.array([1, 2]),
    "texts": np.array([["a", "b"]]),
    "truths": np.array([True]),
    "three axes": np.zeros((1, 2, 2)),
    "nothing": np.array([]),
    "no rows": np.zeros((0, 2)),
}
RESULTS = {
    "array": np.array([[1, 2]]),
    "list": [[0.5, 1]],
    "texts": ["a"],
    "text": "s",
    "bytes": b"b",
    "dict": {"a": 1},
    "float": 1.5,
}
REQUESTS: dict[str, Any] = {"tensor": TENSOR, "ndarray": NDARRAY, "text": {"strData": "s"}, "health": {}}
METRICS = [{"key": "c", "type": "COUNTER", "value": 2}]


class Full:
    """Defines the methods that contribute to answers."""

    def class_names(self) -> Any:
        return ["x", "y"]

    def feature_names(self) -> Any:
        return ["f"]

    def tags(self) -> Any:
        return {"own": 1}


class Bare:
    """Defines nothing."""


def cases() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each case: its name, and the function to call."""
    for found in (_parsing(), _written(), _reading(), _arrays(), _parts(), _answers(), _words()):
        yield from found


def _parsing() -> Iterator[tuple[str, Callable[[], Any]]]:
    yield "message", lambda: utils.json_to_seldon_message(TENSOR)
    yield "message of nothing", lambda: utils.json_to_seldon_message(None)
    yield "message with an unknown field", lambda: utils.json_to_seldon_message({"nothing": 1})
    yield "messages", lambda: utils.json_to_seldon_messages({"seldonMessages": [TENSOR, {"strData": "a"}]})
    yield "messages with an unknown field", lambda: utils.json_to_seldon_messages({"x": []})
    yield "feedback", lambda: utils.json_to_feedback({"request": NDARRAY, "reward": 0.5})
    yield "feedback with a bad reward", lambda: utils.json_to_feedback({"reward": "x"})
    stated = {"name": "m", "versions": ["1"], "other": 1}
    yield "metadata", lambda: utils.json_to_seldon_model_metadata(stated)
    yield "metadata of nothing", lambda: utils.json_to_seldon_model_metadata(None)


def _written() -> Iterator[tuple[str, Callable[[], Any]]]:
    message, other = utils.json_to_seldon_message(TENSOR), utils.json_to_seldon_message(NDARRAY)
    yield "message as JSON", lambda: utils.seldon_message_to_json(message)
    yield "messages as JSON", lambda: utils.seldon_messages_to_json(pb.SeldonMessageList(seldonMessages=[message]))
    yield "feedback as JSON", lambda: utils.feedback_to_json(pb.Feedback(request=other, reward=0.1))


def _reading() -> Iterator[tuple[str, Callable[[], Any]]]:
    messages = {
        "tensor": utils.json_to_seldon_message(TENSOR),
        "ndarray": utils.json_to_seldon_message(NDARRAY),
        "text": pb.SeldonMessage(strData="s"),
        "bytes": pb.SeldonMessage(binData=b"\0"),
        "JSON": utils.json_to_seldon_message({"jsonData": {"a": [1, None]}}),
        "anything": pb.SeldonMessage(customData=AnyMessage(type_url="t")),
        "nothing": pb.SeldonMessage(),
        "no data": pb.SeldonMessage(data=pb.DefaultData(names=["z"])),
    }
    for name, each in messages.items():
        yield f"payload of {name}", partial(utils.get_data_from_proto, each)
        yield f"parts of {name}", partial(utils.extract_request_parts, each)
        yield f"meta of {name}", partial(utils.get_meta_from_proto, each)
    feedback = pb.Feedback(request=messages["tensor"], truth=messages["ndarray"], reward=0.5)
    yield "parts of feedback", lambda: utils.extract_feedback_request_parts(feedback)


def _arrays() -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, array in ARRAYS.items():
        for kind in ("tensor", "ndarray", "other"):
            yield (
                f"{name} as a JSON {kind}",
                partial(utils.array_to_rest_datadef, kind, array, ["n"]),
            )
            if not (name == "texts" and kind == "tensor"):  # this is an error, of another type
                yield (
                    f"{name} as a {kind}",
                    partial(utils.array_to_grpc_datadef, kind, array, ["n"]),
                )
        yield f"{name} as a ListValue", partial(utils.array_to_list_value, array)
    yield "no names in JSON", lambda: utils.array_to_rest_datadef("ndarray", ARRAYS["integers"])
    yield "no names", lambda: utils.array_to_grpc_datadef("ndarray", ARRAYS["integers"], None)
    began = ListValue()
    began.append("first")
    yield "more of a ListValue", lambda: utils.array_to_list_value(np.array([1.0]), began)


def _parts() -> Iterator[tuple[str, Callable[[], Any]]]:
    requests = {
        **REQUESTS,
        "bytes": {"binData": "AAE="},
        "JSON": {"jsonData": [1]},
        "no data": {"data": {}},
        "another key": {"x": 1},
        "a list": [1],
        "no meta": {"strData": "s", "meta": None},
    }
    for name, each in requests.items():
        yield f"parts of JSON: {name}", partial(utils.extract_request_parts_json, each)


def _answers() -> Iterator[tuple[str, Callable[[], Any]]]:
    for user in (Full(), Bare()):
        who = type(user).__name__
        for name, result in RESULTS.items():
            for request_name, request in REQUESTS.items():
                yield f"{who}: {name} for {request_name}, JSON", _answer_json(user, request, result)
                if request and name != "float":  # for which seldon-core fails by adding the number to a text
                    yield f"{who}: {name} for {request_name}", _answer(user, request, result)
        yield f"{who}: a request's names, JSON", _answer_json(user, NDARRAY, RESULTS["array"], True)
        yield f"{who}: a request's names", _answer(user, NDARRAY, RESULTS["array"], True)


def _answer_json(user: Any, request: Any, result: Any, is_request: bool = False) -> Callable[[], Any]:
    def called() -> Any:
        copied = copy.deepcopy(request)
        return utils.construct_response_json(
            user, is_request, copied, result, copied.get("meta"), copy.deepcopy(METRICS), {"run": 1}
        )

    return called


def _answer(user: Any, request: Any, result: Any, is_request: bool = False) -> Callable[[], Any]:
    def called() -> Any:
        proto = utils.json_to_seldon_message(request)
        meta = utils.get_meta_from_proto(proto)
        return utils.construct_response(user, is_request, proto, result, meta, copy.deepcopy(METRICS), {"run": 1})

    return called


def _words() -> Iterator[tuple[str, Callable[[], Any]]]:
    stated = [("a", "1", "INT"), ("b", "1.5", "DOUBLE"), ("c", "x", "STRING"), ("d", "yes", "BOOL")]
    parameters = [{"name": name, "value": value, "type": kind} for name, value, kind in stated]
    yield "parameters", lambda: parse_parameters(parameters)
    yield "a bad value", lambda: parse_parameters([{"name": "a", "value": "x", "type": "INT"}])
    yield "a bad type", lambda: parse_parameters([{"name": "a", "value": "x", "type": "LONG"}])


def shown(value: Any) -> Any:
    """Return a function's result in a form that JSON can hold."""
    if hasattr(value, "DESCRIPTOR"):
        return [type(value).__name__, value.SerializeToString(deterministic=True).hex()]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, value.tolist()]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, (tuple, list)):
        return [shown(each) for each in value]
    if isinstance(value, dict):
        return {key: shown(value[key]) for key in value}
    return value


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call in this form, or the exception it raised."""
    try:
        return shown(call())
    except Exception as error:  # noqa: BLE001 - any exception is compared
        return ["raised", type(error).__name__, getattr(error, "message", None) or str(error)]


if __name__ == "__main__":
    print(json.dumps({name: outcome(call) for name, call in cases()}, indent=0, sort_keys=True))  # noqa: T201
