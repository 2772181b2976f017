"""The metrics page that Prometheus scrapes, in its text format. Served on its own port and on the main one.

Numbers are formatted here, because perf_analyzer reads `8.5e+10` as 8.5 and requires exactly one label on GPU lines.
Rendering yields to the event loop after each model, so a scrape never blocks serving.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from penstock.batching.histogram import HistogramSnapshot
from penstock.batching.model import Model
from penstock.batching.request import Key
from penstock.batching.statistics import (
    CACHE_LATENCIES,
    LATENCIES,
    LATENCY_BOUNDS_NS,
    ROWS_BOUNDS,
    Duration,
    StatisticsSnapshot,
)
from penstock.server.engines import ListsModels
from penstock.server.options.metrics_config import MetricsConfig
from penstock.server.workers.order import END_REASONS, ENDED, STARTED

from .exposition import decimal, histogram_lines, label_value, number
from .families import FAMILIES
from .hardware import Hardware, HardwareSample

CONTENT_TYPE = "text/plain; charset=utf-8"

MAX_SHOWN_KEYS = 8
"""The number of shapes per model whose run times are shown: those that ran most while the model has been loaded."""

_ONNX_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")
"""The distributions that provide it; it is not imported, since a server may have no models that need it."""
# The events of Model.events by name: their metric and additional labels.
_EVENTS = {
    "batch_retries": ("penstock_batch_retries_total", ""),
    "quarantined": ("penstock_quarantined_requests_total", ""),
    "runs_stopped": ("penstock_runs_stopped_total", ""),
    "out_of_memory": ("penstock_out_of_memory_total", ""),
    "instances_replaced": ("penstock_instances_replaced_total", ""),
    "late_refusals": ("penstock_late_refusals_total", ""),
    "rows_padded": ("penstock_padded_rows_total", ""),
    "elements_real": ("penstock_padding_elements_total", ',kind="real"'),
    "elements_padded": ("penstock_padding_elements_total", ',kind="padding"'),
}
# The events of models with workers.
_WORKER_EVENTS = {STARTED: ("penstock_workers_started_total", "")} | {
    ENDED + reason: ("penstock_workers_ended_total", f',reason="{reason}"') for reason in END_REASONS
}


class Metrics:
    """Renders the page. One per server. `connections` maps a metric's name to the number of open connections.

    `extra_lines` returns lines of other metrics, which user-code models may define (python_models/metrics.py).
    """

    def __init__(
        self, engine: ListsModels, hardware: Hardware, config: MetricsConfig | None = None,
        connections: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._hardware = hardware
        self._config = config or MetricsConfig()
        self._connections = connections or {}
        self.processes: Mapping[str, int] = {}
        """For a server with several processes, its supervisor's counts, by metric and label."""
        self._build = _build_info()
        self.readiness: Callable[[], Iterable[tuple[str, str, bool]]] = tuple
        """Returns what should be served, by name and version, and whether it is ready: failed loads have no
        Model."""
        self.totals: Counter[str] = Counter()
        """The counts of ports, by metric and labels (listening/tally.py)."""
        self.extra_lines: Callable[[], Iterable[str]] = tuple
        self.content_type = CONTENT_TYPE
        """The content type of the page on its own port."""

    async def render(self) -> bytes:
        """Return the current page.

        Threads: the event loop's, to which it yields after each model.
        """
        lines: dict[str, list[str]] = {family.name: [] for family in FAMILIES}
        sample = await self._hardware.sample()
        for model in self._engine.models():
            self._add_model(lines, model)
            await asyncio.sleep(0)
        lines["penstock_model_ready"] += _model_ready(self.readiness())
        lines["penstock_build_info"].append(self._build)
        for name, count in self._connections.items():
            lines[name].append(f"{name} {count()}")
        for name, total in (*self.processes.items(), *sorted(self.totals.items())):
            lines[name.partition("{")[0]].append(f"{name} {total}")
        for name in ("nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"):
            lines[name].append(f"{name} 0")
        _add_sample(lines, sample)
        parts: list[str] = []
        for family in FAMILIES:
            if lines[family.name]:
                parts.append(f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}")
                parts += lines[family.name]
        parts += self.extra_lines()
        return ("\n".join(parts) + "\n").encode()

    def _add_model(self, lines: Mapping[str, list[str]], model: Model) -> None:
        snapshot, config = model.statistics.snapshot(), self._config
        labels = labels_of(model)
        samples = [*_counters(snapshot)]
        if config.counter_latencies:
            samples += _latencies(snapshot)
            if model.cache is not None:  # hits and misses too, as in Triton
                samples += _cache_counters(snapshot)
        for name, value in samples:
            lines[name].append(f"{name}{{{labels}}} {value}")
        if config.summary_latencies:
            self._add_summaries(lines, model, labels, snapshot)
        if config.histogram_latencies and model.spec.decoupled:
            _add_first_response(lines, model, labels, snapshot.first_response_histogram)
        _add_state(lines, model, labels, snapshot)
        _add_events(lines, model, labels)
        _add_run_times(lines, model, labels)
        _add_devices(lines, model, labels)

    def _add_summaries(
        self, lines: Mapping[str, list[str]], model: Model, labels: str, snapshot: StatisticsSnapshot
    ) -> None:
        names = [quantile for quantile, _ in self._config.quantiles]
        quantiles = [float(name) for name in names]
        values_by_latency = model.statistics.summaries(quantiles, self._config.capacity, time.monotonic_ns())
        for name, latency, duration in _summary_durations(snapshot, cached=model.cache is not None):
            for quantile, value in zip(names, values_by_latency[latency], strict=True):
                text = "NaN" if value is None else decimal(value, 3)
                lines[name].append(f'{name}{{{labels},quantile="{quantile}"}} {text}')
            lines[name].append(f"{name}_sum{{{labels}}} {decimal(duration.ns, 3)}")
            lines[name].append(f"{name}_count{{{labels}}} {duration.count}")


