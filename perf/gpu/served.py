"""Served: rows/s over each transport compared with ONNX Runtime alone, and the latency below the knee."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.perf import processes
from penstock.perf.generator.fleet import Fleet
from penstock.perf.generator.orders import Load, Window

from .context import CheckContext, best_rate
from .engine import HELD, ROWS_EACH
from .models import FP16, Variant
from .rows import Row, at_least, at_most, failed
from .server_driver import TRANSPORTS, Server, Transport, config_of, driving, loaded, serving

WANTED, TIMES, SHARE = 0.90, 4.0, 0.8
_SECONDS, _LEVEL_SECONDS, _PACED_SECONDS = 1.5, 0.4, 3.0
_DEEP = 4
FRONTS = 4
"""Front ends in a second server, for models whose requests are more than one process can handle."""
_MAX_SLOTS = 1024
_MAX_SIZES_LISTED = 8


def report(context: CheckContext) -> Iterator[Row]:
    """Yield each model's rate over each transport; for most models, the best one's latency below the knee."""
    with serving(context, "served") as server:
        for variant in [context.variant(*each) for each in context.measured()]:
            yield from _of_model(context, server, variant, TRANSPORTS if context.on_gpu else TRANSPORTS[:-1])
    if context.quick:
        return
    with serving(context, "fronts", f"--http-workers={FRONTS}") as server:
        for variant in [context.variant(kind, FP16) for kind in HELD]:
            yield from _of_model(
                context, server, variant, (replace(TRANSPORTS[0], name=f"HTTP binary, {FRONTS} fronts"),)
            )


def _of_model(
    context: CheckContext, server: Server, variant: Variant, transports: Sequence[Transport]
) -> Iterator[Row]:
    rows = max(context.best_rows(variant), ROWS_EACH[variant.kind])
    try:
        context.file(variant)
        server.control.load(variant.name, config_of(context, variant.name, rows))
        rates = yield from _measured(context, server, variant, transports)
        # half precision is what is served if latency matters
        if rates and len(transports) > 1 and variant.kind in HELD and variant.precision == FP16:
            remote_transports = [transport for transport in rates if transport.shared_memory != "cuda"]
            best = max(remote_transports or rates, key=lambda transport: rates[transport])
            yield from _latency(context, server, variant, best)
            if context.on_gpu:
                no_graphs = {"optimization": {"cuda": {"graphs": False}}}
                server.control.load(variant.name, config_of(context, variant.name, rows, **no_graphs))
                yield from _latency(context, server, variant, best, ", no graphs")
        server.control.unload(variant.name)
    except Exception as error:  # noqa: BLE001 - the other models may do
        yield failed("served", variant.name, error)


def _measured(
    context: CheckContext, server: Server, variant: Variant, transports: Sequence[Transport]
) -> Generator[Row, None, dict[Transport, float]]:  # fmt: skip
    rows_each = ROWS_EACH[variant.kind]
    slots = min(max(_DEEP * context.best_rows(variant) // rows_each, 2), _MAX_SLOTS)
    rates: dict[Transport, float] = {}
    for transport in transports:
        label = f"{variant.name}: {transport.name}"
        try:
            with driving(context, server, variant, transport, rows=rows_each, slots=slots) as running:
                window = loaded(running, Load(concurrency=slots), context.seconds(_SECONDS))
        except Exception as error:  # noqa: BLE001 - the other ways may do
            yield failed("served", label, error)
            continue
        rates[transport] = rows_each * len(window.ends_ns) / window.seconds
        errors = f", {window.errors.total()} errors: {window.errors.most_common(1)}" if window.errors else ""
        note = f"p50 {np.median(window.latencies_ns) / 1e6:.2f} ms, clients {window.cpu_s / window.seconds:.1f} cores"
        yield Row("served", label, rates[transport], "rows/s", held=False if errors else None, note=note + errors)
    yield from _ratio(context, variant, rates)
    return rates


def _ratio(context: CheckContext, variant: Variant, rates: dict[Transport, float]) -> Iterator[Row]:
    """Compare the better of HTTP and system shared memory with offline."""
    offline = context.figure_of(best_rate(variant))
    comparable_rates = {
        transport: rate for transport, rate in rates.items() if transport.shared_memory != "cuda" and not transport.grpc
    }
    if not offline or not comparable_rates:
        return
    transport = max(comparable_rates, key=lambda transport: comparable_rates[transport])
    fronts = ", with fronts" if "fronts" in transport.name else ""
    label, offline_ratio = f"{variant.name}: server to offline{fronts}", comparable_rates[transport] / offline
    row = at_least("served", label, offline_ratio, WANTED, note=transport.name)
    # the front ends are measured to see what is left if one process is not enough for a server
    yield context.judged(row) if variant.kind in HELD and not fronts else replace(row, held=None, wanted="")


def _latency(
    context: CheckContext, server: Server, variant: Variant, transport: Transport, setting: str = ""
) -> Iterator[Row]:
    """Compare the p99 of an open loop at 80% of the knee with the median of one request at a time, of one row each.

    The knee is that of a run (docs/glossary.md): of closed loops of 1, 2, 4 ... requests, the one with the greatest
    ratio of throughput to mean latency. The same at 80% of the greatest throughput is reported but not judged: requests
    that arrive during one run form the next, and most wait for two runs of many rows.
    """
    slots = min(_DEEP * context.best_rows(variant), _MAX_SLOTS)
    with driving(context, server, variant, transport, rows=1, slots=slots) as running:
        curve = [
            (number, loaded(running, Load(concurrency=number), context.seconds(_LEVEL_SECONDS)))
            for number in (1 << exponent for exponent in range(slots.bit_length()))
        ]
        one_ms = float(np.median(curve[0][1].latencies_ns)) / 1e6
        yield Row("served", f"{variant.name}: one request alone, p50{setting}", one_ms, "ms", note=transport.name)
        number, knee = max(curve, key=lambda level: _per_s(level[1]) / float(level[1].latencies_ns.mean()))
        at_knee = f"the knee: {_per_s(knee):,.0f}/s of {number} at once"
        for where, full_per_s, knee_note in (
            ("the knee", _per_s(knee), at_knee),
            ("the greatest rate", max(_per_s(window) for _, window in curve), ""),
        ):
            p99_ms, note = _paced(context, server, variant, running, SHARE * full_per_s)
            label = f"{variant.name}: p99 at 80% of {where} to one alone{setting}"
            row = at_most(
                "served", label, p99_ms / one_ms, TIMES, note=f"{note} over {transport.name}; {knee_note}".rstrip("; ")
            )
            judged = knee_note and not setting
            yield context.judged(row) if judged else replace(row, held=None, wanted="")


def _per_s(window: Window) -> float:
    return len(window.ends_ns) / window.seconds


def _paced(
    context: CheckContext, server: Server, variant: Variant, running: Fleet, rate_per_s: float
) -> tuple[float, str]:  # fmt: skip
    """Run an open loop at this rate. Returns: the p99 in ms, and a note about it."""
    before, stolen_s = server.batches(variant.name), processes.stolen_s()
    window = loaded(running, Load(rate_per_s=rate_per_s, poisson=True, seed=1), context.seconds(_PACED_SECONDS))
    sizes, stolen_s = _sizes(server.batches(variant.name), before), processes.stolen_s() - stolen_s
    p50_ms, p99_ms = (float(each) / 1e6 for each in np.quantile(window.latencies_ns, (0.5, 0.99)))
    late_ms = float(np.quantile(window.late_ns, 0.99)) / 1e6 if len(window.late_ns) else 0.0
    noise_note = f"{_usual_ms(window, 0.99):.2f} in the median tenth, {stolen_s:.1f} s of CPU stolen"
    times = f"p50 {p50_ms:.2f} and p99 {p99_ms:.2f} ms ({noise_note}) at {rate_per_s:,.0f} requests/s"
    return p99_ms, f"{times}; the load was {late_ms:.2f} ms late at p99; {sizes}"


def _usual_ms(window: Window, quantile: float) -> float:
    """Return the median over the tenths of a window of a latency quantile: a brief disturbance does not count."""
    tenths = np.array_split(window.latencies_ns[np.argsort(window.ends_ns)], 10)
    return float(np.median([np.quantile(each, quantile) for each in tenths if len(each)])) / 1e6


def _sizes(after: Mapping[int, tuple[int, int]], before: Mapping[int, tuple[int, int]]) -> str:
    """Describe the batches that ran in between: the sizes that took most of the time, their counts, and ms of one."""
    ran = {}
    for rows, (count, took_ns) in after.items():
        count_before, took_before = before.get(rows, (0, 0))
        if count > count_before:
            ran[rows] = (count - count_before, (took_ns - took_before) / 1e6)
    largest = sorted(sorted(ran, key=lambda rows: -ran[rows][1])[:_MAX_SIZES_LISTED])
    described = ", ".join(f"{rows} x{ran[rows][0]} of {ran[rows][1] / ran[rows][0]:.2f}" for rows in largest)
    return f"{len(ran)} sizes in {sum(count for count, _ in ran.values())} batches: {described} ms"
