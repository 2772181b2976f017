"""Mixing: whether rows of a model assumed to be batched affect each other, shown by running it on random rows.

A free first axis may be time, or the samples of a sound, and an export may normalize over it: such a model returns a
row for each row (rowwise.py), but each depends on the others. Requests that shared its batches would silently change
each other's answers. Called by opening.py if a configuration does not mention rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import InferError

from .random_rows import Inputs, as_float64, draw_inputs, make_neighbors, run_rows
from .rowwise import Evidence

if TYPE_CHECKING:
    from penstock.backends.backend import Array, Binding
    from penstock.backends.signature import Signature, TensorSpec
    from penstock.batching.model import Model

logger = logging.getLogger("penstock.batching")

LENGTHS = (4, 1, 3, 2, 8, 16)
"""The lengths tried for free axes, until the model runs: 1 if it cannot run with more, or its outputs do not show their
rows; the others if an axis must fit something in the model."""
LONG_LENGTHS = (64, 640)
"""The lengths tried if it runs with none of these: sides of images are often multiples of 32, and code that cuts a
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
NEIGHBOR_KINDS = (("same", 1), ("other", 3), ("other", 1), ("zero", 1))
"""The rows that take the place of a row's neighbor, and the largest of their integers. Not huge or NaN: a model may
allocate as much as a number says, or compute until a number is small."""
NEIGHBOR_TOLERANCE = 0.001
"""How far a number may be from the previous one if only the neighbor of its row was replaced, as a fraction of the
largest of its row: the same kernels run, so usually nothing changes."""
MAX_REPEATS = 50
"""How often the same rows run again to show whether a model draws random numbers: what it draws is often the same."""
BUDGET_NS = 1_000_000_000
"""What the first run may take: a slower model is not examined any further."""
TEXTS = ((b"one, two; three words", b"text"), (b"12.5", b"3"))
"""The two rows of a BYTES input, in turn, since a model may parse numbers. The second is shorter, in words as well."""


def find_mixing(model: Model, *, shares_scale: bool = False) -> str:
    """Say what shows that rows are not rows, or that they affect each other; "" if nothing does.

    `shares_scale`: that rows take a scale from each other is known, and accepted.
    Never raises: failures on random rows say nothing about requests.
    """
    signature = model.signature
    if not (signature.batched and signature.inputs) or model.forms is not None or model.max_rows == 1:
        return ""
    if model.loop_binding is not None:
        return _examine(model, model.loop_binding, shares_scale)
    first = model.thread_instances[0]
    reason: str = first.run_on_thread(partial(_examine, model, first.binding, shares_scale))
    return reason


def _examine(model: Model, binding: Binding, shares_scale: bool) -> str:
    strings = any(each.datatype == "BYTES" for each in model.signature.inputs)
    end_ns = time.monotonic_ns() + BUDGET_NS
    failure: Exception | None = None
    # a 0 makes rows of integers differ, but may be an invalid length or divisor: then all are 1
    for texts, length, zeros in product(TEXTS if strings else TEXTS[:1], _lengths(model.signature), (True, False)):
        try:
            rows = _draw_two_rows(model.signature, length, texts, zeros=zeros)
            return _compare_runs(model, binding, rows, shares_scale)
        except Exception as error:  # noqa: BLE001 - random numbers may be invalid indices, or the length invalid
            failure = error
            if time.monotonic_ns() > end_ns:
                break
    reason = _content_length(model) or _find_rejection(model, binding)
    if not reason:
        _log_unknown(model, f"no random rows could be run: {failure}")
    return reason


def _content_length(model: Model) -> str:
    """Say which output's rows have a length that only contents can determine, so that the longest row determines it.

    Used if no run shows it: the texts may have to be serialized `tf.Example`s, for instance.
    """
    if any(dim < 0 for spec in model.signature.inputs for dim in spec.shape[1:]):
        return ""
    outputs = [model.signature.outputs[position] for position in model.all_outputs]
    name = next((each.name for each in outputs if any(dim < 0 for dim in each.shape[1:])), "")
    return name and f"the length of output '{name}' may depend on the other rows in its batch"


def _find_rejection(model: Model, binding: Binding) -> str:
    """Say why a single row does not run if nothing but the number of rows can be the reason.

    Used if random rows do not run either. Lengths, integers and texts may be at fault themselves.
    """
    inputs = model.signature.inputs
    if any(-1 in spec.shape[1:] or spec.type.dtype.kind not in "fb" for spec in inputs):
        return ""
    try:
        _run(model, binding, [np.zeros((1, *spec.shape[1:]), spec.type.dtype) for spec in inputs])
    except InferError as error:
        if type(error) is InferError:  # excludes passing failures such as lack of memory
            return f"a run of one row fails: {str(error).splitlines()[0]:.200}"
    return ""


def _log_unknown(model: Model, reason: str) -> None:
    logger.info("model %s: whether its rows affect each other is unknown: %s", model.name, reason)


def _lengths(signature: Signature) -> list[int]:
    """Return the lengths to try: one if no axis is free."""
    row_shapes = [each.shape[1:] for each in signature.inputs]
    if all(dim >= 0 for row_shape in row_shapes for dim in row_shape):
        return [1]
    has_several = any(sum(dim < 0 for dim in row_shape) > 1 for row_shape in row_shapes)
    return [*LENGTHS, *LONG_LENGTHS[: 1 if has_several else None]]


