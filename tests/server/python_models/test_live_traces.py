"""Traces of calls between Python models: within the traces of the calling requests, as in Triton."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients import models
from tests.live import Live, live_server
from tests.server.python_models.repositories import write_model
from tests.server.test_trace_otel import SPAN_ID, TRACE_ID, collector

pytestmark = pytest.mark.slow

PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
ASKS = """
import json
import threading
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    '''Asks the model of the parameter `model`, in the way of the parameter `how`.'''

    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        said = json.loads(request.parameters())
        path = said["model"].split("/")
        asked = pb_utils.InferenceRequest(
            model_name=path[0], requested_output_names=["y"], inputs=request.inputs(),
            trace=None if said.get("how") == "apart" else request.trace(),
            parameters={"model": "/".join(path[1:])} if len(path) > 1 else {},
        )
        if said.get("how") == "twice":
            asked.exec()
        response = list(asked.exec(decoupled=True))[0] if said.get("how") == "several" else asked.exec()
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(response, "y")])
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "MODEL" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""
SEVERAL = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            y = pb_utils.Tensor("y", request.inputs()[0].as_numpy())
            request.get_response_sender().send(
                pb_utils.InferenceResponse([y]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            )
"""


CONTEXT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        texts = [request.trace().get_context() or "none" for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[text]], object))]) for text in texts]
"""
WARM = """
model_warmup [ { name: "w" batch_size: 1
  inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 2 ] zero_data: true } } } ]
"""


def repository(root: Path) -> Path:
    write_model(root, "tells", CONTEXT, CONFIG.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING') + WARM)
    write_model(root, "asks_tells", ASKS, CONFIG.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING'))
    models.write_identity(root, "same", "")
    write_model(root, "asks", ASKS, CONFIG)
    write_model(root, "asks_too", ASKS, CONFIG)
    write_model(root, "several", SEVERAL, CONFIG + "model_transaction_policy { decoupled: true }")
    for name, model in (("over_same", "same"), ("over_asks", "asks")):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(ENSEMBLE.replace("MODEL", model))
    return root


def ask(
    live: Live, name: str, status: int = 200, headers: Mapping[str, str] | None = None, **parameters: Any
) -> list[Any]:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]
    body = {"inputs": inputs, "parameters": parameters}
    answer = httpx.post(f"{live.url}/v2/models/{name}/infer", json=body, headers=headers or {})
    assert answer.status_code == status, answer.text
    return answer.json().get("outputs", [{"data": []}])[0]["data"]  # type: ignore[no-any-return]


def tree(path: Path) -> list[tuple[str, str]]:
    """Return the models in a trace file, each with its parent."""
    whose = [entry for entry in json.loads(path.read_text()) if "model_name" in entry]
    names = {entry["id"]: entry["model_name"] for entry in whose}
    return [(entry["model_name"], names.get(entry.get("parent_id"), "")) for entry in whose]


def serving(root: Path, *rules: str, models: Sequence[str]) -> AbstractContextManager[Live]:
    """Serve some of the models: each is a process."""
    return live_server(repository(root), trace_config=rules, model_control_mode="explicit", load_model=tuple(models))


CALLS: list[tuple[str, dict[str, Any], list[tuple[str, str]]]] = [
    ("asks", {"model": "same"}, [("asks", ""), ("same", "asks")]),
    ("asks", {"model": "same", "how": "twice"}, [("asks", ""), ("same", "asks"), ("same", "asks")]),
    ("asks", {"model": "asks_too/same"}, [("asks", ""), ("asks_too", "asks"), ("same", "asks_too")]),
    ("asks", {"model": "over_same"}, [("asks", ""), ("over_same", "asks"), ("same", "over_same")]),
    ("over_asks", {"model": "same"}, [("over_asks", ""), ("asks", "over_asks"), ("same", "asks")]),
    ("asks", {"model": "same", "how": "apart"}, [("same", ""), ("asks", "")]),
    ("asks", {"model": "asks_too/nobody", "status": 500}, [("asks", ""), ("asks_too", "asks")]),
]
"""The requested model, its parameters, and the models in the trace with their callers: one call, two calls, a nested
call, an ensemble, within an ensemble, without its trace, and a failing call."""


def test_calls_of_a_model_are_in_the_trace_of_its_request(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    names = ("asks", "asks_too", "several", "over_same", "over_asks")
    with serving(tmp_path / "m", "level=TIMESTAMPS", "rate=1", f"triton,file={path}", models=names) as live:
        for model, parameters, _ in CALLS:
            ask(live, model, **parameters)

    assert tree(path) == [each for *_, found in CALLS for each in found]


def test_a_decoupled_call_that_ends_before_its_caller_is_in_the_trace(tmp_path: Path) -> None:
    """The call has sent its last answer before its run ends, so the caller may end first."""
    path = tmp_path / "trace.json"
    with serving(
        tmp_path / "m", "level=TIMESTAMPS", "rate=1", f"triton,file={path}", models=("asks", "several")
    ) as live:
        for _ in range(10):
            ask(live, "asks", model="several", how="several")

    assert set(tree(path)) == {("asks", ""), ("several", "asks")}


def test_a_call_is_sampled_with_the_request_and_not_separately(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rules = ("level=TIMESTAMPS", f"triton,file={path}", "rate=2", "count=1")
    with serving(tmp_path / "m", *rules, models=("asks", "same")) as live:
        for _ in range(4):
            ask(live, "asks", model="same")

    # with a count, the traces have a file of their own
    assert tree(tmp_path / "trace.json.0") == [("asks", ""), ("same", "asks")]


@pytest.mark.parametrize("name", ["tells", "asks_tells"])
@pytest.mark.parametrize("parent", ["", PARENT])
def test_user_code_can_add_spans_to_the_span_of_its_model(tmp_path: Path, name: str, parent: str) -> None:
    with collector() as (url, exports):
        rules = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=2", f"opentelemetry,url={url}")
        with serving(tmp_path, *rules, models=("tells", "asks_tells")) as live:
            unchosen = ask(live, name, model="tells")
            (headers_text,) = ask(live, name, model="tells", headers={"traceparent": parent} if parent else {})
        _, _, sent = exports.get(timeout=10)
    spans = [span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans]

    context = json.loads(headers_text)["traceparent"].split("-")
    (span,) = [each for each in spans if each.name == "tells"]
    assert unchosen == ["none"]
    assert context == ["00", span.trace_id.hex(), span.span_id.hex(), "01"]
    assert {each.trace_id for each in spans} == {span.trace_id}
    assert not parent or span.trace_id.hex() == TRACE_ID


def test_the_spans_of_a_call_are_in_the_span_of_the_calling_model(tmp_path: Path) -> None:
    with collector() as (url, exports):
        rules = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={url}")
        with serving(tmp_path, *rules, models=("asks", "same")) as live:
            ask(live, "asks", model="same", headers={"traceparent": PARENT})
        _, _, sent = exports.get(timeout=10)
    spans = [span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans]

    names = {span.span_id: span.name for span in spans}
    assert sorted((names.get(span.parent_span_id, span.parent_span_id.hex()), span.name) for span in spans) == [
        (SPAN_ID, "InferRequest"), ("InferRequest", "asks"), ("asks", "compute"), ("asks", "same"), ("same", "compute"),
    ]  # fmt: skip
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
