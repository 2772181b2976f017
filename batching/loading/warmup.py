"""The warm-up: what a freshly loaded model does before it is ready.

Its Bindings are prepared, if they need that, and a few runs are timed, so that its run times are known. If the event
loop never runs the model, all of this happens on its Instances' own threads.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

from .dummy_inputs import RowShapes, dummy_fill, dummy_key
from .preparing import batch_sizes, input_shapes, prepare
from .rowwise import Evidence

if TYPE_CHECKING:
    from penstock.backends.backend import Binding
    from penstock.batching.model import Model

logger = logging.getLogger("penstock.batching")

BUDGET_NS = 1_000_000_000
RUNS_PER_SIZE = 6
"""Runs per size. The first is not counted, since it is slow for reasons that do not recur, and neither are those after
it that take more than `OUTLIER_FACTOR` times the fastest."""
OUTLIER_FACTOR = 1.5


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
    all_shapes = input_shapes(model.signature, model.spec.padding)
    start_ns = time.monotonic_ns()
    for index, row_shapes in enumerate(all_shapes):
        deadline_ns = start_ns + BUDGET_NS * (index + 1) // len(all_shapes)
        if index and time.monotonic_ns() >= deadline_ns:
            continue  # earlier shapes took longer than their share
        shape_reason = _sweep_shape(model, binding, row_shapes, deadline_ns)
        reason = reason or shape_reason
    return reason


def _sweep_shape(model: Model, binding: Binding, row_shapes: RowShapes, deadline_ns: int) -> str:
    key, evidence = dummy_key(model.spec, row_shapes), Evidence(model)
    for rows in batch_sizes(model):
        try:
            runs = _time_runs(model, binding, rows, row_shapes, deadline_ns, evidence)
        except Exception as error:  # noqa: BLE001 - requests may not fail as zeros do
            text = "model %s is not warmed up: a run of %d rows of zeros with shapes %s fails: %s"
            logger.info(text, model.name, rows, row_shapes, error)
            evidence.record_failure(rows, error)
            break
        with model.lock:
            for run_ns in runs:
                model.scheduler.learn(key, rows, run_ns, time.monotonic_ns())
        # the next size takes up to twice as long
        if time.monotonic_ns() + 2 * min(runs) > deadline_ns:
            break
    return evidence.reason


def _time_runs(
    model: Model, binding: Binding, rows: int, row_shapes: RowShapes, deadline_ns: int, evidence: Evidence
) -> list[int]:  # fmt: skip
    """Run a few times, at least once. Returns: the nanoseconds of each run that counts."""
    runs: list[int] = []
    fill = dummy_fill(model.spec, binding, rows, row_shapes)
    for _ in range(RUNS_PER_SIZE):
        start_ns = time.monotonic_ns()
        fill()
        outputs = binding.run(model.all_outputs)
        run_ns = time.monotonic_ns() - start_ns
        runs.append(run_ns)
        evidence.inspect(rows, outputs)
        if start_ns + 2 * run_ns > deadline_ns:
            break
    counted = runs[1:] or runs
    while counted[0] > OUTLIER_FACTOR * min(counted):
        del counted[0]
    return counted
