"""The warm-up: what a freshly loaded model does before it is ready.

Its Bindings are prepared, if they need that, and a few runs are timed, so that its run times are known. If the event
loop never runs the model, all of this happens on its Instances' own threads.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from .preparing import prepare, shapes, sizes
from .rehearsal import Tails, rehearsal, rehearsed_key
from .rowwise import Evidence

if TYPE_CHECKING:
    from penstock.backends.backend import Binding
    from penstock.batching.model import Model

logger = logging.getLogger("penstock.batching")

BUDGET_NS = 1_000_000_000
RUNS = 6
"""Runs per size. The first is not counted, since it is slow for reasons that do not recur, and neither are those after
it that take more than `SLOW` times the fastest."""
SLOW = 1.5


def sweep(model: Model) -> str:
    """Time batches of 1, 2, 4, ... rows of zeros, or of the allowed sizes, and teach the Scheduler.

    Padded axes have the lengths of their buckets: the smallest, the largest, then those between. Other free axes are 1.
    It ends when its budget, divided among the shapes, is used up.
    A model that cannot run on zeros, or on so small a shape, learns from its requests instead: that is logged, and is
    not an error.
    Returns: what showed that the first axes are not rows, "" if nothing did.
    """
    if model.loop_binding is not None:
        return _sweep(model, model.loop_binding)
    if not model.instances:
        raise ValueError("the model is not open")
    first = model.thread_instances[0]
    reason: str = first.run_on_thread(lambda: _sweep(model, first.binding))
    return reason


def prepare_all(model: Model) -> None:
    """Prepare the Bindings of all Instances, one after another. Raises: InferError."""
    for instance in model.thread_instances:
        instance.run_on_thread(partial(prepare, model, instance.bindings))


def _sweep(model: Model, binding: Binding) -> str:
    reason = ""
    found = shapes(model.signature, model.spec.padding)
    start_ns = time.monotonic_ns()
    for done, tails in enumerate(found):
        deadline_ns = start_ns + BUDGET_NS * (done + 1) // len(found)
        if done and time.monotonic_ns() >= deadline_ns:
            continue  # earlier shapes took longer than their share
        shown = _sweep_shape(model, binding, tails, deadline_ns)
        reason = reason or shown
    return reason


def _sweep_shape(model: Model, binding: Binding, tails: Tails, deadline_ns: int) -> str:
    key, evidence = rehearsed_key(model.spec, tails), Evidence(model)
    for rows in sizes(model):
        try:
            runs = _time(model, binding, rows, tails, deadline_ns, evidence)
        except Exception as error:  # noqa: BLE001 - requests may not fail as zeros do
            text = "model %s is not warmed up: a run of %d rows of zeros with shapes %s fails: %s"
            logger.info(text, model.name, rows, tails, error)
            evidence.fail(rows, error)
            break
        with model.lock:
            for ns in runs:
                model.scheduler.learn(key, rows, ns, time.monotonic_ns())
        # the next size takes up to twice as long
        if time.monotonic_ns() + 2 * min(runs) > deadline_ns:
            break
    return evidence.reason


def _time(
    model: Model, binding: Binding, rows: int, tails: Tails, deadline_ns: int, evidence: Evidence
) -> list[int]:  # fmt: skip
    """Run a few times, at least once. Returns: the nanoseconds of each run that counts."""
    runs: list[int] = []
    fill = rehearsal(model.spec, binding, rows, tails)
    for _ in range(RUNS):
        start_ns = time.monotonic_ns()
        fill()
        outputs = binding.run(model.all_outputs)
        ns = time.monotonic_ns() - start_ns
        runs.append(ns)
        evidence.see(rows, outputs)
        if start_ns + 2 * ns > deadline_ns:
            break
    counted = runs[1:] or runs
    while counted[0] > SLOW * min(counted):
        del counted[0]
    return counted
