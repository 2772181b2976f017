"""Signature: what a model takes and gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from .datatypes import DATATYPES, Datatype

ZIPMAP = (
    "a ZipMap: skl2onnx exports a tensor in its place with options={'zipmap': False}, and onnxmltools' "
    "convert_lightgbm with zipmap=False"
)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    Shapes: -1 is free. `datatype` is a v2 name, or the runtime's own type name (`seq(map(int64,tensor(float)))`)
    for an output that is no tensor; such an output reaches hooks only. It is "" where a declaration leaves it out.
    `axes` are the model's names for its axes, "" for one without; empty where it names none. Axes of one name have one
    length.

    How a configuration has it travel: `reshape` is the model's own shape of it where that differs from `shape`, rows
    left out, None where it does not. `ragged`: requests of different shapes share a batch, in which it is flat.
    `is_shape`: its values are a shape, and what shares a batch has the same ones.
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
        """What makes a tensor of an output that is none, where that is known; "" otherwise.

        Source: skl2onnx, whose converters put a ZipMap behind each classifier, and onnxmltools.
        """
        return ZIPMAP if self.datatype.startswith("seq(map(") else ""

    @property
    def type(self) -> Datatype:
        """The row of the datatype table."""
        return DATATYPES[self.datatype]


@dataclass(frozen=True)
class Signature:
    """Names, datatypes and shapes, in the model's order.

    Shapes: when `batched`, axis 0 of every tensor is rows and is written -1; otherwise no axis is rows, and one
    request is one run.
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
