"""Trace and log settings of a live server, through tritonclient over HTTP and gRPC."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

from tests.clients import ensembles, models
from tests.clients.tensors import document
from tests.live import Live, live_server
from tests.server.test_trace_otel import SPAN_ID, TRACE_ID, collector

pytestmark = pytest.mark.slow

PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
BODY = document(np.ones((1, 1, 1), np.float32))


@contextmanager
def serving(root: Path, *rules: str) -> Iterator[Live]:
    models.write_shapes(root)
    before = logging.getLogger("penstock").level
    try:
        with live_server(root, trace_config=rules) as live:
            yield live
    finally:
        logging.getLogger("penstock").setLevel(before)


def infer(live: Live, **headers: str) -> None:
    answer = httpx.post(f"{live.url}/v2/models/free/infer", json={**BODY, "id": "r1"}, headers=headers)
    assert answer.status_code == 200


def infer_over_grpc(live: Live, **headers: str) -> None:
    with grpc_client.InferenceServerClient(live.grpc_address) as client:
        tensor = grpc_client.InferInput("x", [1, 1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1, 1), np.float32))
        client.infer("free", [tensor], headers=headers, request_id="r2")


def test_requests_over_http_and_grpc_are_traced_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with serving(tmp_path / "models", "level=TIMESTAMPS", "rate=1", f"triton,file={path}") as live:
        infer(live)
        infer_over_grpc(live)
        httpx.post(f"{live.url}/v2/models/free/trace/setting", json={"trace_level": ["OFF"]})
        infer(live)

    found = json.loads(path.read_text())
    assert [entry["request_id"] for entry in found if "request_id" in entry] == ["r1", "r2"]
    stamps = [entry["timestamps"][0]["ns"] for entry in found if entry["id"] == 1 and "timestamps" in entry]
    assert stamps == sorted(stamps)
    assert len(stamps) == 7


def test_tracing_with_a_count_set_over_the_network_ends_after_that_count(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with serving(tmp_path / "models", "rate=1", f"triton,file={path}") as live:
        settings = f"{live.url}/v2/models/free/trace/setting"
        assert httpx.post(settings, json={"trace_level": ["TENSORS"], "trace_count": "2"}).status_code == 200
        for _ in range(3):
            infer(live)
        assert httpx.get(settings).json()["trace_count"] == "0"

    assert not path.exists()
    found = json.loads(path.with_name("trace.json.0").read_text())
    assert {entry["id"] for entry in found} == {1, 2}
    assert [entry["activity"] for entry in found if entry["id"] == 1 and "activity" in entry] == [
        "TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT",
    ]  # fmt: skip


def test_the_trace_of_a_client_continues_over_http_and_grpc(tmp_path: Path) -> None:
    with collector() as (url, exports):
        rules = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={url}")
        with serving(tmp_path, *rules) as live:
            infer(live)
            infer(live, traceparent=PARENT)
            infer_over_grpc(live, traceparent=PARENT)
        _, _, sent = exports.get(timeout=10)
    spans = [span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans]

    assert [span.name for span in spans].count("InferRequest") == 2
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert {span.parent_span_id.hex() for span in spans if span.name == "InferRequest"} == {SPAN_ID}


def test_steps_of_an_ensemble_are_child_spans_over_http_and_grpc(tmp_path: Path) -> None:
    ensembles.write_all(tmp_path)
    values = np.ones((1, ensembles.WIDTH), np.float32)
    with collector() as (url, exports):
        rules = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={url}")
        with live_server(tmp_path, trace_config=rules) as live:
            for client, address in ((http_client, live.address), (grpc_client, live.grpc_address)):
                tensor = client.InferInput("in", values.shape, "FP32")
                tensor.set_data_from_numpy(values)
                with client.InferenceServerClient(address) as triton_client:
                    triton_client.infer("chain", [tensor], headers={"traceparent": PARENT})
        _, _, sent = exports.get(timeout=10)
    spans = [span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans]

    names = {span.span_id: span.name for span in spans}
    assert sorted((names.get(span.parent_span_id, span.parent_span_id.hex()), span.name) for span in spans) == sorted(
        [(SPAN_ID, "InferRequest"), ("InferRequest", "chain"), ("chain", "double"), ("chain", "plus"),
         ("double", "compute"), ("plus", "compute")] * 2
    )  # fmt: skip
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("served")
    with serving(root / "models", "level=TIMESTAMPS", "rate=1", f"triton,file={root / 'trace.json'}") as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(live: Live, request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "http":
        with http_client.InferenceServerClient(live.address) as new_client:
            yield new_client
    else:
        with grpc_client.InferenceServerClient(live.grpc_address) as new_client:
            yield new_client


def settings_of(settings: Any) -> Any:
    """Convert the settings from either client to one form."""
    if isinstance(settings, dict):
        return {name: value if isinstance(value, list) else [value] for name, value in settings.items()}
    return {name: list(entry.value) for name, entry in settings.settings.items()}


def test_http_and_grpc_clients_read_change_and_clear_trace_settings(client: Any) -> None:
    before = settings_of(client.get_trace_settings())
    assert before["trace_level"] == ["TIMESTAMPS"]
    changed = client.update_trace_settings("free", {"trace_rate": "12", "trace_level": ["OFF"]})
    assert (settings_of(changed)["trace_rate"], settings_of(changed)["trace_level"]) == (["12"], ["OFF"])
    assert settings_of(client.get_trace_settings("free")) == settings_of(changed)
    assert settings_of(client.get_trace_settings()) == before
    cleared = client.update_trace_settings("free", {"trace_rate": None, "trace_level": None})
    assert settings_of(cleared) == before


@pytest.mark.parametrize(
    ("model", "settings", "text"),
    [
        (None, {"trace_file": "x"}, "trace file location can not be updated through network protocol"),
        (None, {"trace_rate": "x"}, "Unable to parse 'trace_rate', got: x"),
        ("nobody", {"trace_rate": "1"}, "Request for unknown model : nobody"),
    ],
)
def test_http_and_grpc_clients_receive_errors_about_invalid_trace_settings(
    client: Any, model: str | None, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        client.update_trace_settings(model, settings)


def logged(settings: Any) -> Any:
    if isinstance(settings, dict):
        return settings
    return {name: getattr(entry, entry.WhichOneof("parameter_choice")) for name, entry in settings.settings.items()}


def test_http_and_grpc_clients_read_and_change_log_settings(client: Any) -> None:
    before = logged(client.get_log_settings())
    assert (before["log_file"], before["log_info"], before["log_verbose_level"]) == ("", True, 0)
    changed = logged(client.update_log_settings({"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}))
    assert changed == before | {"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}
    assert logged(client.update_log_settings({name: before[name] for name in before if name != "log_file"})) == before


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"log_file": "/tmp/x"}, "log file location can not be updated through network protocol"),
        ({"log_colour": True}, "unknown log setting 'log_colour'"),
        ({"log_format": "xml"}, "invalid argument for log_format, got: xml"),
    ],
)
def test_http_and_grpc_clients_receive_errors_about_invalid_log_settings(
    client: Any, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(InferenceServerException, match=text):
        client.update_log_settings(settings)


def test_changed_log_settings_apply_to_the_running_process(tmp_path: Path) -> None:
    models.write_shapes(tmp_path)
    command = [sys.executable, "-m", "penstock.server.cli", "serve", str(tmp_path), "--log-format=json"]
    ports = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    with subprocess.Popen([*command, *ports], stderr=subprocess.PIPE, text=True) as process:
        log = process.stderr
        assert log is not None
        try:
            first = json.loads(log.readline())["msg"]
            port = re.findall(r"HTTP on http://127.0.0.1:(\d+)", first)[0]
            url = f"http://127.0.0.1:{port}/v2/logging"
            assert httpx.post(url, json={"log_info": False}).json()["log_info"] is False
            assert httpx.post(url, json={"log_info": True, "log_format": "ISO8601"}).status_code == 200
        finally:
            process.terminate()
            rest = log.read()
            process.wait(20)

    assert re.search(r"^\S+Z INFO serve: SIGTERM: finishing", rest, flags=re.MULTILINE)
