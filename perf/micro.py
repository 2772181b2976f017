"""CPU time per request by stage, without sockets: `python -m penstock.perf.micro [MODEL.onnx]`.

The protocol class is fed bytes and writes into a list, so that what is counted is Penstock's own work and the model's.
Each figure is the fastest of many rounds: on a shared machine the least disturbed round is the nearest to the truth.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.hooks.runner import Hooks
from penstock.server.http.fastlane import FastLane
from penstock.server.http.limits import Limits
from penstock.server.http.service import Shared
from penstock.server.v2.decode import decode
from penstock.server.v2.inference import Inference

ROUNDS = 300
CONNECTIONS = (1, 8, 32, 64)
BUDGET_US = 12.0


class SinkTransport(asyncio.Transport):
    """A transport that forgets what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(bytes(data[:500]).decode())
        self.written += len(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


class Stage:
    """One server without sockets, and `count` connections to it."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.engine = engine
        self.service = Inference(engine, Limits(), lambda model: Hooks(engine, model))
        shared = Shared(self.service, Limits())
        protocol = type("Lane", (FastLane,), {"shared": shared})
        config = Config(_no_app, lifespan="off", ws="none", log_config=None)
        config.load()
        state = ServerState()
        state.default_headers = [(b"date", b"Fri, 20 Nov 2026 00:00:00 GMT")]
        self.connections = [protocol(config=config, server_state=state, app_state={}) for _ in range(count)]
        for connection in self.connections:
            connection.connection_made(SinkTransport())


async def _no_app(_scope: Any, _receive: Any, _send: Any) -> None: ...


def fastest_us(function: Callable[[], object], per_call: int = 1, number: int = 200) -> float:
    """CPU microseconds of one of `per_call` units of work."""
    best = float("inf")
    for _ in range(30):
        start = time.process_time_ns()
        for _ in range(number):
            function()
        best = min(best, time.process_time_ns() - start)
    return best / number / per_call / 1e3


async def trip_us(engine: Engine, count: int, raw: bytes) -> float:
    """CPU microseconds of a request's whole trip, `count` requests a loop turn."""
    stage = Stage(engine, count)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time_ns()
        for _ in range(10):
            for connection in stage.connections:
                connection.data_received(raw)
            await asyncio.sleep(0)
            while engine.inflight:  # noqa: ASYNC110 - the turns of the loop are what is measured
                await asyncio.sleep(0)
        best = min(best, time.process_time_ns() - start)
    return best / (10 * count) / 1e3


async def main(path: Path) -> None:
    """Print the table."""
    np.seterr(all="ignore")
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    model = await engine.load(ModelSpec("iris", 1, path, policy=BatchPolicy(executor="loop")))
    name = model.signature.inputs[0].name
    body = orjson.dumps({"inputs": [{"name": name, "shape": [1, 4], "datatype": "FP32", "data": [5.1, 3.5, 1.4, 0.2]}]})
    raw = (
        b"POST /v2/models/iris/infer HTTP/1.1\r\nhost: localhost:8000\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    for count in CONNECTIONS:
        print(f"whole trip, {count:3} a turn   {await trip_us(engine, count, raw):6.2f} us per request")
    service = Inference(engine, Limits(), lambda model: Hooks(engine, model))
    encoder = service._encoder(model)  # noqa: SLF001
    output = [np.array([[0.1, 0.2, 0.7]], np.float32)]
    print(f"decode                  {fastest_us(lambda: decode(model, body, -1, 100, service)):6.2f}")
    print(f"encode                  {fastest_us(lambda: encoder.json('', (0,), output)):6.2f}")
    binding = model.loop_binding
    if binding is not None:
        for rows in (1, 32):
            inputs = [[np.zeros((1, 4), np.float32)] * rows]

            def run(rows: int = rows, inputs: list[Any] = inputs) -> None:
                for buffer, parts in zip(binding.lend(rows, [(rows, 4)]), inputs, strict=True):
                    np.concatenate(parts, out=buffer)
                binding.run((0,))

            print(f"gather and run, {rows:3} rows {fastest_us(run, rows):6.2f}")
    await engine.stop(1.0)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "perf/.models/iris/1/model.onnx")))
