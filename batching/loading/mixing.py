"""Mixing: whether a model that is taken for batched lets rows change each other, as running it on drawn rows shows.

A free first axis may be time, or the samples of a sound, and an export may normalise over it: such a model makes a row
for each row (rowwise.py), and each depends on the others. Requests that shared its batches would change each other's
answers, and nobody would see it. Called by opening.py where a configuration says nothing of rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .drawn import Inputs, draw
from .rowwise import Evidence

if TYPE_CHECKING:
    from penstock.backends.backend import Array, Binding
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.model import Model

LENGTHS = (4, 1)
"""What free axes are tried with; 1 where it does not run on more, or hides what it makes of them."""
ORDER = (1, 0, 0)
"""How two rows stand in the second run: in another order, and not as often. What is the largest, and what the smallest
number of a run stay the same: a model that was quantised dynamically takes its scale from these."""
NEAR = 0.01
"""How far a number may be from the one before, as a share of the largest of that output: kernels round otherwise."""
MOST = 0.3
"""What share of an output may change: near ties are sorted otherwise, and rounding errors add up, in a few places."""
BUDGET_NS = 1_000_000_000
"""What the first run may take: a model that is slower is not looked at any further."""


def mixing(model: Model) -> str:
    """Say what shows that rows are none, or that they change each other; "" where nothing does.

    Raises: nothing; what drawn numbers provoke says nothing of requests. Nothing is drawn for BYTES.
    """
    signature = model.signature
    drawable = all(each.datatype != "BYTES" for each in signature.inputs)
    if not (signature.batched and signature.inputs and drawable) or model.forms is not None:
        return ""
    if model.loop_binding is not None:
        return _look(model, model.loop_binding)
    first = model.threads[0]
    reason: str = first.perform(partial(_look, model, first.binding))
    return reason


def _look(model: Model, binding: Binding) -> str:
    for length in LENGTHS:
        try:
            return _tried(model, binding, length)
        except Exception:  # noqa: BLE001, S112 - drawn numbers may be no valid indices, or so many no valid length
            continue
    return ""


def _tried(model: Model, binding: Binding, length: int) -> str:
    """Compare rows in two runs. Raises: what the model does."""
    evidence = Evidence(model, "drawn")
    rows = _two(model.signature, length)
    start_ns = time.monotonic_ns()
    before = _run(model, binding, rows)
    evidence.see(2, before)
    if time.monotonic_ns() - start_ns > BUDGET_NS:
        return evidence.reason
    order = list(ORDER[: model.spec.policy.max_batch_rows])
    after = _run(model, binding, [array[order] for array in rows])
    evidence.see(len(order), after)
    if evidence.reason:
        return evidence.reason
    changed = _changed(model, [each[order] if _is_array(each) else each for each in before], after)
    if changed and _changed(model, before, _run(model, binding, rows)):
        return ""  # it draws numbers of its own
    return changed and f"rows of output '{changed}' change with how often others are in their batch"


def _two(signature: Signature, length: int) -> Inputs:
    """Draw two rows, the second smaller by far, with free axes of one length."""
    shapes = [[length if dim < 0 else dim for dim in each.shape] for each in signature.inputs]
    inputs = [replace(each, shape=tuple(shape)) for each, shape in zip(signature.inputs, shapes, strict=True)]
    return draw(replace(signature, inputs=tuple(inputs)), 2, 1)


def _run(model: Model, binding: Binding, rows: Inputs) -> list[Any]:
    """Run, and keep what is in the Binding's own memory."""
    for buffer, array in zip(binding.lend(len(rows[0]), [array.shape for array in rows]), rows, strict=True):
        np.copyto(buffer, array)  # type: ignore[arg-type]
    return [np.array(each) if _is_array(each) else each for each in binding.run(model.all_outputs)]


def _is_array(output: Any) -> bool:
    return isinstance(output, np.ndarray) and not output.dtype.hasobject


def _changed(model: Model, before: Sequence[Any], after: Sequence[Any]) -> str:
    """Name an output of which most has changed; "" if there is none."""
    specs = [model.signature.outputs[position] for position in model.all_outputs]
    for each, old, new in zip(specs, before, after, strict=True):
        if _is_array(new) and new.size and _share(_floats(each, old), _floats(each, new)) > MOST:
            return each.name
    return ""


def _share(old: Array, new: Array) -> float:
    """Give the share of what has changed by more than rounding does."""
    finite = np.abs(old[np.isfinite(old)])
    near = NEAR * float(finite.max()) if finite.size else 0.0
    return 1.0 - float(np.isclose(new, old, rtol=0.0, atol=near, equal_nan=True).mean())


def _floats(spec: TensorSpec, array: Array) -> Array:
    if spec.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
