from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from tests.backends.contract import ENDLESS, MODELS, TABLE, BackendContract
from tests.fakes import PATIENCE_S, FakeBackend


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
        backend = FakeBackend(MODELS[name], lambda inputs: FUNCTIONS[name](*inputs))
        if name == "turns":
            backend.function = lambda inputs: _turn(backend, *inputs)
        return backend


def _turn(backend: FakeBackend, x: Array | None, turns: Array | None) -> list[Array | None]:
    if turns is not None and turns.max() == ENDLESS:
        backend.stopped.wait(PATIENCE_S)
    return [x]
