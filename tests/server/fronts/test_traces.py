"""A client's trace continues in the engine, whichever front end received the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients import models
from tests.server.fronts.live_fronts import live_front
from tests.server.test_trace_otel import SPAN_ID, TRACE_ID, collector
from tests.server.test_tracing_live import PARENT, infer, infer_over_grpc

pytestmark = pytest.mark.slow


def test_a_clients_trace_continues_in_the_engine_over_http_and_grpc(tmp_path: Path) -> None:
    models.write_shapes(tmp_path)
    with collector() as (url, exports):
        rules = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={url}")
        with live_front(tmp_path, count=2, trace_config=rules) as live:
            infer(live)
            infer(live, traceparent=PARENT)
            infer_over_grpc(live, traceparent=PARENT)
        _, _, sent = exports.get(timeout=10)
    spans = [span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans]

    assert [span.name for span in spans].count("InferRequest") == 2
    assert {span.trace_id.hex() for span in spans} == {TRACE_ID}
    assert {span.parent_span_id.hex() for span in spans if span.name == "InferRequest"} == {SPAN_ID}
