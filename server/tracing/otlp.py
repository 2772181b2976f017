"""OtlpSpans: traces as OpenTelemetry spans, sent to a collector over OTLP/HTTP by OpenTelemetry's SDK.

Imported only in mode opentelemetry: the SDK is the extra `otel`. Used on the Tracer's thread. It also reads
OpenTelemetry's environment variables: headers, certificates, compression, timeouts and resource attributes.
Source: Triton server, tracer.cc (the spans, their names, events and attributes).
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .config import TraceConfig
from .trace import Trace

FLUSH_TIMEOUT_MS = 2000
_DEFAULT_SERVICE_NAME = "triton-inference-server"
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


class _IdGenerator(RandomIdGenerator):
    """Generates random ids, except for ids given out before their span exists: the next ones, 0 for random."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        given, self.trace_id = self.trace_id, 0
        return given or super().generate_trace_id()

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, 0
        return given or super().generate_span_id()


class OtlpSpans:
    """Makes three nested spans of a trace: `InferRequest`, one named as the model, and `compute` if it was run.

    The parent of the first is the request's, from its `traceparent`. An ensemble has spans of its steps instead of
    `compute`.
    """

    def __init__(self, config: TraceConfig, exporter: SpanExporter | None = None) -> None:
        settings = dict(config.batching)
        self._ids = _IdGenerator()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=_resource(config), shutdown_on_exit=False, id_generator=self._ids
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter or OTLPSpanExporter(endpoint=config.endpoint),
                max_queue_size=settings["bsp_max_queue_size"],
                # the SDK does not accept a delay of 0, or batches larger than the queue, as Triton does
                schedule_delay_millis=max(1, settings["bsp_schedule_delay"]),
                max_export_batch_size=min(settings["bsp_max_export_batch_size"], settings["bsp_max_queue_size"]),
            )
        )
        self._tracer = self._provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()

    def write(self, traces: Sequence[Trace]) -> None:
        """Make the spans; the SDK's own thread sends them."""
        epoch_offset_ns = time.time_ns() - time.monotonic_ns()
        for trace in traces:
            self._write(trace, epoch_offset_ns)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.force_flush(FLUSH_TIMEOUT_MS)
        self._provider.shutdown()

    def _write(self, trace: Trace, epoch_offset_ns: int) -> None:
        carrier = {"traceparent": trace.parent, "tracestate": trace.state} if trace.parent else {}
        self._ids.trace_id = trace.trace_id
        root = self._span("InferRequest", self._propagator.extract(carrier), trace.start_ns + epoch_offset_ns, {})
        if trace.failed:
            root.set_status(Status(StatusCode.ERROR))
        spans = {0: root}
        for each in (trace, *trace.steps):
            spans[each.number] = self._write_request(each, spans[each.parent_number], epoch_offset_ns)
        root.end(trace.stamps[-1][1] + epoch_offset_ns)

    def _write_request(self, trace: Trace, parent: Any, epoch_offset_ns: int) -> Any:
        """Make the span of a request to one model, and of its run, if there was one. Returns: the first."""
        stamps = {name: ns + epoch_offset_ns for name, ns in trace.stamps}
        self._ids.span_id = trace.span_id
        request = self._span(trace.model, set_span_in_context(parent), stamps["REQUEST_START"], _attributes(trace))
        for name in ("REQUEST_START", "QUEUE_START", "REQUEST_END"):
            request.add_event(name, timestamp=stamps[name])
        if trace.failed:
            request.set_status(Status(StatusCode.ERROR))
        elif "COMPUTE_START" in stamps:
            compute = self._span("compute", set_span_in_context(request), stamps["COMPUTE_START"], {})
            for name in _COMPUTE:
                compute.add_event(name, timestamp=stamps[name])
            compute.end(stamps["COMPUTE_END"])
        request.end(stamps["REQUEST_END"])
        return request

    def _span(self, name: str, context: Any, start_ns: int, attributes: dict[str, Any]) -> Any:
        return self._tracer.start_span(
            name, context=context, kind=SpanKind.SERVER, start_time=start_ns, attributes=attributes
        )


def _attributes(trace: Trace) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "triton.model_name": trace.model,
        "triton.model_version": int(trace.version),
        "triton.trace_id": trace.number,
        "triton.trace_parent_id": trace.parent_number,
    }
    return attributes | {"triton.request_id": trace.request_id} if trace.request_id else attributes


def _resource(config: TraceConfig) -> Resource:
    """Merge the attributes of the flag and the environment, with a default name if neither sets one."""
    attributes = dict(config.resource)
    has_name = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create(attributes if has_name else {"service.name": _DEFAULT_SERVICE_NAME} | attributes)
