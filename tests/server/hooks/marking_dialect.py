"""A dialect for tests: every value shows which conversion made it and with which parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.hooks.conversions import ModelDescription


class Shouting:
    """`signatures` are dicts; errors of conversions are in the dialect's own words."""

    def __init__(self, description: ModelDescription) -> None:
        self.signatures: tuple[Any, Any] = ({"side": "in", **description.runtime_metadata}, {"side": "out"})
        self._loudness = description.settings["loudness"]

    def to_inputs(self, value: Any, parameters: Mapping[str, Any]) -> list[Array | None]:
        if not isinstance(value, int | float):
            raise InferError(Code.INVALID, f"{type(value).__name__.upper()}?")
        return [np.full((1, 1), value * self._loudness + parameters.get("more", 0), np.float32)]

    def to_prediction(self, outputs: Sequence[Any], parameters: Mapping[str, Any]) -> Any:
        return {"heard": float(outputs[0][0, 0]), **parameters}

    def encode_answer(self, result: Any, parameters: Mapping[str, Any]) -> bytes:
        try:
            return json.dumps(result).upper().encode() + b"!" * (1 + len(parameters))
        except TypeError:
            raise InferError(Code.UNKNOWN, "CANNOT SAY THAT") from None

    def error_for(self, hook: str, error: BaseException) -> InferError | None:
        if isinstance(error, LookupError):
            return None
        return InferError(Code.INVALID, f"{hook} SAYS {error}", retry_after_ns=7)


def conversions(description: ModelDescription) -> Shouting:
    return Shouting(description)
