"""Signature: what a model takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .datatypes import DATATYPES, Datatype

ZIPMAP = (
    "a ZipMap: to export a tensor in its place, pass options={'zipmap': False} to skl2onnx, or "
    "zipmap=False to onnxmltools' convert_lightgbm; for CatBoost see docs/repository.md"
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    Shapes: -1 is free. `datatype` is a v2 name, or the runtime's own type name (`seq(map(int64,tensor(float)))`) for an
    output that is not a tensor; such an output reaches hooks only. It is "" if a declaration omits it. `axes` are the
    model's names for its axes, "" for one without; empty if it names none. Axes with the same name have the same
    length.
    As configured: `reshape` is the model's own shape, without rows, if that differs from `shape`, else None. `ragged`:
    requests of different shapes share a batch, in which it is flat. `is_shape`: its values are a shape, which must be
    equal across a batch.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    axes: tuple[str, ...] = field(default=(), compare=False, repr=False)
    reshape: tuple[int, ...] | None = None
    ragged: bool = False
    is_shape: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether the v2 protocol can carry it."""
        return self.datatype in DATATYPES

    @property
    def advice(self) -> str:
        """How to export a non-tensor output as a tensor, if known; else "".

        Source: skl2onnx, whose converters put a ZipMap after each classifier, and onnxmltools.
        """
        return ZIPMAP if self.datatype.startswith("seq(map(") else ""

    @property
    def type(self) -> Datatype:
        """The row of the datatype table."""
        return DATATYPES[self.datatype]

    def shape_with(self, length: int) -> tuple[int, ...]:
        """Return the shape with free axes of one length.

        An axis with a sum as its name ("past_length + length", "length + 1") has that sum, as exporters mean it.
        """
        names = self.axes or ("",) * len(self.shape)
        return tuple(
            _axis_length(name, length) if dim < 0 else dim for dim, name in zip(self.shape, names, strict=True)
        )


@dataclass(frozen=True)
class Signature:
    """Names, datatypes and shapes, in the model's order.

    Shapes: when `batched`, axis 0 of every tensor is rows and is written -1; otherwise no axis is rows, and one request
    is one run.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool = False

    @cached_property
    def input(self) -> dict[str, TensorSpec]:
        """Inputs by name."""
        return {spec.name: spec for spec in self.inputs}

    @cached_property
    def output(self) -> dict[str, TensorSpec]:
        """Outputs by name."""
        return {spec.name: spec for spec in self.outputs}


def _axis_length(name: str, length: int) -> int:
    return sum(int(term) if term.strip().isdecimal() else length for term in name.split("+"))