def _compare_runs(model: Model, binding: Binding, rows: Inputs, shares_scale: bool) -> str:
    """Compare two rows in several runs. Raises: what the model does."""
    evidence = Evidence(model, "of random values")
    start_ns = time.monotonic_ns()
    before = _run(model, binding, rows)
    evidence.inspect(2, before)
    if time.monotonic_ns() - start_ns > BUDGET_NS:
        _log_unknown(model, "two rows take over a second")
        return evidence.reason
    for row in (0, 1):  # alone, a row may be shorter: it is not padded to another
        with suppress(Exception):  # a row that fails alone may need the other; only what both do together counts
            evidence.inspect(1, _run(model, binding, [array[row : row + 1] for array in rows]))
    order = list(SECOND_ORDER[: model.spec.policy.max_batch_rows])
    try:
        after = _run(model, binding, [array[order] for array in rows])
        evidence.inspect(len(order), after)
    except InferError as error:
        evidence.record_failure(len(order), error)
        if not evidence.reason:
            raise
    if evidence.reason:
        return evidence.reason
    changed = _changed_output(model, [each[order] if isinstance(each, np.ndarray) else each for each in before], after)
    if not (changed or shares_scale):
        changed = _changed_by_neighbor(model, binding, rows, before)
    if changed and _draws_numbers(model, binding, rows, before):
        return ""
    return changed and f"rows of output '{changed}' depend on the other rows in their batch"


def _draws_numbers(model: Model, binding: Binding, rows: Inputs, before: Sequence[Any]) -> bool:
    """Whether the same rows have other outputs when they run again, since the model draws random numbers itself."""
    end_ns = time.monotonic_ns() + BUDGET_NS
    for _ in range(MAX_REPEATS):
        again = _run(model, binding, rows)
        if any(_changed_row(model, before, again, row, row) for row in (0, 1)):
            return True
        if time.monotonic_ns() > end_ns:
            break
    return False


def _changed_by_neighbor(model: Model, binding: Binding, rows: Inputs, before: Sequence[Any]) -> str:
    """Replace the neighbor of each row. Returns: the name of an output that changes for the row; "" if none does."""
    end_ns = time.monotonic_ns() + BUDGET_NS
    for (kind, max_integer), row in product(NEIGHBOR_KINDS, (0, 1)):
        if time.monotonic_ns() > end_ns:
            break
        with suppress(Exception):  # the neighbor may be invalid
            after = _run(model, binding, _replace_neighbor(model, rows, row, kind, max_integer))
            changed = _changed_row(model, before, after, row, row)
            if not changed and kind == "same":
                changed = _changed_row(model, before, after, row, 1 - row)
            if changed:
                return changed
    return ""


def _replace_neighbor(model: Model, rows: Inputs, row: int, kind: str, max_integer: int) -> Inputs:
    """Return two rows with one of them replaced: that which is not `row`."""
    replaced = [array.copy() for array in rows]
    for spec, array in zip(model.signature.inputs, replaced, strict=True):
        if kind == "same" or spec.datatype == "BYTES":
            array[1 - row] = array[row]
        else:
            array[1 - row] = make_neighbors(spec, array[::-1], kind, max_integer)[1 - row]
    return replaced


def _draw_two_rows(signature: Signature, length: int, texts: tuple[bytes, bytes], *, zeros: bool) -> Inputs:
    """Draw two rows, the second much smaller, with free axes of one length. With `zeros` they always differ."""
    inputs = [replace(each, shape=each.shape_with(length)) for each in signature.inputs]
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


def _changed_row(model: Model, before: Sequence[Any], after: Sequence[Any], row: int, row_after: int) -> str:
    """Return the name of an output that has changed anywhere in a row; "" if there is none."""
    old, new = (
        [each[position : position + 1] if isinstance(each, np.ndarray) else each for each in outputs]
        for outputs, position in ((before, row), (after, row_after))
    )
    return _changed_output(model, old, new, NEIGHBOR_TOLERANCE, 0.0)


def _changed_output(
    model: Model, before: Sequence[Any], after: Sequence[Any], tolerance: float = TOLERANCE,
    max_changed: float = MAX_CHANGED,
) -> str:  # fmt: skip
    """Return the name of an output of which too much has changed; "" if there is none."""
    specs = [model.signature.outputs[position] for position in model.all_outputs]
    for each, old, new in zip(specs, before, after, strict=True):
        if isinstance(new, np.ndarray) and new.size and _changed_share(each, old, new, tolerance) > max_changed:
            return each.name
    return ""


def _changed_share(spec: TensorSpec, before: Array, after: Array, tolerance: float) -> float:
    """Return the fraction of elements that changed, numbers by more than a fraction of the largest."""
    if before.shape != after.shape:
        return 1.0
    if after.dtype.hasobject:
        return float((before != after).mean())
    old, new = as_float64(spec, before), as_float64(spec, after)
    finite = np.abs(old[np.isfinite(old)])
    atol = tolerance * float(finite.max()) if finite.size else 0.0
    return 1.0 - float(np.isclose(new, old, rtol=0.0, atol=atol, equal_nan=True).mean())
