"""An Engine whose models run on the loop, and requests that arrive at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, ModelSpec
from tests.fakes import PATIENCE_S, FakeBackend, Function, ListSink, fake_loader, fake_request

X, Y = (TensorSpec(name, "FP32", (-1, -1)) for name in "xy")
BATCH_ROWS = 256
KEYS: Sequence[Any] = (((4,),), ((5,),))


def plus_one(inputs: list[Any]) -> list[Any]:
    return [inputs[0] + 1]


class House:
    """An Engine whose models run on the loop, and a sink; each model has run once, so that later requests batch."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(backend)})
        self.sink = ListSink()
        self.value = 0.0

    async def load(self, name: str = "m", **policy: Any) -> Model:
        terms = {"max_batch_rows": BATCH_ROWS, "cap_rows": BATCH_ROWS, "executor": "loop", **policy}
        spec = ModelSpec(name, 1, Path("model"), policy=BatchPolicy(**terms), backend="fake")
        model = await self.engine.load(spec)
        before = len(self.sink.requests)
        self.come(model)
        await self.sink.holds(before + 1)
        self.backend.runs.clear()
        return model

    def come(self, model: Model, rows: int = 1, key: Any = KEYS[0], **attributes: Any) -> InferRequest:
        """Submit one more request with a unique value."""
        self.value += 1
        request = fake_request(model, rows, key, value=self.value, sink=self.sink)
        for name, value in attributes.items():
            setattr(request, name, value)
        self.engine.submit_soon(request)
        return request

    @property
    def rows_run(self) -> list[int]:
        return [run.rows for run in self.backend.runs]


@asynccontextmanager
async def housed(function: Function = plus_one) -> AsyncIterator[House]:
    house = House(FakeBackend(Signature((X,), (Y,)), function))
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            yield house
    finally:
        await house.engine.stop(PATIENCE_S)


def right(request: InferRequest, value: float) -> bool:
    outputs = request.outputs or []
    return request.error is None and len(outputs) == 1 and bool((outputs[0] == value + 1).all())
