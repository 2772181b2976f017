from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from tests.backends.contract import MODELS, TABLE, BackendContract
from tests.fakes import FakeBackend


def _pick(x: Array) -> list[Array]:
    if x.max(initial=0) >= len(TABLE):
        raise InferError(Code.INVALID, "out of the table")
    return [TABLE[x]]


FUNCTIONS: dict[str, Callable[..., list[Any]]] = {
    "rows": lambda x: [x * 2, x.sum(axis=1)],
    "free": lambda x: [x + 1],
    "scalar": lambda a, b: [a * b, np.sum(a * b)],
    "strings": lambda x: [x],
    "optional": lambda x, offset: [x + (10 if offset is None else offset)],
    "picky": _pick,
}


class TestFakeBackend(BackendContract):
    def make(self, name: str) -> FakeBackend:
        return FakeBackend(MODELS[name], lambda inputs: FUNCTIONS[name](*inputs))
