"""The console: the output of a run, in perf_analyzer's format, with progress bars on a terminal."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, TextIO

from penstock.perf.generator.orders import Window
from penstock.perf.reports import histograms
from penstock.perf.reports.document import Client, Document, Level, Offered, ServerSide

from .csv import percentiles, request_us
from .measuring import OVER, UNSTABLE
from .model import ModelDescription
from .options import Options
from .session import Listener

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BUSY_CORES = 0.9
"""Of each process of the generator. Above it, the generator may be the bottleneck."""
_MAX_ERRORS_SHOWN = 5


class Console(Listener):
    """Prints a run: results to `out`, errors to `err`."""

    def __init__(self, options: Options, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._options = options
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._bars = _Bars(options, self._out) if options.progress and self._out.isatty() else None
        self._windows = 0
        self._caller_figures: set[str] = set()

    def on_run_start(self, document: Document, description: ModelDescription) -> None:
        self._print_lines(*settings(self._options))
        if self._options.verbose > 1:
            self._print_lines(json.dumps(dataclasses.asdict(document.model), indent=1))

    def on_message(self, line: str) -> None:
        self._warn(line)

    def on_level_start(self, load: Offered) -> None:
        self._windows = 0
        if load.kind == "concurrency":
            self._print_lines(f"Request concurrency: {load.value:g}")
        else:
            self._print_lines(f"Request Rate: {load.value:g} inference requests per seconds")
        if self._bars:
            self._bars.begin(f"{load.kind} {load.value:g}")

    def on_progress(self, share: float) -> None:
        if self._bars:
            self._bars.show(self._windows, share)

    def on_window(self, window: Window, client: Client) -> None:
        self._windows += 1
        if self._options.verbose:
            self._print_lines(pass_line(self._options, self._windows, client))

    def on_level_end(self, level: Level) -> None:
        if self._bars:
            self._bars.end()
        if level.settled:
            self._print_lines(*level_lines(self._options, level))
        if level.ended:
            self._warn(ended_line(self._options, level))
        for note in level.notes:
            if self._options.verbose or note not in self._caller_figures:
                self._print_lines(f"  {note}")
        self._caller_figures.update(level.notes)

    def close(self, document: Document) -> None:
        """Print the summary."""
        self._print_lines(*summary(self._options, document))

    def _print_lines(self, *lines: str) -> None:
        for line in lines:
            if self._bars is None or not self._bars.above(line):
                print(line, file=self._out, flush=True)

    def _warn(self, line: str) -> None:
        self._out.flush()
        print(line, file=self._err, flush=True)


class _Bars:
    """Progress: how many of a level's windows are over, and how much of the current one."""

    def __init__(self, options: Options, out: TextIO) -> None:
        self._trials = 1 if options.rule.total_requests else options.rule.trials
        self._out = out
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def begin(self, title: str) -> None:
        try:
            from rich.console import Console as Terminal
            from rich.progress import Progress
        except ImportError:
            return
        self._progress = Progress(console=Terminal(file=self._out), transient=True)
        self._task = self._progress.add_task(title, total=self._trials)
        self._progress.start()

    def show(self, windows: int, share: float) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=windows + share)

    def above(self, line: str) -> bool:
        """Print a line above the bar. Returns: whether there is a bar."""
        if self._progress is not None:
            self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        return self._progress is not None

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def settings(options: Options) -> list[str]:
    """Return the lines printed before the first level."""
    rule = options.rule
    lines = ["*** Measurement Settings ***", f"  Batch size: {options.input.batch}", "  Service Kind: TRITON"]
    if rule.total_requests:
        lines.append(f"  Sending a total of {rule.total_requests} requests")
    else:
        lines.append(f'  Using "{"count" if rule.by_count else "time"}_windows" mode for stabilization')
        lines.append(f"  Stabilizing using {f'p{rule.percentile}' if rule.percentile else 'average'} latency")
        lines.append(
            f"  Minimum number of samples in each window: {rule.requests}"
            if rule.by_count
            else f"  Measurement window: {rule.interval_ms} msec"
        )
    levels = options.concurrency or options.rate
    if levels and levels.end != 1:
        lines.append(f"  Latency limit: {rule.threshold_ms:g} msec")
        max_load = max(levels.start, levels.end)
        if levels.end and options.concurrency:
            lines.append(f"  Concurrency limit: {max_load:g} concurrent requests")
        elif levels.end:
            lines.append(f"  Request Rate limit: {max_load:g} requests per seconds")
    if options.rate:
        kind = "poisson" if options.poisson else "uniform"
        lines.append(f"  Using {kind} distribution on request generation")
    if options.binary_search:
        lines.append("  Using Binary Search algorithm")
    return [*lines, "  Using asynchronous calls for inference", ""]


