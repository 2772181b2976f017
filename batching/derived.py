"""Derived inputs: what a model takes and no client sends, made from the batch when it is gathered.

Controls and states of sequences, and the counts and shapes of ragged batches. Called by execution.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.signature import TensorSpec

    from .batch import Batch


class Derived(Protocol):
    """One input that is made from the batch. Its place among the model's inputs is after those that clients send."""

    spec: TensorSpec
    """The input as the model has it, rows included."""

    def shape(self, batch: Batch, ran_rows: int) -> tuple[int, ...]:
        """Give its whole shape in a run of so many rows, those included that are there to fill up."""

    def fill(self, buffer: Array, batch: Batch) -> None:
        """Write it. The buffer holds garbage."""


class Kept(Protocol):
    """Outputs that stay here: no client gets them. They stand after the others among the model's outputs."""

    specs: tuple[TensorSpec, ...]
    """The outputs as the model has them, rows included."""

    def keep(self, batch: Batch, outputs: list[Any]) -> None:
        """Take them after a run that went well. Ownership: they are the taker's."""
