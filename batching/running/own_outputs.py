"""OwnOutputs: what user code has answered, where that is not what its Signature says, or something is said with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.backends.datatypes import BY_DTYPE, DATATYPES
from penstock.backends.errors import Code, InferError


class OwnOutputs(list[Any]):
    """A request's outputs, in the order of its `wanted`; None stands for one that was not given.

    `parameters` are said with them. `wrong` is in what they are not as the Signature says, "" for nothing; `lacking`:
    in nothing but that some were not given.
    """

    __slots__ = ("lacking", "parameters", "wrong")

    def __init__(
        self, outputs: Iterable[Any], parameters: Mapping[str, Any], wrong: str = "", *, lacking: bool = False
    ) -> None:
        super().__init__(outputs)
        self.parameters = dict(parameters)
        self.wrong = wrong
        self.lacking = lacking


class OwnAnswer(dict[str, Any]):
    """The same by name, of those that there are."""

    __slots__ = ("parameters",)

    def __init__(self, named: Iterable[tuple[str, Any]], parameters: Mapping[str, Any]) -> None:
        super().__init__(named)
        self.parameters = dict(parameters)


def regular(outputs: list[Any]) -> list[Any]:
    """Give outputs to who counts on their Signature. Raises: InferError (INTERNAL) where they are not as it says."""
    if type(outputs) is OwnOutputs and outputs.wrong:
        raise InferError(Code.INTERNAL, outputs.wrong)
    return outputs


def own_datatype(datatype: str, array: Any) -> str:
    """Give the datatype of an output: `datatype`, which was declared, unless its array is of another."""
    return datatype if DATATYPES[datatype].dtype == array.dtype else BY_DTYPE[array.dtype].name
