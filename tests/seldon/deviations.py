"""Where Penstock answers differently from seldon-core, case by case, and why."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import json_format

from penstock.server.seldon import protos
from tests.seldon.replay import USUAL


def _failed(info: str, status: int = 500, reason: str = "MICROSERVICE_INTERNAL_ERROR") -> dict[str, Any]:
    body = {"status": {"code": -1, "info": info, "reason": reason, "status": 1}}
    return {"status": status, "body": json.dumps(body, separators=(",", ":")) + "\n"}


def _refused(info: str) -> dict[str, Any]:
    return _failed("Invalid JSON: " + info, 400, "MICROSERVICE_BAD_DATA")


_ONE_RUN = {"body": '{"data":{"names":[],"tensor":{"shape":[1],"values":[1]}},"meta":{}}\n'}
_ONCE = "a TypeError of user code never runs the model twice"
_PYTHON = "the text is Python's, and today's Python says it so"
_NUMPY = "the text is numpy's, and today's numpy says it so"
_INDICES = "string indices must be integers, not 'str'"
_REQUEST = "Failed to parse request field: "
_LETTERS = "expected string or bytes-like object, got 'int'"
_NO_STATUS = "no status line may say so"
_OWN_PORT = "the metrics port is Penstock's, which is asked with GET, and answers in JSON otherwise"
_JSON = {"headers": {"content-type": "application/json"}}
_BOOL, _LONG = np.bool_.__name__, np.longdouble.__name__
_LISTED = "names are a list over gRPC, as they are over HTTP"
_DEPTH = 64 if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else 32


def _listed() -> dict[str, tuple[str, dict[str, Any]]]:
    """Expect `list` as the type of the names that `plain.Told` reports over gRPC, not seldon-core's protobuf type."""
    message = protos.message_class("SeldonMessage")
    found = {}
    for case in json.loads(Path(__file__).with_name("cases").joinpath("told.json").read_text("utf-8"))["cases"]:
        text = json_format.MessageToJson(message.FromString(base64.b64decode(case["answer"].get("message", ""))))
        if "| names [" in text:
            proto = json_format.Parse(text.replace("| names [", "| list ["), message())
            found[f"told/{case['name']}"] = (
                _LISTED,
                {"message": base64.b64encode(proto.SerializeToString()).decode()},
            )
    return found


DEVIATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    **_listed(),
    "once/runs-of-0": (_ONCE, _ONE_RUN),
    "once/runs-of-1": (_ONCE, _ONE_RUN),
    "once/runs-of-2": (_ONCE, _ONE_RUN),
    "once/output-fails-for-its-meta": (
        _ONCE, _failed("unsupported operand type(s) for +: 'NoneType' and 'int'"),
    ),
    "combiner/body-text": (_PYTHON, _failed(_INDICES)),
    "ident-arrays/data-text-names-a-key": (_PYTHON, _failed(_INDICES)),
    "ident-sources/parts-data-file": (_PYTHON, _failed(_INDICES)),
    "raw/status-is-text": (_PYTHON, _failed(_INDICES)),
    "fed/reward-list": (
        _PYTHON,
        _refused("Failed to parse reward field: float() argument must be a string or a real number, not 'list'."),
    ),
    "fed/names-number": (_PYTHON, _refused(f"{_REQUEST}Failed to parse names field: {_LETTERS}..")),
    "fed/list-of-one": (_PYTHON, _refused(f"Failed to parse 1 field: {_LETTERS}.")),
    "fed/meta-bad": (
        _PYTHON, _refused(f"{_REQUEST}Failed to parse meta field: Failed to parse puid field: {_LETTERS}..."),
    ),
    "ident-words/body-deep": (_NUMPY, _failed(
        "setting an array element with a sequence. The requested array would exceed the maximum number of dimension of "
        f"{_DEPTH}."
    )),
    "results/longdouble": (_NUMPY, _failed(f"Object of type {_LONG} is not JSON serializable")),
    "results/dict-bool_": (_NUMPY, _failed(f"Object of type {_BOOL} is not JSON serializable")),
    "results-of-messages/dict-bool_": (_NUMPY, {
        "details": f"Exception calling application: Value True has unexpected type <class 'numpy.{_BOOL}'> at Value.a",
    }),
    "results-of-messages/numpy-bool": (_NUMPY, {
        "details": f'Exception calling application: can only concatenate str (not "numpy.{_BOOL}") to str',
    }),
    "ident-messages/not-a-method": ("it says which method", {"details": "unknown method /seldon.protos.Model/Nothing"}),
    "ident-messages/not-a-service": (
        "it says which method", {"details": "unknown method /seldon.protos.Nothing/Predict"},
    ),
    "raw/status-minus": (_NO_STATUS, {"status": 500}),
    "raw/status-zero": (_NO_STATUS, {"status": 500}),
    "raw/status-1000": (_NO_STATUS, {"status": 500}),
    "metrics-broken/after": ("one series without a name takes the others along no more", {"status": 200}),
    "metrics-broken/forever": ("one series without a name takes the others along no more", {"status": 200}),
    "surface/a-method-of-no-one": (
        "no such method is known to HTTP", _failed("invalid HTTP request: Invalid method encountered", 400) | _JSON,
    ),
    "surface/a-method-in-small-letters": (
        "an answer to what is no HTTP is JSON", _JSON,
    ),
    "surface/two-slashes-within": (
        "nobody is sent elsewhere", {"status": 500, "headers": USUAL},
    ),
    "ident-arrays/ndarray-and-tftensor": (
        "a tftensor needs no TensorFlow here", {"status": 200, "body": (
            '{"data":{"names":["t:0"],"tftensor":{"dtype":"DT_INT64","int64Val":["9"],"tensorShape":{"dim":'
            '[{"size":"1"},{"size":"1"}]}}},"meta":{}}\n'
        )},
    ),
    "blueprint/unknown-url": (
        "what URLs there are is not the component's to say", _failed(
            "404 Not Found: The requested URL was not found on the server. If you entered the URL manually please "
            "check your spelling and try again."
        ) | {"headers": USUAL},
    ),
    "surface/prometheus-head": (_OWN_PORT, {"status": 405}),
    "surface/prometheus-options": (_OWN_PORT, {"status": 405, "body": '{"error":"Method Not Allowed"}'}),
    "placed-without-an-image/exposition": (_OWN_PORT, {"body": '{"error":"Not Found"}'}),
}  # fmt: skip
