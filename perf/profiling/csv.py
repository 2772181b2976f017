"""The CSV report: perf_analyzer's columns, order, units and rounding, for the levels that were stable.

Source: perf_analyzer's report_writer.cc. Times are truncated to whole microseconds. The time a client library spends on
sending and receiving is not measured separately: those columns are 0, and their time is in the adjacent columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.perf.reports.document import Document, Level, ServerSide

from .options import Options

_GPU = ("Avg GPU Utilization", "Avg GPU Power Usage", "Max GPU Memory Usage", "Total GPU Memory")
_GPU_FIGURES = ("utilization", "power_w", "memory_bytes", "memory_total_bytes")
_PERCENTILES = {50, 90, 95, 99}


def write(document: Document, options: Options, path: Path) -> None:
    """Write the report, and one file for each composing model beside it. Raises: OSError."""
    path.write_text(text(document, options), "utf-8")
    first_server = next((level.server for level in _reported(document) if level.server), None)
    for name, composing_model in first_server.composing.items() if first_server else ():
        path.with_name(f"{name}_v{composing_model.version}.{path.name}").write_text(
            composing(document, options, name), "utf-8"
        )


def text(document: Document, options: Options) -> str:
    """Format a run's levels, in order of throughput."""
    cached, served = _cached(document), _served(document)
    gpus = options.collect_metrics and options.verbose_csv
    head = [
        _first(options),
        "Inferences/Second",
        *(["Response Throughput"] if _decoupled(document) else []),
        "Client Send",
        *(_server_head(cached) if served else []),
        "Client Recv",
        *(f"p{each} latency" for each in percentiles(options)),
    ]
    if options.verbose_csv:
        head += [*([] if options.rule.percentile else ["Avg latency"]), "request/response", "response wait"]
    rows = [head + list(_GPU if gpus else ())]
    for level in _reported(document):
        latency = level.client.latency_us
        row = [f"{level.offered.value:g}", f"{level.client.rows_per_s:g}"]
        row += [f"{_responses_per_s(level):g}"] if _decoupled(document) else []
        row += ["0", *(_server(level.server, latency["mean"], cached) if served else []), "0"]
        row += [_us(latency[f"p{each}"]) for each in percentiles(options)]
        if options.verbose_csv:
            row += [*([] if options.rule.percentile else [_us(latency["mean"])]), "0", _us(request_us(level))]
        rows.append(row + [_gpu(level, figure) for figure in (_GPU_FIGURES if gpus else ())])
    return _lines(rows)


def composing(document: Document, options: Options, name: str) -> str:
    """Format a composing model's part in each level: its share of the requests, and its own times."""
    cached = _cached(document)
    rows = [[_first(options), "Inferences/Second", "Client Send", *_server_head(cached), "Client Recv"]]
    for level in _reported(document):
        ensemble = level.server
        composing_model = ensemble.composing.get(name) if ensemble else None
        if ensemble is None or composing_model is None:
            continue
        per_s = level.client.rows_per_s * composing_model.requests / max(ensemble.requests, 1)
        columns = _server(composing_model, composing_model.request_us, cached)
        rows.append([f"{level.offered.value:g}", f"{per_s:g}", "0", *columns, "0"])
    return _lines(rows)


def percentiles(options: Options) -> list[int]:
    """Return the percentiles to report: the usual ones, and the one that decides."""
    return sorted(_PERCENTILES | {options.rule.percentile} - {0})


def request_us(level: Level) -> float:
    """Return the mean latency from sending: in an open loop, requests may have been sent late."""
    late_us = level.client.late_us or {}
    return max(level.client.latency_us["mean"] - late_us.get("mean", 0.0), 0.0)


def _reported(document: Document) -> list[Level]:
    reported = [level for level in document.levels if level.stable and not level.ended]
    return sorted(reported, key=lambda level: level.client.rows_per_s)


def _first(options: Options) -> str:
    return "Concurrency" if options.concurrency else "Request Rate"


def _server_head(cached: bool) -> list[str]:
    cache = ["Server Cache Hit", "Server Cache Miss"] if cached else []
    compute = [f"Server Compute {each}" for each in ("Input", "Infer", "Output")]
    return ["Network+Server Send/Recv", "Server Queue", *compute, *cache]


def _server(server: ServerSide | None, total_us: float, cached: bool) -> list[str]:
    """Return the server's columns; the first is what remains of `total_us`."""
    if server is None:
        return [_us(total_us), *["0"] * (6 if cached else 4)]
    cache = [server.cache_hit_us, server.cache_miss_us] if cached else []
    parts = [server.queue_us, server.compute_input_us, server.compute_infer_us, server.compute_output_us, *cache]
    return [_us(max(total_us - sum(parts), 0.0)), *map(_us, parts)]


def _cached(document: Document) -> bool:
    servers = [level.server for level in document.levels if level.server]
    enabled = document.model.config.get("response_cache") or {}
    return bool(enabled.get("enable")) or any(each.cache_hits or each.cache_misses for each in servers)


def _decoupled(document: Document) -> bool:
    policy = document.model.config.get("model_transaction_policy") or {}
    return bool(policy.get("decoupled"))


def _responses_per_s(level: Level) -> float:
    per_s = level.client.responses_per_s
    return level.client.requests_per_s if per_s is None else per_s


def _served(document: Document) -> bool:
    return "statistics" in document.server.get("extensions", ()) or any(level.server for level in document.levels)


def _gpu(level: Level, figure: str) -> str:
    values = {uuid: gpu_figures[figure] for uuid, gpu_figures in sorted(level.gpus.items()) if figure in gpu_figures}
    is_whole_number = figure.endswith("_bytes")
    return "".join(f"{uuid}:{int(value) if is_whole_number else f'{value:g}'};" for uuid, value in values.items())


def _us(value: float) -> str:
    return str(int(value))


def _lines(rows: Iterable[list[str]]) -> str:
    return "".join(",".join(row) + "\n" for row in rows)
