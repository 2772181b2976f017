"""Observability: tracing, logging settings and restricted APIs of one server, made from its settings.

Made by the composition root, which serves its endpoints over both transports and stops it last.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from penstock.server.gpus.device_times import DeviceTimes
from penstock.server.options.metrics_config import parse as parse_metrics
from penstock.server.restricted import GRPC_PREFIX, RestrictedApis
from penstock.server.settings import Settings
from penstock.server.tracing.config import OPENTELEMETRY, TraceConfig
from penstock.server.tracing.config import parse as parse_tracing
from penstock.server.tracing.file import TraceFile
from penstock.server.tracing.trace import TraceSink
from penstock.server.tracing.tracer import Tracer
from penstock.server.v2.logging_settings import LogSettings
from penstock.server.v2.routes import Route
from penstock.server.v2.trace_settings import TraceSettings

from .hardware import Hardware, SamplingPlan
from .metrics import Metrics, labels_of

if TYPE_CHECKING:
    from penstock.batching.engine import Engine


class ObservedPort(Protocol):
    """The part of a Listener used here."""

    @property
    def connections(self) -> int: ...


class Observability:
    """A server's observability, and its access restrictions. One per server."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        config = parse_tracing(settings.trace_config)
        if config.mode == OPENTELEMETRY:
            # imported now, because it takes a quarter of a second, which would delay the first traced request
            importlib.import_module("penstock.server.tracing.otlp")
        self._tracer = Tracer(config, engine, open_sink)
        self.context_for = self._tracer.context_for
        self.traces = TraceSettings(config, self._tracer, engine.model)
        self.logging = LogSettings(settings)
        self.http_restricted = RestrictedApis.parse(settings.http_restricted_api)
        self.grpc_restricted = RestrictedApis.parse(settings.grpc_restricted_protocol, GRPC_PREFIX)

    def routes(self) -> tuple[Route, ...]:
        """Return the endpoints."""
        return (*self.traces.routes(), *self.logging.routes())

    async def stop(self) -> None:
        """Write the remaining traces."""
        await asyncio.to_thread(self._tracer.stop)


def make_metrics(
    settings: Settings, engine: Engine, ports: Callable[[], Iterable[ObservedPort | None]],
    counts: Mapping[str, Callable[[], int]] = MappingProxyType({}),
) -> Metrics:  # fmt: skip
    """Make the metrics page. `ports` returns those of HTTP and gRPC, None for one that is not served.

    `counts` are additional numbers without labels, by metric name.
    """
    plan = SamplingPlan(settings.metrics_interval_ms / 1000, settings.allow_cpu_metrics, settings.allow_gpu_metrics)

    def count(position: int) -> int:
        port = tuple(ports())[position]
        return port.connections if port else 0

    connections = {"penstock_connections": partial(count, 0), "penstock_grpc_connections": partial(count, 1)}
    device_usage = DeviceTimes(engine.models, labels_of).read
    hardware = Hardware(plan=plan, device_usage=device_usage)
    return Metrics(engine, hardware, parse_metrics(settings.metrics_config), {**connections, **counts})


def open_sink(config: TraceConfig) -> TraceSink:
    """Open the destination of the traces. Called on the Tracer's thread."""
    if config.mode == OPENTELEMETRY:
        from penstock.server.tracing.otlp import OtlpSpans  # the SDK is an extra

        return OtlpSpans(config)
    return TraceFile(Path(config.file))
