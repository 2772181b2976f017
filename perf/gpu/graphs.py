"""CUDA graphs: one caller, small batches, with graphs and without."""

from __future__ import annotations

from collections.abc import Iterator

import uvloop

from .engines import Driven, How, drive, inputs_of, served
from .models import FP16, Variant
from .rows import Row, failed
from .world import World

BATCHES = (1, 4)
KINDS = ("encoder", "mlp", "cnn")
_SECONDS = 0.5


def report(world: World) -> Iterator[Row]:
    """Give the median latency of each model and small batch, without graphs and with."""
    for kind in KINDS:
        variant = world.variant(kind, FP16)
        found: dict[str, dict[int, Driven]] = {}
        for word, value in (("without", "0"), ("with", "1")):
            try:
                found[word] = uvloop.run(_driven(world, variant, value))
            except Exception as error:  # noqa: BLE001 - the other models may do
                yield failed("graphs", f"{variant.name}: {word} graphs", error)
        yield from _rows(variant, found)


def _rows(variant: Variant, found: dict[str, dict[int, Driven]]) -> Iterator[Row]:
    for rows in BATCHES:
        times = {word: each[rows].ms(0.5) for word, each in found.items()}
        for word, took_ms in times.items():
            gain = f"{times['without'] / took_ms:.2f} times as fast" if word == "with" and "without" in times else ""
            yield Row("graphs", f"{variant.name}: batch {rows}, {word} graphs, p50", took_ms, "ms", note=gain)


async def _driven(world: World, variant: Variant, graphs: str) -> dict[int, Driven]:
    how = How(max(BATCHES), options={"penstock.gpu_graphs": graphs, "penstock.rows": ",".join(map(str, BATCHES))})
    async with served(world, variant, how) as (engine, model):
        return {
            rows: await drive(engine, model, inputs_of(model, variant.inputs(rows)), 1, world.seconds(_SECONDS))
            for rows in BATCHES
        }
