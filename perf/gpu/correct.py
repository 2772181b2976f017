"""Correctness: answers of every model and precision compared with ONNX Runtime's on the CPU, in single precision.

Requests of odd sizes are sent all at once, so that they share batches of many sizes, two Bindings are in flight, and
each answer's rows lie at a different place in the batch. A row that was mixed up or overwritten deviates by about its
own norm.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import uvloop

from penstock.backends.backend import Array

from .context import KINDS, CheckContext
from .engine_driver import LoadOptions, inputs_of, served
from .models import BF16, FP16, FP32, Tensor, Variant, bf16_to_fp32
from .rows import Row, at_most, failed

TOLERANCE: Mapping[str, float] = MappingProxyType({FP32: 5e-3, FP16: 2e-2, BF16: 1e-1})
"""The greatest allowed error: the norm of the difference relative to that of the reference. Single precision is
computed with 10 mantissa bits if the device's matrix units do so (tf32).
"""
SIZES = (1, 3, 5, 7, 2, 11, 1, 1)
"""Rows of the requests, repeated."""
_REQUESTS, POOL, _ROWS = 48, 24, 16
CHECKED = (*((kind, precision) for kind in KINDS for precision in (FP32, FP16)), ("mlp", BF16))
SETTINGS: Mapping[str, LoadOptions] = MappingProxyType(
    {
        "graphs": LoadOptions(_ROWS, options={"penstock.gpu_graphs": "1", "penstock.rows": "1,2,4,8,16"}),
        "no graphs, 2 instances": LoadOptions(_ROWS, instances=2, options={"penstock.gpu_graphs": "0"}),
    }
)


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the greatest error of each model's answers, in each setting."""
    expected_of = cache(lambda kind: on_cpu(context, context.variant(kind, FP32)))
    for kind, precision in CHECKED:
        variant = context.variant(kind, precision)
        if precision == BF16 and not context.on_gpu:
            yield Row(
                "correct", f"{variant.name}: off by at most", "not run", note="ONNX Runtime has no such CPU kernels"
            )
            continue
        for name, load_options in SETTINGS.items():
            label = f"{variant.name}: off by at most, {name}"
            try:
                deviation, batches = uvloop.run(_max_errors(context, variant, load_options, expected_of))
            except Exception as error:  # noqa: BLE001 - the other models may do
                yield failed("correct", label, error)
            else:
                note = f"{_REQUESTS} requests in {batches} batches"
                yield at_most("correct", label, deviation, TOLERANCE[precision], note=note)


def on_cpu(context: CheckContext, variant: Variant, rows: int = POOL) -> Tensor:
    """Return the CPU's answers for the pool of rows."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    path = str(context.file(variant))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, variant.inputs(rows))
    return np.asarray(output, np.float64)


def max_error(answer: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `expected`, for the worst row; NaN is far off."""
    if answer.shape != expected.shape:
        return float("inf")
    differences = np.linalg.norm(answer - expected, axis=-1) / np.maximum(np.linalg.norm(expected, axis=-1), 1e-30)
    worst = float(differences.max())
    return worst if np.isfinite(worst) else float("inf")


def row_selections() -> list[Sequence[int]]:
    """Return the rows of the pool that each request has."""
    selections: list[Sequence[int]] = []
    start = 0
    for size in itertools.islice(itertools.cycle(SIZES), _REQUESTS):
        selections.append([(start + number) % POOL for number in range(size)])
        start += size
    return selections


async def _max_errors(
    context: CheckContext, variant: Variant, load_options: LoadOptions, expected_of: Callable[[str], Tensor]
) -> tuple[float, int]:
    async with served(context, variant, load_options) as (engine, model):
        inputs, expected = variant.inputs(POOL), expected_of(variant.kind)
        before = model.statistics.snapshot().execution_count

        async def ask(rows: Sequence[int]) -> float:
            feed = inputs_of(model, {name: each[list(rows)] for name, each in inputs.items()})
            (answer,) = await engine.infer(model, feed)
            return max_error(_read(answer, variant), expected[list(rows)])

        errors = await asyncio.gather(*map(ask, row_selections()))
        return max(errors), model.statistics.snapshot().execution_count - before


def _read(answer: Any, variant: Variant) -> Array:
    return bf16_to_fp32(np.asarray(answer), variant.precision)
