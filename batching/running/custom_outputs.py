"""CustomOutputs: what user code answered, if that deviates from its Signature or has parameters attached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.backends.datatypes import BY_DTYPE, DATATYPES
from penstock.backends.errors import Code, InferError


class CustomOutputs(list[Any]):
    """A request's outputs, in the order of its `output_positions`; None for one that was not returned.

    `parameters` belong to them. `mismatch` says how they deviate from the Signature, "" if they do not; `incomplete`:
    only in that some are missing.
    """

    __slots__ = ("incomplete", "mismatch", "parameters")

    def __init__(
        self, outputs: Iterable[Any], parameters: Mapping[str, Any], mismatch: str = "", *, incomplete: bool = False
    ) -> None:
        super().__init__(outputs)
        self.parameters = dict(parameters)
        self.mismatch = mismatch
        self.incomplete = incomplete


class CustomAnswer(dict[str, Any]):
    """The same by name, without missing outputs."""

    __slots__ = ("parameters",)

    def __init__(self, named: Iterable[tuple[str, Any]], parameters: Mapping[str, Any]) -> None:
        super().__init__(named)
        self.parameters = dict(parameters)


def require_matching(outputs: list[Any]) -> list[Any]:
    """Return outputs to code that relies on their Signature. Raises: InferError (INTERNAL) if they deviate from it."""
    if type(outputs) is CustomOutputs and outputs.mismatch:
        raise InferError(Code.INTERNAL, outputs.mismatch)
    return outputs


def missing_output_error(outputs: list[Any]) -> InferError | None:
    """Return the error for code that needs every output, if one is missing."""
    if type(outputs) is CustomOutputs and any(output is None for output in outputs):
        return InferError(Code.INTERNAL, outputs.mismatch)
    return None


def actual_datatype(datatype: str, array: Any) -> str:
    """Return an output's datatype: the declared one, unless its array has another."""
    return datatype if DATATYPES[datatype].dtype == array.dtype else BY_DTYPE[array.dtype].name
