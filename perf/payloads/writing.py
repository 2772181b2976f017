"""Writing: what the writers of both protocols share. `http.py` and `grpc.py` write; `preparing.py` chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .tensors import InputError, Place, Step

Parameter = tuple[str, str | int | float | bool]
Template = Callable[[bytes, int], bytes]
"""One step's requests of sequences: takes a sequence's id as `Writer.identity` wrote it, and FIRST | LAST."""
FIRST, LAST = 1, 2
"""Which requests of a sequence begin it and end it; one request may do both."""
_OURS = ("sequence_id", "sequence_start", "sequence_end", "binary_data_output", "triton_enable_empty_final_response")


@dataclass(frozen=True, slots=True)
class Wanted:
    """An output that is asked for, into shared memory or not."""

    name: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What all requests of a run say beside their inputs. `version`: empty, the server's choice."""

    model: str
    version: str
    outputs: tuple[Wanted, ...]
    parameters: tuple[Parameter, ...] = ()


class Writer(Protocol):
    """Writes requests of one Call in one protocol; it travels between processes."""

    def whole(self, step: Step) -> bytes:
        """Write a request that stands alone. Raises: InputError."""
        ...

    def identity(self, number: int) -> bytes:
        """Write a sequence's id."""
        ...

    def template(self, step: Step) -> Template:
        """Write what all requests of sequences with these inputs share. Raises: InputError."""
        ...


def check_parameters(parameters: Sequence[Parameter]) -> None:
    """Refuse the names that are the protocol's, and those given twice. Raises: InputError."""
    names = [name for name, _ in parameters]
    for name in names:
        if name in _OURS or not name:
            raise InputError(f"--request-parameter '{name}': the name belongs to the protocol")
        if names.count(name) > 1:
            raise InputError(f"--request-parameter {name}: it is given twice")
