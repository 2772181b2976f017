"""Row-wise: whether a model assumed to be batched returns a row for each row it gets, as its warm-up shows.

A free first axis need not be rows: it may be the number of boxes found, or the other side of a product. Requests that
shared a batch of such a model would be given each other's answers. Used by warmup.py; opening.py acts on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.batching.scheduling.request_checks import format_shape
from penstock.batching.shapes.forms import row_count

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.spec import ModelSpec


FEW_ROWS = 4
"""Up to so many rows, any batch must run if fewer rows do. That more rows fail may be a limit of the runtime."""


class Evidence:
    """What runs of one shape have shown. `reason` says why its first axes are not rows; "": nothing showed that."""

    def __init__(self, model: Model, contents: str = "of zeros") -> None:
        self.reason = ""
        self._contents = contents
        self._outputs = [model.signature.outputs[position] for position in model.all_outputs]
        self._is_relevant = model.signature.batched and model.forms is None
        self._row_shapes: list[tuple[int, ...]] | None = None

    def inspect(self, rows: int, outputs: Sequence[Any]) -> None:
        """Inspect the outputs of a run: they must have the same rows, and no other axis may depend on the rows.

        `outputs` are those that are tensors: the warm-up asks for no others.
        """
        if self.reason or not self._is_relevant:
            return
        row_shapes = [tuple(getattr(output, "shape", ())[1:]) for output in outputs]
        known_shapes = self._row_shapes or row_shapes
        for spec, output, row_shape, known in zip(self._outputs, outputs, row_shapes, known_shapes, strict=True):
            count = row_count(output)
            if count != rows:
                has = f"{count} rows" if count >= 0 else "no batch axis"
                self.reason = f"output '{spec.name}' has {has} for {rows} row{'s' * (rows != 1)} {self._contents}"
            elif row_shape != known:
                self.reason = (
                    f"rows of output '{spec.name}' are {format_shape(row_shape)} in a batch of {rows}, otherwise "
                )
                self.reason += format_shape(known)
            if self.reason:
                return
        self._row_shapes = row_shapes

    def record_failure(self, rows: int, error: Exception) -> None:
        """Record a failed run: a few rows that do not run where fewer do are not rows."""
        is_permanent = type(error) is InferError  # excludes passing failures such as lack of memory
        if is_permanent and 1 < rows <= FEW_ROWS and self._row_shapes is not None and not self.reason:
            text = f"a run of {rows} rows {self._contents} fails, a run of fewer does not"
            self.reason = f"{text}: {str(error).splitlines()[0]:.200}"


def rows_unspecified(spec: ModelSpec) -> bool:
    """Whether a configuration does not mention rows, so that the server has to find out."""
    policy = spec.policy
    mentions_rows = policy.max_batch_rows is not None or policy.allowed_rows or policy.preferred_rows
    return not (mentions_rows or spec.inputs or spec.outputs or spec.padding or spec.sequence or spec.batch_inputs)


def without_rows(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the model without rows."""
    return replace(spec, policy=replace(spec.policy, max_batch_rows=0))