_LATENCY_EDGES = tuple(decimal(bound, 9) for bound in LATENCY_BOUNDS_NS)
_ROWS_EDGES = tuple(str(bound) for bound in ROWS_BOUNDS)


def labels_of(model: Model, **more: str) -> str:
    """Return the labels of all lines about a model, and `more`, sorted by name: scripts compare lines with Triton's.

    Source: prometheus-cpp, whose labels are a sorted map, as Triton's qa/L0_request_cancellation reads them.
    """
    tags = {f"_{name}": value for name, value in model.spec.metric_tags}
    labels = tags | {"model": model.name, "version": model.version} | more
    return ",".join(f'{name}="{label_value(value)}"' for name, value in sorted(labels.items()))


def _add_state(lines: Mapping[str, list[str]], model: Model, labels: str, snapshot: StatisticsSnapshot) -> None:
    for reason, count in snapshot.failures.items():
        name = "nv_inference_request_failure"
        lines[name].append(f"{name}{{{labels_of(model, reason=reason)}}} {count}")
    for name, value in (
        ("nv_inference_pending_request_count", model.waiting_requests),
        ("nv_model_load_duration_secs", f"{model.load_s:.6f}"),
        ("penstock_waiting_rows", model.waiting_rows),
        ("penstock_inflight_requests", model.inflight),
    ):
        lines[name].append(f"{name}{{{labels}}} {value}")
    for name, histogram in (
        ("penstock_queue_seconds", snapshot.queue_histogram),
        ("penstock_compute_seconds", snapshot.compute_histogram),
        ("penstock_total_seconds", snapshot.total_histogram),
    ):
        lines[name] += _histogram(name, labels, _LATENCY_EDGES, histogram, 9)
    lines["penstock_batch_rows"] += _histogram("penstock_batch_rows", labels, _ROWS_EDGES, snapshot.rows_histogram, 0)
    if model.spec.hooks is not None:
        name = "penstock_hook_seconds"
        for hook, histogram in snapshot.hook_histograms.items():
            lines[name] += _histogram(name, f'{labels},hook="{hook}"', _LATENCY_EDGES, histogram, 9)


