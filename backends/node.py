"""Node: an input or output as in a model's own graph, without the runtime; for user code in another process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Node:
    """What onnxruntime's NodeArg holds. `type` is the graph's own name, such as `tensor(float)`.

    Shapes: as in the graph: numbers, names of free axes, and None.
    """

    name: str
    type: str
    shape: list[int | str | None]

    @classmethod
    def from_runtime(cls, node: Any) -> Node:
        """Copy a runtime's description."""
        return cls(str(node.name), str(node.type), [_dim(dim) for dim in node.shape])

    @classmethod
    def from_json(cls, encoded: Iterable[Any]) -> Node:
        """Parse the result of `to_json`. Raises: ValueError or TypeError."""
        name, type_name, shape = encoded
        return cls(str(name), str(type_name), [_dim(dim) for dim in shape])

    def to_json(self) -> list[Any]:
        """Return it as JSON."""
        return [self.name, self.type, self.shape]


def _dim(dim: Any) -> int | str | None:
    return dim if dim is None or isinstance(dim, str) else int(dim)
