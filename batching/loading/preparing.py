"""Preparing: the sizes and shapes that a model is going to run, and getting its Bindings ready for them.

Called by warmup.py, by opening.py for the loop's Binding, and by an Instance when its model was loaded again, or it has
nothing to do for long.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature
from penstock.batching.devices.memory import give_back
from penstock.batching.shapes.padding import bucket, same_axes

from .rehearsal import Tails, rehearsal
from .run_sizes import said_sizes

if TYPE_CHECKING:
    from penstock.backends.backend import Array, Binding
    from penstock.batching.model import Model
    from penstock.batching.spec import PaddedAxis

logger = logging.getLogger("penstock.batching")

REST_S = 10.0
"""After so long without a Batch an Instance's Bindings give back what they keep only to be fast (`rest`)."""
MOST_SHAPES = 8
UNSAID_LENGTHS = (1, 64)
"""What padded axes are taken as whose buckets are not said: the first bucket, and one of a length that is common."""


def prepare(model: Model, bindings: Sequence[Binding]) -> None:
    """Prepare Bindings for the sizes that they will run. Threads: that which will run them. Raises: InferError.

    Some runtimes record a run once for each size, or choose how to run it. The largest size goes first: of what it
    needs the others take a part. Where requests choose a shape that is not padded there is nothing to prepare for.
    """
    wanting = [binding for binding in bindings if hasattr(binding, "prepare")]
    if not wanting or not _is_known(model.signature, model.spec.padding):
        return
    for tails in shapes(model.signature, model.spec.padding):
        for rows in reversed(sizes(model)):
            for binding in wanting:
                lent: Any = _Lent(binding)
                rehearsal(model.spec, lent, rows, tails)()
                try:
                    binding.prepare(rows, lent.shapes)
                except InferError:
                    raise
                except Exception as error:
                    text = f"model '{model.name}' cannot be prepared for {rows} rows: {type(error).__name__}: {error}"
                    raise InferError(Code.INTERNAL, text) from error


def rest(model: Model, bindings: Sequence[Any]) -> None:
    """Let Bindings give back what they keep only to be fast, and the C library too. Threads: that which runs them."""
    for binding in bindings:
        try:
            binding.rest()
        except Exception as error:  # noqa: BLE001 - if something is wrong there, the next run finds it
            logger.warning("model %s: what its device keeps is not given back: %s", model.name, error)
    give_back()


class _Lent:
    """A Binding, as far as a rehearsal needs it, that notes the shapes that were lent."""

    def __init__(self, binding: Binding) -> None:
        self.capacity_rows = binding.capacity_rows
        self.shapes: Sequence[tuple[int, ...] | None] = ()
        self._binding = binding

    def lend(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        self.shapes = shapes
        return self._binding.lend(rows, shapes)


def sizes(model: Model) -> list[int]:
    """Give the sizes to run: the allowed ones if there are such, or powers of two and the most that fits."""
    most = model.max_rows
    if not model.signature.batched:
        return [1]
    said = model.spec.policy.allowed_rows or said_sizes(model.spec)
    allowed = [rows for rows in said if rows <= most]
    return allowed or [*(1 << power for power in range((most - 1).bit_length())), most]


def shapes(signature: Signature, padding: tuple[PaddedAxis, ...]) -> list[Tails]:
    """Give the shapes to run, none twice: of all padded axes together the smallest, the largest, then in between."""
    first = 1 if signature.batched else 0
    lengths = [padded.buckets or tuple(bucket(length, ()) for length in UNSAID_LENGTHS) for padded in padding]
    most = max(map(len, lengths), default=1)
    found: list[Tails] = []
    for step in dict.fromkeys((0, most - 1, *range(most))):
        tails = [[1 if dim < 0 else dim for dim in spec.shape[first:]] for spec in signature.inputs]
        for padded, buckets in zip(padding, lengths, strict=True):
            length = buckets[min(step, len(buckets) - 1)]
            for place, axis in _axes(signature, padded):
                tails[place][axis] = length
        found.append([tuple(tail) for tail in tails])
    return found[:MOST_SHAPES]


def _is_known(signature: Signature, padding: tuple[PaddedAxis, ...]) -> bool:
    """Tell whether the shapes that will run are among `shapes`: no axis is free that is not padded."""
    first = 1 if signature.batched else 0
    padded = {place for each in padding for place in _axes(signature, each)}
    free = {
        (at, axis) for at, spec in enumerate(signature.inputs) for axis, dim in enumerate(spec.shape[first:]) if dim < 0
    }
    return free <= padded


def _axes(signature: Signature, padded: PaddedAxis) -> Iterator[tuple[int, int]]:
    """Find a padded axis and those that must be as long: the position of the input, and the axis after the rows."""
    places = {spec.name: place for place, spec in enumerate(signature.inputs)}
    yield places[padded.input], padded.axis
    for spec, axis in same_axes(signature, padded):
        yield places[spec.name], axis
