"""Mixing: whether a model that is taken for batched lets rows change each other, as running it on drawn rows shows.

A free first axis may be time, or the samples of a sound, and an export may normalise over it: such a model makes a row
for each row (rowwise.py), and each depends on the others. Requests that shared its batches would change each other's
answers, and nobody would see it. Called by opening.py where a configuration says nothing of rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from .drawn import Inputs, draw, floats, run
from .rowwise import Evidence

if TYPE_CHECKING:
    from penstock.backends.backend import Array, Binding
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.model import Model

LENGTHS = (4, 1)
"""What free axes are tried with; 1 where it does not run on more, or hides what it makes of them."""
LONGER = (64, 640)
"""What they are tried with where it runs on neither: sides of images are often multiples of 32, and what cuts a sound
into frames takes no less than some hundred samples. 640 for one axis alone: with two a small model of images may take
gigabytes for it, and seconds."""
ORDER = (1, 0, 0)
"""How two rows stand in the second run: in another order, and not as often. What is the largest, and what the smallest
number of a run stay the same: a model that was quantised dynamically takes its scale from these."""
NEAR = 0.01
"""How far a number may be from the one before, as a share of the largest of that output: kernels round otherwise."""
MOST = 0.3
"""What share of an output may change: near ties are sorted otherwise, and rounding errors add up, in a few places."""
BUDGET_NS = 1_000_000_000
"""What the first run may take: a model that is slower is not looked at any further."""
TEXTS = ((b"one of several words", b"text"), (b"12.5", b"3"))
"""What two rows of BYTES are, in turn: a model may read numbers. The second is shorter, by words as well."""


def mixing(model: Model) -> str:
    """Say what shows that rows are none, or that they change each other; "" where nothing does.

    Raises: nothing; what drawn rows provoke says nothing of requests.
    """
    signature = model.signature
    if not (signature.batched and signature.inputs) or model.forms is not None:
        return ""
    if model.loop_binding is not None:
        return _look(model, model.loop_binding)
    first = model.threads[0]
    reason: str = first.perform(partial(_look, model, first.binding))
    return reason


def _look(model: Model, binding: Binding) -> str:
    strings = any(each.datatype == "BYTES" for each in model.signature.inputs)
    end_ns = time.monotonic_ns() + BUDGET_NS
    # a 0 tells rows of integers apart, but may be no valid length or divisor: then they are all 1
    for texts, length, zeros in product(TEXTS if strings else TEXTS[:1], _lengths(model.signature), (True, False)):
        try:
            return _tried(model, binding, _two(model.signature, length, texts, zeros=zeros))
        except Exception:  # noqa: BLE001 - drawn numbers may be no valid indices, or so many no valid length
            if time.monotonic_ns() > end_ns:
                break
    return ""


def _lengths(signature: Signature) -> list[int]:
    """Give the lengths to try: one where no axis is free."""
    tails = [each.shape[1:] for each in signature.inputs]
    if all(dim >= 0 for tail in tails for dim in tail):
        return [1]
    several = any(sum(dim < 0 for dim in tail) > 1 for tail in tails)
    return [*LENGTHS, *LONGER[: 1 if several else None]]


def _tried(model: Model, binding: Binding, rows: Inputs) -> str:
    """Compare two rows in several runs. Raises: what the model does."""
    evidence = Evidence(model, "drawn")
    start_ns = time.monotonic_ns()
    before = _run(model, binding, rows)
    evidence.see(2, before)
    if time.monotonic_ns() - start_ns > BUDGET_NS:
        return evidence.reason
    for row in (0, 1):  # alone, it may be shorter: padded to no other
        with suppress(Exception):  # one that fails alone needs the other: what the two do together says so, or nothing
            evidence.see(1, _run(model, binding, [array[row : row + 1] for array in rows]))
    order = list(ORDER[: model.spec.policy.max_batch_rows])
    after = _run(model, binding, [array[order] for array in rows])
    evidence.see(len(order), after)
    if evidence.reason:
        return evidence.reason
    changed = _changed(model, [each[order] if isinstance(each, np.ndarray) else each for each in before], after)
    if changed and _changed(model, before, _run(model, binding, rows)):
        return ""  # it draws numbers of its own
    return changed and f"rows of output '{changed}' change with how often others are in their batch"


def _two(signature: Signature, length: int, texts: tuple[bytes, bytes], *, zeros: bool) -> Inputs:
    """Draw two rows, the second smaller by far, with free axes of one length. With `zeros` they are never the same."""
    shapes = [[length if dim < 0 else dim for dim in each.shape] for each in signature.inputs]
    inputs = [replace(each, shape=tuple(shape)) for each, shape in zip(signature.inputs, shapes, strict=True)]
    rows = draw(replace(signature, inputs=tuple(inputs)), 2, 1)
    for spec, array in zip(inputs, rows, strict=True):
        if spec.datatype == "BYTES":
            array[0], array[1] = texts
        elif array.dtype.kind in "iub" and spec.datatype != "BF16":
            if zeros:
                array[1:].reshape(-1)[:1] = 0  # that of the first row is 1
            else:
                array[...] = 1
    return rows


def _run(model: Model, binding: Binding, rows: Inputs) -> list[Any]:
    """Run, and keep what is in the Binding's own memory."""
    outputs = run(binding, rows, model.all_outputs)
    return [np.array(each) if isinstance(each, np.ndarray) else each for each in outputs]


def _changed(model: Model, before: Sequence[Any], after: Sequence[Any]) -> str:
    """Name an output of which most has changed; "" if there is none."""
    specs = [model.signature.outputs[position] for position in model.all_outputs]
    for each, old, new in zip(specs, before, after, strict=True):
        if isinstance(new, np.ndarray) and new.size and _share(each, old, new) > MOST:
            return each.name
    return ""


def _share(spec: TensorSpec, before: Array, after: Array) -> float:
    """Give the share of what has changed, numbers by more than rounding does."""
    if after.dtype.hasobject:
        return float((before != after).mean())
    old, new = floats(spec, before), floats(spec, after)
    finite = np.abs(old[np.isfinite(old)])
    near = NEAR * float(finite.max()) if finite.size else 0.0
    return 1.0 - float(np.isclose(new, old, rtol=0.0, atol=near, equal_nan=True).mean())
