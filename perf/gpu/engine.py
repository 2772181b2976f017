"""The Engine: rows/s with enough callers, compared with ONNX Runtime offline; with two Bindings and with one."""

from __future__ import annotations

from collections.abc import Iterator

import uvloop

from .context import CheckContext, best_rate
from .engine_driver import REQUESTS_PER_BATCH, DriveResult, LoadOptions, drive, inputs_of, served
from .models import FP16, Variant
from .rows import Row, at_least, failed

WANTED = 0.95
_SECONDS = 1.5
ROWS_EACH = {"cnn": 1, "encoder": 1, "mlp": 16}
"""Rows of a request: as clients send them, but more if a row costs next to nothing."""
HELD = ("cnn", "encoder")


def rate(variant: Variant) -> str:
    """Return the name of the Row with a model's rate."""
    return f"{variant.name}: engine"


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the rate of each model, with overlapping copies; for the most important ones also without."""
    for kind, precision in context.measured():
        variant = context.variant(kind, precision)
        load_options = LoadOptions(max(context.best_rows(variant), ROWS_EACH[kind]))
        try:
            driven = uvloop.run(_driven(context, variant, load_options))
            yield from _rows(context, variant, driven)
            if precision == FP16:
                plain = uvloop.run(_driven(context, variant, LoadOptions(load_options.rows, overlap=False)))
                note = f"overlapping: {driven.rows_per_s / max(plain.rows_per_s, 1e-9):.2f} times that"
                yield Row("engine", f"{variant.name}: engine, one Binding", plain.rows_per_s, "rows/s", note=note)
        except Exception as error:  # noqa: BLE001 - the other models may do
            yield failed("engine", variant.name, error)


def _rows(context: CheckContext, variant: Variant, driven: DriveResult) -> Iterator[Row]:
    note = f"{driven.rows_per_batch:.0f} rows a batch, p50 {driven.ms(0.5):.2f} ms"
    if context.on_gpu:
        note = f"{note}, device busy {driven.busy:.0%} of the time"
    yield Row("engine", rate(variant), driven.rows_per_s, "rows/s", note=note)
    offline = context.figure_of(best_rate(variant))
    if offline:
        offline_ratio, label = driven.rows_per_s / offline, f"{variant.name}: engine to offline"
        is_judged = variant.kind in HELD
        yield (
            context.judged(at_least("engine", label, offline_ratio, WANTED))
            if is_judged
            else Row("engine", label, offline_ratio)
        )


async def _driven(context: CheckContext, variant: Variant, load_options: LoadOptions) -> DriveResult:
    rows = ROWS_EACH[variant.kind]
    callers = max(REQUESTS_PER_BATCH * load_options.rows // rows, 2)
    async with served(context, variant, load_options) as (engine, model):
        return await drive(engine, model, inputs_of(model, variant.inputs(rows)), callers, context.seconds(_SECONDS))
