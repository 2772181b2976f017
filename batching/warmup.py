"""The warm-up sweep: a few runs of a freshly loaded model, so that its run times are known before it is ready."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.signature import TensorSpec

if TYPE_CHECKING:
    from penstock.backends.backend import Array, Binding

    from .model import Model

logger = logging.getLogger("penstock.batching")

BUDGET_NS = 1_000_000_000
RUNS = 5
"""Runs per size; the fastest counts, the first ones being slow for reasons that do not come back."""


def sweep(model: Model) -> None:
    """Time batches of 1, 2, 4, ... rows of zeros and teach the Scheduler; stop early when the budget is spent.

    Free axes are taken as 1. A model that cannot run on zeros, or on so small a shape, is left to learn from its
    requests: the attempt is logged, and is not an error.
    """
    signature, binding = model.signature, model.loop_binding
    if binding is None:
        raise ValueError("the model is not open")
    first = 1 if signature.batched else 0
    tails = [tuple(1 if dim < 0 else dim for dim in spec.shape[first:]) for spec in signature.inputs]
    deadline_ns = time.monotonic_ns() + BUDGET_NS
    rows = 1
    while rows <= model.max_rows:
        shapes = [(rows, *tail) if signature.batched else tail for tail in tails]
        try:
            ns = _fastest(model, binding, rows, shapes, deadline_ns)
        except Exception as error:  # noqa: BLE001 - what zeros provoke, requests need not
            logger.info("model %s is not warmed up: it does not run on zeros of %s: %s", model.name, shapes, error)
            return
        with model.lock:
            model.scheduler.learn(tuple(tails), rows, ns, time.monotonic_ns())
        # the next size takes up to twice as long
        if not signature.batched or time.monotonic_ns() + 2 * ns > deadline_ns:
            return
        rows = min(rows * 2, model.max_rows) if rows < model.max_rows else model.max_rows + 1


def _fastest(model: Model, binding: Binding, rows: int, shapes: list[tuple[int, ...]], deadline_ns: int) -> int:
    best_ns = 0
    inputs = [_zeros(spec, shape) for spec, shape in zip(model.signature.inputs, shapes, strict=True)]
    for _ in range(RUNS):
        start_ns = time.monotonic_ns()
        for buffer, array in zip(binding.lend(rows, shapes), inputs, strict=True):
            if buffer is not None:
                np.copyto(buffer, array)
        binding.run(model.all_outputs)
        ns = time.monotonic_ns() - start_ns
        best_ns = ns if not best_ns else min(best_ns, ns)
        if start_ns + 2 * ns > deadline_ns:
            break
    return best_ns


def _zeros(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    zeros = np.zeros(shape, spec.type.dtype)
    if spec.datatype == "BYTES":
        zeros.fill(b"")
    return zeros
