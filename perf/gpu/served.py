"""Served: rows/s over each transport beside ONNX Runtime alone, and the latency below the knee beside one request's."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from penstock.perf import processes
from penstock.perf.generator.orders import Load, Window

from .engine import HELD, ROWS_EACH
from .models import FP16, Variant
from .rows import Row, at_least, at_most, failed
from .servers import WAYS, Server, Way, config_of, driving, loaded, serving
from .world import World, best_rate

WANTED, TIMES, SHARE = 0.90, 4.0, 0.8
_SECONDS, _PACED_SECONDS = 1.5, 3.0
_DEEP = 4
FRONTS = 4
"""Processes that take requests, in a second server: for models whose requests are more than one takes."""
_MOST_SLOTS = 1024
_SIZES_TOLD = 8


def report(world: World) -> Iterator[Row]:
    """Give each model's rate over each transport; of the best one for most models, the latency at 80% of that."""
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
        # half precision is what is served where latency counts
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
    """Hold the better of HTTP and system shared memory against offline."""
    offline = world.found(best_rate(variant))
    counted = {way: rate for way, rate in rates.items() if way.shared_memory != "cuda" and not way.grpc}
    if not offline or not counted:
        return
    way = max(counted, key=lambda way: counted[way])
    fronts = ", with fronts" if "fronts" in way.name else ""
    what, share = f"{variant.name}: server to offline{fronts}", counted[way] / offline
    row = at_least("served", what, share, WANTED, note=way.name)
    # the fronts are measured to see what is left in a server that has too little of one process
    yield world.judged(row) if variant.kind in HELD and not fronts else replace(row, held=None, wanted="")


def _latency(world: World, server: Server, variant: Variant, way: Way, setting: str = "") -> Iterator[Row]:
    """Hold the p99 of an open loop at 80% of the knee against the median of one request at a time.

    The knee is what a closed loop of enough requests gets, of one row each.
    """
    slots = _DEEP * world.best_rows(variant)
    with driving(world, server, variant, way, rows=1, slots=min(slots, _MOST_SLOTS)) as running:
        alone = loaded(running, Load(concurrency=1), world.seconds(_SECONDS / 2))
        one_ms = float(np.median(alone.latencies_ns)) / 1e6
        yield Row("served", f"{variant.name}: one request alone, p50{setting}", one_ms, "ms", note=way.name)
        full = loaded(running, Load(concurrency=min(slots, _MOST_SLOTS)), world.seconds(_SECONDS))
        rate = SHARE * len(full.ends_ns) / full.seconds
        before, stolen_s = server.batches(variant.name), processes.stolen_s()
        window = loaded(running, Load(rate_per_s=rate, poisson=True, seed=1), world.seconds(_PACED_SECONDS))
        sizes, stolen_s = _sizes(server.batches(variant.name), before), processes.stolen_s() - stolen_s
    p99_ms = float(np.quantile(window.latencies_ns, 0.99)) / 1e6
    late_ms = float(np.quantile(window.late_ns, 0.99)) / 1e6 if len(window.late_ns) else 0.0
    p50_ms = float(np.median(window.latencies_ns)) / 1e6
    times = f"p50 {p50_ms:.2f} and p99 {p99_ms:.2f} ms at {rate:,.0f} requests/s over {way.name}"
    noise = f"{_usual_ms(window, 0.99):.2f} in the median tenth, {stolen_s:.1f} s of CPU stolen"
    note = f"{times} ({noise}); the load was {late_ms:.2f} ms late at p99; {sizes}"
    what = f"{variant.name}: p99 at 80% of the knee to one alone{setting}"
    row = at_most("served", what, p99_ms / one_ms, TIMES, note=note)
    yield replace(row, held=None, wanted="") if setting else world.judged(row)


def _usual_ms(window: Window, quantile: float) -> float:
    """Give a quantile of the latency as it is in most tenths of a window, whatever held the machine up in others."""
    tenths = np.array_split(window.latencies_ns[np.argsort(window.ends_ns)], 10)
    return float(np.median([np.quantile(each, quantile) for each in tenths if len(each)])) / 1e6


def _sizes(after: Mapping[int, tuple[int, int]], before: Mapping[int, tuple[int, int]]) -> str:
    """Say which batches ran in between: the sizes that took most of the time, how many of each, and ms of one."""
    ran = {}
    for rows, (count, took_ns) in after.items():
        count_before, took_before = before.get(rows, (0, 0))
        if count > count_before:
            ran[rows] = (count - count_before, (took_ns - took_before) / 1e6)
    most = sorted(sorted(ran, key=lambda rows: -ran[rows][1])[:_SIZES_TOLD])
    told = ", ".join(f"{rows} x{ran[rows][0]} of {ran[rows][1] / ran[rows][0]:.2f}" for rows in most)
    return f"{len(ran)} sizes in {sum(count for count, _ in ran.values())} batches: {told} ms"
