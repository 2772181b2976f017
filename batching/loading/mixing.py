"""Mixing: whether rows of a model assumed to be batched affect each other, shown by running it on random rows.

A free first axis may be time, or the samples of a sound, and an export may normalize over it: such a model returns a
row for each row (rowwise.py), but each depends on the others. Requests that shared its batches would silently change
each other's answers. Called by opening.py if a configuration does not mention rows.
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

from .random_rows import Inputs, as_float64, draw_inputs, run_rows
from .rowwise import Evidence

if TYPE_CHECKING:
    from penstock.backends.backend import Array, Binding
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.model import Model

LENGTHS = (4, 1)
"""The lengths tried for free axes; 1 if the model cannot run with more, or its outputs do not show their rows."""
LONG_LENGTHS = (64, 640)
"""The lengths tried if the model runs with neither: sides of images are often multiples of 32, and code that cuts a
sound into frames needs at least some hundred samples. 640 only for a single axis: with two, a small image model may
need gigabytes and seconds."""
SECOND_ORDER = (1, 0, 0)
"""The order of two rows in the second run: reversed, and with different counts. The largest and the smallest number of
a run stay the same: a dynamically quantized model takes its scale from these."""
TOLERANCE = 0.01
"""How far a number may be from the previous one, as a fraction of the largest of that output: kernels round
differently."""
MAX_CHANGED = 0.3
"""The fraction of an output that may change: near ties may sort differently, and rounding errors add up in a few
places."""
BUDGET_NS = 1_000_000_000
"""What the first run may take: a slower model is not examined any further."""
TEXTS = ((b"one of several words", b"text"), (b"12.5", b"3"))
"""The two rows of a BYTES input, in turn, since a model may parse numbers. The second is shorter, in words as well."""


def find_mixing(model: Model) -> str:
    """Say what shows that rows are not rows, or that they affect each other; "" if nothing does.

    Never raises: failures on random rows say nothing about requests.
    """
    signature = model.signature
    if not (signature.batched and signature.inputs) or model.forms is not None:
        return ""
    if model.loop_binding is not None:
        return _examine(model, model.loop_binding)
    first = model.thread_instances[0]
    reason: str = first.run_on_thread(partial(_examine, model, first.binding))
    return reason


def _examine(model: Model, binding: Binding) -> str:
    strings = any(each.datatype == "BYTES" for each in model.signature.inputs)
    end_ns = time.monotonic_ns() + BUDGET_NS
    # a 0 makes rows of integers differ, but may be an invalid length or divisor: then all are 1
    for texts, length, zeros in product(TEXTS if strings else TEXTS[:1], _lengths(model.signature), (True, False)):
        try:
            return _compare_runs(model, binding, _draw_two_rows(model.signature, length, texts, zeros=zeros))
        except Exception:  # noqa: BLE001 - random numbers may be invalid indices, or the length invalid
            if time.monotonic_ns() > end_ns:
                break
    return _content_length(model)


def _content_length(model: Model) -> str:
    """Say which output's rows have a length that only contents can determine, so that the longest row determines it.

    Used if no run shows it: the texts may have to be serialized `tf.Example`s, for instance.
    """
    if any(dim < 0 for spec in model.signature.inputs for dim in spec.shape[1:]):
        return ""
    outputs = [model.signature.outputs[position] for position in model.all_outputs]
    name = next((each.name for each in outputs if any(dim < 0 for dim in each.shape[1:])), "")
    return name and f"the length of output '{name}' may depend on the other rows in its batch"


def _lengths(signature: Signature) -> list[int]:
    """Return the lengths to try: one if no axis is free."""
    row_shapes = [each.shape[1:] for each in signature.inputs]
    if all(dim >= 0 for row_shape in row_shapes for dim in row_shape):
        return [1]
    has_several = any(sum(dim < 0 for dim in row_shape) > 1 for row_shape in row_shapes)
    return [*LENGTHS, *LONG_LENGTHS[: 1 if has_several else None]]


def _compare_runs(model: Model, binding: Binding, rows: Inputs) -> str:
    """Compare two rows in several runs. Raises: what the model does."""
    evidence = Evidence(model, "of random values")
    start_ns = time.monotonic_ns()
    before = _run(model, binding, rows)
    evidence.inspect(2, before)
    if time.monotonic_ns() - start_ns > BUDGET_NS:
        return evidence.reason
    for row in (0, 1):  # alone, a row may be shorter: it is not padded to another
        with suppress(Exception):  # a row that fails alone may need the other; only what both do together counts
            evidence.inspect(1, _run(model, binding, [array[row : row + 1] for array in rows]))
    order = list(SECOND_ORDER[: model.spec.policy.max_batch_rows])
    after = _run(model, binding, [array[order] for array in rows])
    evidence.inspect(len(order), after)
    if evidence.reason:
        return evidence.reason
    changed = _changed_output(model, [each[order] if isinstance(each, np.ndarray) else each for each in before], after)
    if changed and _changed_output(model, before, _run(model, binding, rows)):
        return ""  # it draws random numbers itself
    return changed and f"rows of output '{changed}' depend on the other rows in their batch"


def _draw_two_rows(signature: Signature, length: int, texts: tuple[bytes, bytes], *, zeros: bool) -> Inputs:
    """Draw two rows, the second much smaller, with free axes of one length. With `zeros` they always differ."""
    shapes = [[length if dim < 0 else dim for dim in each.shape] for each in signature.inputs]
    inputs = [replace(each, shape=tuple(shape)) for each, shape in zip(signature.inputs, shapes, strict=True)]
    rows = draw_inputs(replace(signature, inputs=tuple(inputs)), 2, 1)
    for spec, array in zip(inputs, rows, strict=True):
        if spec.datatype == "BYTES":
            array[0], array[1] = texts
        elif array.dtype.kind in "iub" and spec.datatype != "BF16":
            if zeros:
                array[1:].reshape(-1)[:1] = 0  # the first row's is 1
            else:
                array[...] = 1
    return rows


def _run(model: Model, binding: Binding, rows: Inputs) -> list[Any]:
    """Run, and copy what is in the Binding's own memory."""
    outputs = run_rows(binding, rows, model.all_outputs)
    return [np.array(each) if isinstance(each, np.ndarray) else each for each in outputs]


def _changed_output(model: Model, before: Sequence[Any], after: Sequence[Any]) -> str:
    """Return the name of an output of which too much has changed; "" if there is none."""
    specs = [model.signature.outputs[position] for position in model.all_outputs]
    for each, old, new in zip(specs, before, after, strict=True):
        if isinstance(new, np.ndarray) and new.size and _changed_share(each, old, new) > MAX_CHANGED:
            return each.name
    return ""


def _changed_share(spec: TensorSpec, before: Array, after: Array) -> float:
    """Return the fraction of elements that changed, numbers by more than rounding."""
    if after.dtype.hasobject:
        return float((before != after).mean())
    old, new = as_float64(spec, before), as_float64(spec, after)
    finite = np.abs(old[np.isfinite(old)])
    tolerance = TOLERANCE * float(finite.max()) if finite.size else 0.0
    return 1.0 - float(np.isclose(new, old, rtol=0.0, atol=tolerance, equal_nan=True).mean())