def pass_line(options: Options, number: int, client: Client) -> str:
    """Format the line of one window."""
    percentile, latency = options.rule.percentile, client.latency_us
    if not latency:
        return f"  Pass [{number}] no request ended well. {_errors(client)}"
    figures = (
        f"p{percentile} latency: {latency[f'p{percentile}']:.0f} usec"
        if percentile
        else f"Avg latency: {latency['mean']:.0f} usec (std {latency['std']:.0f} usec). "
    )
    return f"  Pass [{number}] throughput: {client.rows_per_s:g} infer/sec. {figures}"


def level_lines(options: Options, level: Level) -> list[str]:
    """Format the results of a level."""
    lines = ["  Client: ", *_client_lines(options, level)]
    if level.server is not None:
        lines += ["  Server: ", *_server_lines(level.server, 1)]
    if options.collect_metrics:
        lines += ["  Server Prometheus Metrics: ", *_metric_lines(level)]
    if level.client.cores > BUSY_CORES * max(options.processes, 1):
        lines.append(
            f"[WARNING] the load generator used {level.client.cores:.2f} cores: it may be what is measured."
            " Give it more --processes."
        )
    return lines


def _client_lines(options: Options, level: Level) -> list[str]:
    client, latency = level.client, level.client.latency_us
    lines = [f"    Request count: {client.requests}", f"    Throughput: {client.rows_per_s:g} infer/sec"]
    if client.responses_per_s is not None:
        lines.append(f"    Response Throughput: {client.responses_per_s:g} infer/sec")
    if client.errors:
        lines.append(f"    {_errors(client)}")
    if not latency:
        return lines
    if client.late_us:
        late_us = client.late_us
        lines.append(
            f"    Sent late by: p50 {late_us['p50']:.0f} usec, p99 {late_us['p99']:.0f} usec (in the latencies below)"
        )
    if not options.rule.percentile:
        lines.append(f"    Avg latency: {latency['mean']:.0f} usec (standard deviation {latency['std']:.0f} usec)")
    lines += [f"    p{each} latency: {latency[f'p{each}']:.0f} usec" for each in percentiles(options)]
    name = "gRPC" if options.grpc else "HTTP"
    lines.append(f"    Avg {name} time: {request_us(level):.0f} usec")
    if options.target_ms:
        share_in_target = histograms.share_within(client.histogram, options.target_ms * 1e3)
        lines.append(
            f"    Goodput: {share_in_target * client.rows_per_s:g} infer/sec within {options.target_ms:g} msec"
        )
    lines.append(f"    Generator: {client.cpu_us_per_request:.1f} usec of CPU per request, {client.cores:.2f} cores")
    return lines


def _server_lines(server: ServerSide, depth: int) -> list[str]:
    indent = "  " * depth
    if not server.requests:
        return [f"{indent}  Request count: 0"]
    lines = [f"{indent}  Inference count: {server.inferences}", f"{indent}  Execution count: {server.executions}"]
    if server.cache_hits or server.cache_misses:
        lines += [
            f"{indent}  Cache hit count: {server.cache_hits}",
            f"{indent}  Cache miss count: {server.cache_misses}",
        ]
    lines.append(f"{indent}  Successful request count: {server.requests}")
    split = " + ".join(f"{name} {value:.0f} usec" for name, value in _server_parts(server))
    lines += [f"{indent}  Avg request latency: {server.request_us:.0f} usec ({split})", ""]
    if server.composing:
        lines.append(f"{indent}Composing models: ")
        for name, part in server.composing.items():
            lines += [f"{indent}{name}, version: {part.version}", *_server_lines(part, depth + 1)]
    return lines


