"""Writing: what the writers of both protocols share. `http.py` and `grpc.py` write; `preparing.py` chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .tensors import InputError, Place, Step

Parameter = tuple[str, str | int | float | bool]
Template = Callable[[bytes, int], bytes]
"""Writes one step's requests of sequences, from a sequence's id as encoded by `Writer.identity`, and FIRST | LAST."""
FIRST, LAST = 1, 2
"""Marks of the requests that begin and end a sequence; one request may do both."""
_OURS = ("sequence_id", "sequence_start", "sequence_end", "binary_data_output", "triton_enable_empty_final_response")


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """A requested output, in shared memory or not."""

    name: str
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """What all requests of a run share besides their inputs. `version`: if empty, the server's choice."""

    model: str
    version: str
    outputs: tuple[RequestedOutput, ...]
    parameters: tuple[Parameter, ...] = ()


class Writer(Protocol):
    """Writes requests of one Call in one protocol. It is sent between processes."""

    def whole(self, step: Step) -> bytes:
        """Write an independent request. Raises: InputError."""
        ...

    def identity(self, number: int) -> bytes:
        """Encode a sequence's id."""
        ...

    def template(self, step: Step) -> Template:
        """Build what all requests of sequences with these inputs share. Raises: InputError."""
        ...


def check_parameters(parameters: Sequence[Parameter]) -> None:
    """Reject names reserved by the protocol, and duplicates. Raises: InputError."""
    names = [name for name, _ in parameters]
    for name in names:
        if name in _OURS or not name:
            raise InputError(f"--request-parameter '{name}': the name belongs to the protocol")
        if names.count(name) > 1:
            raise InputError(f"--request-parameter {name}: it is given twice")