def _add_first_response(
    lines: Mapping[str, list[str]], model: Model, labels: str, histogram: HistogramSnapshot
) -> None:
    """Add Triton's histogram, whose sum is in whole milliseconds: its qa/L0_metrics reads every value as an integer."""
    name = "nv_inference_first_response_histogram_ms"
    edges = tuple(map(number, model.spec.first_response_ms))
    lines[name] += _histogram(name, labels, edges, replace(histogram, total=histogram.total // 1_000_000), 0)


def _add_events(lines: Mapping[str, list[str]], model: Model, labels: str) -> None:
    with model.lock:
        events = dict(model.event_counts)
    for event, (name, more) in (_EVENTS | _WORKER_EVENTS if STARTED in events else _EVENTS).items():
        lines[name].append(f"{name}{{{labels}{more}}} {events.get(event, 0)}")


def _add_run_times(lines: Mapping[str, list[str]], model: Model, labels: str) -> None:
    name = "penstock_run_seconds"
    with model.lock:
        run_times = model.costs.stable_run_times(MAX_SHOWN_KEYS)
    for run_time in run_times:
        size = f'{labels},shapes="{_shapes(run_time.key)}",rows="{run_time.rows}"'
        for quantile, ns in (("0.5", run_time.mean_ns), ("0.95", run_time.p95_ns)):
            lines[name].append(f'{name}{{{size},quantile="{quantile}"}} {decimal(ns, 9)}')


def _add_devices(lines: Mapping[str, list[str]], model: Model, labels: str) -> None:
    if model.spec.fallback_reason:
        lines["penstock_model_cpu_fallback"].append(f"penstock_model_cpu_fallback{{{labels}}} 1")
    if model.device_ns:
        name = "penstock_device_seconds_total"
        with model.lock:
            device_ns = dict(model.device_ns)
        for device, ns in device_ns.items():
            lines[name].append(f'{name}{{{labels},device="{label_value(device)}"}} {decimal(ns, 9)}')


def _shapes(key: Key) -> str:
    """Return the input shapes without rows, as JSON like in the statistics."""
    shapes = ("null" if shape is None else f"[{','.join(map(str, shape))}]" for shape in key)
    return f"[{','.join(shapes)}]"


def _counters(snapshot: StatisticsSnapshot) -> tuple[tuple[str, int], ...]:
    return (
        ("nv_inference_request_success", snapshot.success.count),
        ("nv_inference_count", snapshot.inference_count),
        ("nv_inference_exec_count", snapshot.execution_count),
    )


def _latencies(snapshot: StatisticsSnapshot) -> tuple[tuple[str, int], ...]:
    return (
        ("nv_inference_request_duration_us", snapshot.success.ns // 1000),
        ("nv_inference_queue_duration_us", snapshot.queue.ns // 1000),
        ("nv_inference_compute_input_duration_us", snapshot.compute_input.ns // 1000),
        ("nv_inference_compute_infer_duration_us", snapshot.compute_infer.ns // 1000),
        ("nv_inference_compute_output_duration_us", snapshot.compute_output.ns // 1000),
    )


def _cache_counters(snapshot: StatisticsSnapshot) -> tuple[tuple[str, int], ...]:
    hit, miss = snapshot.cache_hit, snapshot.cache_miss
    return (
        ("nv_cache_num_hits_per_model", hit.count),
        ("nv_cache_num_misses_per_model", miss.count),
        ("nv_cache_hit_duration_per_model", hit.ns // 1000),
        ("nv_cache_miss_duration_per_model", miss.ns // 1000),
    )


def _summary_durations(snapshot: StatisticsSnapshot, *, cached: bool) -> Iterator[tuple[str, str, Duration]]:
    """Yield each summary's name, latency and duration. With a cache, the request summary is off, as in Triton."""
    durations = (
        snapshot.success,
        snapshot.queue,
        snapshot.compute_input,
        snapshot.compute_infer,
        snapshot.compute_output,
    )
    for latency, duration in zip(LATENCIES, durations, strict=True):
        if latency != "request" or not cached:
            yield f"nv_inference_{latency}_summary_us", latency, duration
    if cached:
        for latency, duration in zip(CACHE_LATENCIES, (snapshot.cache_hit, snapshot.cache_miss), strict=True):
            yield f"nv_{latency}_summary_us", latency, duration


def _histogram(name: str, labels: str, edges: Sequence[str], histogram: HistogramSnapshot, digits: int) -> list[str]:
    return list(histogram_lines(name, labels, edges, histogram.counts, decimal(histogram.total, digits)))


def _add_sample(lines: Mapping[str, list[str]], sample: HardwareSample) -> None:
    for name, value in sample.machine.items():
        lines[name].append(f"{name} {value}")
    for name, gpu_lines in sample.gpus.items():
        lines[name] += gpu_lines


def _build_info() -> str:
    """Return the line with the versions in use."""
    versions = {"version": _version("penstock"), "python": platform.python_version(),
                "onnxruntime": _version(*_ONNX_RUNTIMES)}  # fmt: skip
    labels = ",".join(f'{name}="{label_value(version)}"' for name, version in versions.items())
    return f"penstock_build_info{{{labels}}} 1"


def _version(*distributions: str) -> str:
    for name in distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _model_ready(readiness: Iterable[tuple[str, str, bool]]) -> list[str]:
    """Return a line for each name, version and readiness."""
    return [
        f'penstock_model_ready{{model="{label_value(name)}",version="{version}"}} {int(ready)}'
        for name, version, ready in readiness
    ]