def _server_parts(server: ServerSide) -> list[tuple[str, float]]:
    """Return the parts of a request's time in the server."""
    compute = [
        ("compute input", server.compute_input_us),
        ("compute infer", server.compute_infer_us),
        ("compute output", server.compute_output_us),
    ]
    computed_us = sum(us for _, us in compute)
    parts = [("overhead", server.overhead_us), ("queue", server.queue_us)]
    if server.cache_hits or server.cache_misses:
        ran = max(server.requests - server.cache_hits, 0)
        known_us = (
            ran * computed_us + server.cache_hits * server.cache_hit_us + server.cache_misses * server.cache_miss_us
        )
        return [*parts, ("cache hit/miss", known_us / max(ran + server.cache_hits, 1))]
    return [*parts, ("compute", computed_us)] if server.composing else [*parts, *compute]


def _metric_lines(level: Level) -> list[str]:
    lines = []
    for title, figure, scale, unit in (
        ("Avg GPU Utilization", "utilization", 100.0, "%"),
        ("Avg GPU Power Usage", "power_w", 1.0, " watts"),
        ("Max GPU Memory Usage", "memory_bytes", 1.0, " bytes"),
        ("Total GPU Memory", "memory_total_bytes", 1.0, " bytes"),
    ):
        lines.append(f"    {title}:")
        lines += [
            f"      {uuid} : {figures[figure] * scale:.12g}{unit}"
            for uuid, figures in sorted(level.gpus.items())
            if figure in figures
        ]
    return lines


def ended_line(options: Options, level: Level) -> str:
    """Say why a level did not end normally."""
    rule = options.rule
    if level.ended == OVER:
        return f"Measured latency went over the set limit of {rule.threshold_ms:g} msec. "
    if level.ended != UNSTABLE:
        where = f"{level.offered.kind} {level.offered.value:g}"
        return f"{where}: {level.ended.rstrip('.')}. {_errors(level.client)}".rstrip()
    if level.offered.kind != "concurrency":
        return "Failed to obtain stable measurement."
    flag = "--measurement-request-count" if rule.by_count else "--measurement-interval"
    return (
        f"Failed to obtain stable measurement within {len(level.windows)} measurement windows for concurrency "
        f"{level.offered.value:g}. Please try to increase the {flag}."
    )


def _errors(client: Client) -> str:
    if not client.errors:
        return ""
    by_count = sorted(client.errors.items(), key=lambda each: -each[1])
    listed = "; ".join(f"{count} x {error_text}" for error_text, count in by_count[:_MAX_ERRORS_SHOWN])
    others_text = f"; and {len(by_count) - _MAX_ERRORS_SHOWN} other kinds" if len(by_count) > _MAX_ERRORS_SHOWN else ""
    return f"Errors: {sum(client.errors.values())} ({listed}{others_text})"


def summary(options: Options, document: Document) -> list[str]:
    """Return the line of each level, marked if the level is not stable."""
    measured_levels = [level for level in document.levels if level.settled and level.client.latency_us]
    if not measured_levels:
        return []
    percentile = options.rule.percentile
    lines = [f"Inferences/Second vs. Client {f'p{percentile}' if percentile else 'Average'} Batch Latency"]
    name = f"p{percentile}" if percentile else "mean"
    for level in measured_levels:
        kind = "Concurrency" if level.offered.kind == "concurrency" else "Request Rate"
        marked = f" [{level.ended}]" if level.ended else ""
        if failed := sum(level.client.errors.values()):
            marked += f" [{failed} requests failed]"
        lines.append(
            f"{kind}: {level.offered.value:g}, throughput: {level.client.rows_per_s:g} infer/sec, "
            f"latency {level.client.latency_us[name]:.0f} usec{marked}"
        )
    return lines
