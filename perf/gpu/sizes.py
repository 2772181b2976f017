"""Sizes: the time of the first run of a batch size compared with its later ones, and of coming back to it.

ONNX Runtime has one plan for each convolution, and makes a new one whenever the shape differs from that of the last
run. Measured by Binding, without graphs, to exclude the Engine: lending, queuing, computing and returning.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from penstock.backends.backend import Array, Binding
from penstock.backends.loading import load_onnx

from .bindings import bind_rows, draw_inputs, fill
from .context import CheckContext
from .models import FP16, Variant
from .rows import Row, failed

SIZES = (3, 5, 6, 7, 11, 13, 24, 40, 48, 96)
_PART = "sizes"
_LATER = 3
_SEARCH = "cuda.cudnn_conv_algo_search"
SETTINGS = (("cnn", ""), ("cnn", "DEFAULT"), ("encoder", ""))
"""Models, and how cuDNN searches for an algorithm; empty: Penstock's default."""


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the first run of each size of each model, in the order of SIZES, and their sum."""
    for kind, search in SETTINGS:
        variant = context.variant(kind, FP16)
        try:
            yield from _measured(context, variant, search)
        except Exception as error:  # noqa: BLE001 - the other model may do
            yield failed(_PART, variant.name, error)


def _measured(context: CheckContext, variant: Variant, search: str) -> Iterator[Row]:
    options = {"penstock.gpu_graphs": "0"} | ({_SEARCH: search} if search else {})
    backend = load_onnx(context.file(variant), context.device, options)
    name = f"{variant.name}{f', search {search}' if search else ''}"
    try:
        binding = bind_rows(context, variant, backend, max(SIZES))
        feed = draw_inputs(backend, variant, max(SIZES))
        _took_ms(binding, feed, 1)  # libraries are loaded in the first run of all
        first_ms, worst, worst_rows = 0.0, 0.0, 0
        for rows in SIZES:
            first, *later = [_took_ms(binding, feed, rows) for _ in range(1 + _LATER)]
            usual = float(np.median(later))
            first_ms += first
            worst, worst_rows = max((worst, worst_rows), (first / usual, rows))
            note = f"then {usual:.2f} ms: {first / usual:.1f} times"
            yield Row(_PART, f"{name}: {rows} rows, first run", first, "ms", note=note)
        note = f"{len(SIZES)} sizes; at worst {worst:.0f} times a later run, at {worst_rows} rows"
        yield Row(_PART, f"{name}: first runs together", first_ms, "ms", note=note)
        again_ms = sum(_took_ms(binding, feed, rows) for rows in SIZES)
        note = f"the same {len(SIZES)} sizes once more, each after another one"
        yield Row(_PART, f"{name}: coming back together", again_ms, "ms", note=note)
    finally:
        backend.close()


def _took_ms(binding: Binding, feed: list[Array], rows: int) -> float:
    """Run this many rows; return the time of that, with the rows already in the lent buffers."""
    fill(binding, [each[:rows] for each in feed])
    start_ns = time.perf_counter_ns()
    binding.run((0,))
    return (time.perf_counter_ns() - start_ns) / 1e6
