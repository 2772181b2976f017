"""Served: rows/s over each transport compared with ONNX Runtime alone, and the latency below the knee."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.perf import processes
from penstock.perf.generator.fleet import Fleet
from penstock.perf.generator.orders import Load, Window

from .engine import HELD, ROWS_EACH
from .models import FP16, Variant
from .rows import Row, at_least, at_most, failed
from .servers import WAYS, Server, Way, config_of, driving, loaded, serving
from .world import World, best_rate

WANTED, TIMES, SHARE = 0.90, 4.0, 0.8
_SECONDS, _LEVEL_SECONDS, _PACED_SECONDS = 1.5, 0.4, 3.0
_DEEP = 4
FRONTS = 4
"""Front ends in a second server, for models whose requests are more than one process can handle."""
_MOST_SLOTS = 1024
_SIZES_TOLD = 8


def report(world: World) -> Iterator[Row]:
    """Yield each model's rate over each transport; for most models, the best one's latency below the knee."""
    with serving(world, "served") as server:
        for variant in [world.variant(*each) for each in world.measured()]:
            yield from _of_model(world, server, variant, WAYS if world.on_gpu else WAYS[:-1])
    if world.quick:
        return
    with serving(world, "fronts", f"--http-workers={FRONTS}") as server:
        for variant in [world.variant(kind, FP16) for kind in HELD]:
            yield from _of_model(world, server, variant, (replace(WAYS[0], name=f"HTTP binary, {FRONTS} fronts"),))


def _of_model(world: World, server: Server, variant: Variant, ways: Sequence[Way]) -> Iterator[Row]:
    rows = max(world.best_rows(variant), ROWS_EACH[variant.kind])
    try:
        world.file(variant)
        server.control.load(variant.name, config_of(world, variant.name, rows))
        rates = yield from _measured(world, server, variant, ways)
        # half precision is what is served if latency matters
        if rates and len(ways) > 1 and variant.kind in HELD and variant.precision == FP16:
            far = [way for way in rates if way.shared_memory != "cuda"]
            best = max(far or rates, key=lambda way: rates[way])
            yield from _latency(world, server, variant, best)
            if world.on_gpu:
                no_graphs = {"optimization": {"cuda": {"graphs": False}}}
                server.control.load(variant.name, config_of(world, variant.name, rows, **no_graphs))
                yield from _latency(world, server, variant, best, ", no graphs")
        server.control.unload(variant.name)
    except Exception as error:  # noqa: BLE001 - the other models may do
        yield failed("served", variant.name, error)


def _measured(
    world: World, server: Server, variant: Variant, ways: Sequence[Way]
) -> Generator[Row, None, dict[Way, float]]:  # fmt: skip
    each = ROWS_EACH[variant.kind]
    slots = min(max(_DEEP * world.best_rows(variant) // each, 2), _MOST_SLOTS)
    rates: dict[Way, float] = {}
    for way in ways:
        what = f"{variant.name}: {way.name}"
        try:
            with driving(world, server, variant, way, rows=each, slots=slots) as running:
                window = loaded(running, Load(concurrency=slots), world.seconds(_SECONDS))
        except Exception as error:  # noqa: BLE001 - the other ways may do
            yield failed("served", what, error)
            continue
        rates[way] = each * len(window.ends_ns) / window.seconds
        errors = f", {window.errors.total()} errors: {window.errors.most_common(1)}" if window.errors else ""
        note = f"p50 {np.median(window.latencies_ns) / 1e6:.2f} ms, clients {window.cpu_s / window.seconds:.1f} cores"
        yield Row("served", what, rates[way], "rows/s", held=False if errors else None, note=note + errors)
    yield from _ratio(world, variant, rates)
    return rates


def _ratio(world: World, variant: Variant, rates: dict[Way, float]) -> Iterator[Row]:
    """Compare the better of HTTP and system shared memory with offline."""
    offline = world.found(best_rate(variant))
    counted = {way: rate for way, rate in rates.items() if way.shared_memory != "cuda" and not way.grpc}
    if not offline or not counted:
        return
    way = max(counted, key=lambda way: counted[way])
    fronts = ", with fronts" if "fronts" in way.name else ""
    what, share = f"{variant.name}: server to offline{fronts}", counted[way] / offline
    row = at_least("served", what, share, WANTED, note=way.name)
    # the front ends are measured to see what is left if one process is not enough for a server
    yield world.judged(row) if variant.kind in HELD and not fronts else replace(row, held=None, wanted="")


def _latency(world: World, server: Server, variant: Variant, way: Way, setting: str = "") -> Iterator[Row]:
    """Compare the p99 of an open loop at 80% of the knee with the median of one request at a time, of one row each.

    The knee is that of a run (docs/glossary.md): of closed loops of 1, 2, 4 ... requests, the one with the greatest
    ratio of throughput to mean latency. The same at 80% of the greatest throughput is reported but not judged: requests
    that arrive during one run form the next, and most wait for two runs of many rows.
    """
    slots = min(_DEEP * world.best_rows(variant), _MOST_SLOTS)
    with driving(world, server, variant, way, rows=1, slots=slots) as running:
        curve = [
            (number, loaded(running, Load(concurrency=number), world.seconds(_LEVEL_SECONDS)))
            for number in (1 << bit for bit in range(slots.bit_length()))
        ]
        one_ms = float(np.median(curve[0][1].latencies_ns)) / 1e6
        yield Row("served", f"{variant.name}: one request alone, p50{setting}", one_ms, "ms", note=way.name)
        number, knee = max(curve, key=lambda level: _per_s(level[1]) / float(level[1].latencies_ns.mean()))
        at_knee = f"the knee: {_per_s(knee):,.0f}/s of {number} at once"
        for where, full_per_s, note in (
            ("the knee", _per_s(knee), at_knee),
            ("the greatest rate", max(_per_s(window) for _, window in curve), ""),
        ):
            p99_ms, told = _paced(world, server, variant, running, SHARE * full_per_s)
            what = f"{variant.name}: p99 at 80% of {where} to one alone{setting}"
            row = at_most("served", what, p99_ms / one_ms, TIMES, note=f"{told} over {way.name}; {note}".rstrip("; "))
            judged = note and not setting
            yield world.judged(row) if judged else replace(row, held=None, wanted="")


def _per_s(window: Window) -> float:
    return len(window.ends_ns) / window.seconds


def _paced(
    world: World, server: Server, variant: Variant, running: Fleet, rate_per_s: float
) -> tuple[float, str]:  # fmt: skip
    """Run an open loop at this rate. Returns: the p99 in ms, and a note about it."""
    before, stolen_s = server.batches(variant.name), processes.stolen_s()
    window = loaded(running, Load(rate_per_s=rate_per_s, poisson=True, seed=1), world.seconds(_PACED_SECONDS))
    sizes, stolen_s = _sizes(server.batches(variant.name), before), processes.stolen_s() - stolen_s
    p50_ms, p99_ms = (float(each) / 1e6 for each in np.quantile(window.latencies_ns, (0.5, 0.99)))
    late_ms = float(np.quantile(window.late_ns, 0.99)) / 1e6 if len(window.late_ns) else 0.0
    noise = f"{_usual_ms(window, 0.99):.2f} in the median tenth, {stolen_s:.1f} s of CPU stolen"
    times = f"p50 {p50_ms:.2f} and p99 {p99_ms:.2f} ms ({noise}) at {rate_per_s:,.0f} requests/s"
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
    most = sorted(sorted(ran, key=lambda rows: -ran[rows][1])[:_SIZES_TOLD])
    told = ", ".join(f"{rows} x{ran[rows][0]} of {ran[rows][1] / ran[rows][0]:.2f}" for rows in most)
    return f"{len(ran)} sizes in {sum(count for count, _ in ran.values())} batches: {told} ms"
