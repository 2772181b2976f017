"""The warm-up sweep: a few runs of a freshly loaded model, so that its run times are known before it is ready."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from penstock.backends.signature import Signature

from .padding import bucket, same_axes
from .rehearsal import rehearsal, rehearsed_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.backends.backend import Binding

    from .model import Model
    from .spec import PaddedAxis

logger = logging.getLogger("penstock.batching")

BUDGET_NS = 1_000_000_000
RUNS = 6
"""Runs per size. The first is left out, being slow for reasons that do not come back, and so are those after it that
take more than `SLOW` times the fastest."""
SLOW = 1.5
MOST_SHAPES = 8
UNSAID_LENGTHS = (1, 64)
"""What padded axes are taken as whose buckets are not said: the first bucket, and one of a length that is common."""

Tails = list[tuple[int, ...]]
"""The shapes of all inputs that clients send, without rows."""


def sweep(model: Model) -> None:
    """Time batches of 1, 2, 4, ... rows of zeros, or of the allowed sizes, and teach the Scheduler.

    Axes that are padded are taken as their buckets: the smallest, the largest, then those between. Other free axes are
    taken as 1. It ends when its budget is spent, of which each shape has its share.
    A model that cannot run on zeros, or on so small a shape, is left to learn from its requests: the attempt is
    logged, and is not an error.
    """
    if model.loop_binding is None:
        raise ValueError("the model is not open")
    shapes = _shapes(model.signature, model.spec.padding)
    start_ns = time.monotonic_ns()
    for done, tails in enumerate(shapes):
        deadline_ns = start_ns + BUDGET_NS * (done + 1) // len(shapes)
        if done and time.monotonic_ns() >= deadline_ns:
            continue  # those before took longer than their share
        _sweep_shape(model, model.loop_binding, tails, deadline_ns)


def _sweep_shape(model: Model, binding: Binding, tails: Tails, deadline_ns: int) -> None:
    key = rehearsed_key(model.spec, tails)
    for rows in _sizes(model):
        try:
            runs = _time(model, binding, rehearsal(model.spec, binding, rows, tails), deadline_ns)
        except Exception as error:  # noqa: BLE001 - what zeros provoke, requests need not
            text = "model %s is not warmed up: it does not run on %d rows of zeros of %s: %s"
            logger.info(text, model.name, rows, tails, error)
            return
        with model.lock:
            for ns in runs:
                model.scheduler.learn(key, rows, ns, time.monotonic_ns())
        # the next size takes up to twice as long
        if time.monotonic_ns() + 2 * min(runs) > deadline_ns:
            return


def _sizes(model: Model) -> list[int]:
    """Give the sizes to run: the allowed ones if there are such, or powers of two and the most that fits."""
    most = model.max_rows
    if not model.signature.batched:
        return [1]
    allowed = [rows for rows in model.spec.policy.allowed_rows if rows <= most]
    return allowed or [*(1 << power for power in range((most - 1).bit_length())), most]


def _shapes(signature: Signature, padding: tuple[PaddedAxis, ...]) -> list[Tails]:
    """Give the shapes to run, none twice: of all padded axes together the smallest, the largest, then in between."""
    first = 1 if signature.batched else 0
    lengths = [padded.buckets or tuple(bucket(length, ()) for length in UNSAID_LENGTHS) for padded in padding]
    most = max(map(len, lengths), default=1)
    shapes: list[Tails] = []
    for step in dict.fromkeys((0, most - 1, *range(most))):
        tails = [[1 if dim < 0 else dim for dim in spec.shape[first:]] for spec in signature.inputs]
        for padded, buckets in zip(padding, lengths, strict=True):
            length = buckets[min(step, len(buckets) - 1)]
            for place, axis in _axes(signature, padded):
                tails[place][axis] = length
        shapes.append([tuple(tail) for tail in tails])
    return shapes[:MOST_SHAPES]


def _axes(signature: Signature, padded: PaddedAxis) -> Iterator[tuple[int, int]]:
    """Find a padded axis and those that must be as long: the position of the input, and the axis after the rows."""
    places = {spec.name: place for place, spec in enumerate(signature.inputs)}
    yield places[padded.input], padded.axis
    for spec, axis in same_axes(signature, padded):
        yield places[spec.name], axis


def _time(model: Model, binding: Binding, fill: Callable[[], None], deadline_ns: int) -> list[int]:
    """Run a few times, once at least. Returns: the nanoseconds of each run that counts."""
    runs: list[int] = []
    for _ in range(RUNS):
        start_ns = time.monotonic_ns()
        fill()
        binding.run(model.all_outputs)
        ns = time.monotonic_ns() - start_ns
        runs.append(ns)
        if start_ns + 2 * ns > deadline_ns:
            break
    counted = runs[1:] or runs
    while counted[0] > SLOW * min(counted):
        del counted[0]
    return counted
