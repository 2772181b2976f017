"""Tracing in mode opentelemetry: the spans, and their way to a collector over OTLP/HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from penstock.server.tracing.config import parse
from penstock.server.tracing.otlp import OtlpSpans
from penstock.server.tracing.trace import Trace

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAMPS = (
    ("REQUEST_START", 1_010), ("QUEUE_START", 1_020), ("COMPUTE_START", 1_030), ("COMPUTE_INPUT_END", 1_040),
    ("COMPUTE_OUTPUT_START", 1_050), ("COMPUTE_END", 1_060), ("REQUEST_END", 1_070),
)  # fmt: skip
BASE = Trace(7, "iris", "3", "r1", False, STAMPS, ("TIMESTAMPS",), 0, "", "", ())


def spans_of(trace: Trace, *entries: str) -> list[ReadableSpan]:
    """Return the spans of a trace: root, request and compute, or only the first two."""
    exporter = InMemorySpanExporter()
    sink = OtlpSpans(parse(["mode=opentelemetry", *entries]), exporter)
    sink.write([trace])
    sink.close()
    return sorted(exporter.get_finished_spans(), key=lambda span: ["InferRequest", "iris", "compute"].index(span.name))


def events_of(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def test_a_trace_has_three_nested_spans() -> None:
    root, request, compute = spans_of(BASE)

    assert root.parent is None
    assert request.parent is not None
    assert compute.parent is not None
    assert (request.parent.span_id, compute.parent.span_id) == (root.context.span_id, request.context.span_id)
    assert len({span.context.trace_id for span in (root, request, compute)}) == 1


def test_spans_have_the_events_and_attributes_of_triton() -> None:
    _, request, compute = spans_of(BASE)

    assert events_of(request) == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert events_of(compute) == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    assert dict(request.attributes or {}) == {
        "triton.model_name": "iris",
        "triton.model_version": 3,
        "triton.trace_id": 7,
        "triton.trace_parent_id": 0,
        "triton.request_id": "r1",
    }


def test_span_times_keep_the_intervals_between_the_stamps() -> None:
    root, _, compute = spans_of(BASE)

    assert (root.end_time or 0) - (root.start_time or 0) == 60
    assert (compute.start_time or 0) - (root.start_time or 0) == 20
    assert (compute.end_time or 0) - (compute.start_time or 0) == 30


def test_the_root_span_joins_the_trace_of_the_request() -> None:
    root, *_ = spans_of(BASE._replace(parent=f"00-{TRACE_ID}-{SPAN_ID}-01", state="vendor=1"))

    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == SPAN_ID
    assert root.context.trace_state.get("vendor") == "1"


def test_a_failed_request_has_error_spans_and_no_compute_span() -> None:
    spans = spans_of(BASE._replace(failed=True, stamps=(*STAMPS[:2], STAMPS[-1])))

    assert [span.name for span in spans] == ["InferRequest", "iris"]
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}


def test_a_request_that_no_model_ran_has_no_compute_span() -> None:
    # a request to an ensemble, whose steps have their own traces, or a cache hit
    root, request = spans_of(BASE._replace(stamps=(*STAMPS[:2], STAMPS[-1])))

    assert root.status.status_code is request.status.status_code is StatusCode.UNSET
    assert events_of(request) == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]


def test_the_default_service_name_may_be_changed_by_flag_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spans_of(BASE)[0].resource.attributes["service.name"] == "triton-inference-server"
    assert spans_of(BASE, "opentelemetry,resource=service.name=a")[0].resource.attributes["service.name"] == "a"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from the environment")
    assert spans_of(BASE)[0].resource.attributes["service.name"] == "from the environment"


def test_opentelemetry_mode_is_rejected_when_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ValueError, match=r"pip install 'penstock\[otel\]'"):
        parse(["mode=opentelemetry"])


# -- the collector ---------------------------------------------------------------------------------------------


@contextmanager
def collector() -> Iterator[tuple[str, Queue[Any]]]:
    """Yield a collector's URL, and a queue of what it receives."""
    exports: Queue[Any] = Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            exports.put((self.path, self.headers["content-type"], ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", exports
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("rule", ["bsp_schedule_delay=0", "bsp_max_queue_size=1", "bsp_max_export_batch_size=1"])
def test_spans_are_exported_with_the_smallest_batching_settings(rule: str) -> None:
    assert "InferRequest" in {span.name for span in spans_of(BASE, f"opentelemetry,{rule}")}


def test_spans_reach_a_collector_over_http() -> None:
    with collector() as (url, exports):
        sink = OtlpSpans(parse(["mode=opentelemetry", f"opentelemetry,url={url}"]))
        sink.write([BASE])
        sink.close()
        path, content_type, sent = exports.get(timeout=10)

    assert (path, content_type) == ("/v1/traces", "application/x-protobuf")
    (resource,) = sent.resource_spans
    assert sorted(span.name for scope in resource.scope_spans for span in scope.spans) == [
        "InferRequest", "compute", "iris",
    ]  # fmt: skip
    assert json.dumps([attribute.key for attribute in resource.resource.attributes]).count("service.name") == 1
