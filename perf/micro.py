"""CPU time per request by stage, without sockets: `python -m penstock.perf.micro [MODEL.onnx]`.

The protocol class is fed bytes and its output is discarded, so that only the work of Penstock and of the model is
counted. Each figure is the fastest of many rounds: on a shared machine the least disturbed round is the most accurate.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import orjson
import uvloop
from uvicorn.config import Config
from uvicorn.server import ServerState

from penstock.backends.loading import LOADERS
from penstock.backends.signature import TensorSpec
from penstock.batching.caching.cache import Cache
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.hooks.runner import Hooks
from penstock.server.http.fastlane import FastLane
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.v2.decode import decode, decode_and_cache
from penstock.server.v2.inference import Inference
from penstock.server.v2.layout import Layouts
from penstock.server.v2.parsing import parse_simd
from penstock.server.v2.regions import Regions
from penstock.server.v2.tensors import from_json

from .claims import verdict
from .ipc import print_front_end_cost, print_hook_cost, print_round_trip_cost

ROUNDS = 300
CONNECTIONS = (1, 8, 32, 64)
SCHEDULING_BUDGET_US = 3.0
TARGET_US = 1_000_000
"""Far away, so that no request is rejected."""
RUN_NS = 20_000
"""The assumed run time of a batch where none is run."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The load for scheduling: requests per loop turn, their number of shapes, and requests waiting before them."""

    per_turn: int
    shapes: int = 1
    waiting: int = 0

    def __str__(self) -> str:
        text = f"{self.per_turn} a turn"
        return f"{text}, {self.shapes} shapes, {self.waiting} wait" if self.waiting else text


QUEUES = (Queue(16), Queue(64), Queue(16, shapes=16, waiting=512))


class Nowhere:
    """A sink that discards what it is given."""

    def deliver(self, requests: object) -> None:
        """Discard."""


def _not_run(_model: Model, _binding: object, batch: Batch) -> list[Batch]:
    """Stand in for `isolation.execute`."""
    batch.compute_end_ns = batch.exec_end_ns = batch.exec_start_ns + RUN_NS
    return [batch]


class SinkTransport(asyncio.Transport):
    """A transport that discards what is written to it."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(bytes(data[:500]).decode())

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


class Stage:
    """One server without sockets, and `count` connections to it."""

    def __init__(self, engine: Engine, count: int, regions: Regions | None = None) -> None:
        self.service = Inference(engine, Limits(), lambda model: Hooks(engine, model), regions)
        shared = HttpShared(self.service, Limits())
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
    """Return the CPU microseconds of one of `per_call` units of work."""
    best = float("inf")
    for _ in range(30):
        start = time.process_time_ns()
        for _ in range(number):
            function()
        best = min(best, time.process_time_ns() - start)
    return best / number / per_call / 1e3


async def trip_us(engine: Engine, count: int, raw: bytes) -> float:
    """Return the CPU microseconds of a request's whole trip, with `count` requests per loop turn."""
    stage = Stage(engine, count)
    last = stage.connections[-1]
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.process_time_ns()
        for _ in range(10):
            for connection in stage.connections:
                connection.data_received(raw)
            await asyncio.sleep(0)
            while last.busy:  # noqa: ASYNC110 - the turns of the loop are what is measured
                await asyncio.sleep(0)
        best = min(best, time.process_time_ns() - start)
        if engine.inflight:
            raise RuntimeError("not all were answered when the last was")
    return best / (10 * count) / 1e3


async def scheduling_us(engine: Engine, model: Model, queue: Queue) -> float:
    """Return the CPU microseconds of a request from submit to delivery, without the run itself.

    This covers admission to the queue, taking a batch, learning, delivery, statistics and the loop's own turns, but not
    creating the InferRequest.
    """
    best, turn_count, sink, array = float("inf"), 20, Nowhere(), np.zeros((1, 4), np.float32)

    def made(count: int) -> list[InferRequest]:
        return [InferRequest(model, [array], 1, ((index % queue.shapes,),), (0,), sink) for index in range(count)]

    with patch("penstock.batching.model.execute", _not_run):
        for _ in range(ROUNDS):
            for request in made(queue.waiting):
                engine.submit(request)
            groups = [made(queue.per_turn) for _ in range(turn_count)]
            start = time.process_time_ns()
            for group in groups:
                for request in group:
                    engine.submit(request)
                await asyncio.sleep(0)
                while model.inflight > queue.waiting:  # noqa: ASYNC110 - the turns of the loop are what is measured
                    await asyncio.sleep(0)
            best = min(best, time.process_time_ns() - start)
            while model.inflight:  # noqa: ASYNC110 - nothing else is to be done meanwhile
                await asyncio.sleep(0)
    return best / (turn_count * queue.per_turn) / 1e3


async def scheduling(engine: Engine, path: Path) -> None:
    """Print the cost of scheduling, with and without a target, and whether it is within the budget."""
    max_us = 0.0
    for version, target_us in ((3, 0), (4, TARGET_US)):
        policy = BatchPolicy(executor="loop", latency_target_us=target_us)
        model = await engine.load(ModelSpec("iris", version, path, policy=policy))
        for queue in QUEUES:
            us = await scheduling_us(engine, model, queue)
            print_cost(f"scheduling{', a target' if target_us else ''}, {queue}", us)
            max_us = max(max_us, us)
        await engine.unload("iris", version)
    claim = f"scheduling: {max_us:.2f} us a request, at most {SCHEDULING_BUDGET_US:g}"
    print(verdict(claim, max_us <= SCHEDULING_BUDGET_US))


def print_cost(label: str, us: float) -> None:
    """Print one line of the table."""
    print(f"{label:54}{us:9.2f} us")


def document(name: str, count: int) -> bytes:
    """Make a v2 request with one row of `count` numbers."""
    values = np.random.default_rng(0).random(count, dtype=np.float32).tolist()
    return orjson.dumps({"inputs": [{"name": name, "shape": [1, count], "datatype": "FP32", "data": values}]})


def decoding(model: Model, service: Inference) -> None:
    """Print the cost of decoding, in full and remembered."""
    name = model.signature.inputs[0].name
    row = document(name, 4)
    size = {"binary_data_size": 16}
    entry = {"name": name, "shape": [1, 4], "datatype": "FP32", "parameters": size}
    text = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}})
    for kind, body, header_bytes in (("JSON row", row, -1), ("binary tensor", text + bytes(16), len(text))):
        layouts = Layouts()
        decode_and_cache(model, body, header_bytes, 100, service, layouts)
        print_cost(f"decode a {kind}", fastest_us(partial(decode, model, body, header_bytes, 100, service)))
        remembered = partial(layouts.find, model, body, header_bytes, service)
        print_cost(f"decode a {kind}, its JSON remembered", fastest_us(remembered))


def numbers() -> None:
    """Print the cost of many numbers, by each of the two ways of converting tensors to and from JSON."""
    spec = TensorSpec("x", "FP32", (-1, -1))
    for count, number in ((4, 200), (64, 200), (512, 50), (150_528, 1)):
        body = document("x", count)
        for parser_name, simd in (("orjson", False), ("simdjson", True)):

            def read(body: bytes = body, count: int = count, simd: bool = simd) -> object:
                parsed = parse_simd(body) if simd else orjson.loads(body)
                return from_json(spec, [1, count], count, parsed["inputs"][0]["data"])

            print_cost(f"{count} numbers from JSON, {parser_name}", fastest_us(read, number=number))
    for count in (3, 64, 512):
        array = np.random.default_rng(0).random(count, dtype=np.float32)
        print_cost(f"{count} numbers to JSON, as a list", fastest_us(lambda array=array: orjson.dumps(array.tolist())))  # type: ignore[misc]
        print_cost(
            f"{count} numbers to JSON, through numpy",
            fastest_us(
                lambda array=array: orjson.dumps(array.astype(np.float64), option=orjson.OPT_SERIALIZE_NUMPY)  # type: ignore[misc]
            ),
        )


def running(model: Model, service: Inference) -> None:
    """Print the cost of encoding, gathering and running."""
    encoder = service._encoder(model)  # noqa: SLF001
    output = [np.array([[0.1, 0.2, 0.7]], np.float32)]
    print_cost("encode a JSON row", fastest_us(lambda: encoder.encode_json("", (0,), output)))
    binding = model.loop_binding
    for rows in (1, 32) if binding is not None else ():
        parts = [np.zeros((1, 4), np.float32)] * rows

        def run(rows: int = rows, parts: list[Any] = parts) -> None:
            for buffer in binding.acquire_buffers(rows, [(rows, 4)]):  # type: ignore[union-attr]
                np.concatenate(parts, out=buffer)
            binding.run((0,))  # type: ignore[union-attr]

        print_cost(f"gather and run {rows} rows, per row", fastest_us(run, rows))


def remembering(model: Model) -> None:
    """Print the response cache's cost for a request that hits it."""
    cache = Cache(1 << 20)
    keys, row = cache.make_keys(model.name, model.version, model.signature), np.zeros((1, 4), np.float32)
    key = keys.key_for([row], (0,))
    cache.insert(key, [np.zeros((1, 3), np.float32)], set())
    print_cost("make the key of a row", fastest_us(lambda: keys.key_for([row], (0,))))
    print_cost("find an answer by it", fastest_us(lambda: cache.find(key)))


async def main(path: Path) -> None:
    """Print the table."""
    np.seterr(all="ignore")
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    await scheduling(engine, path)
    for version, executor in ((1, "thread"), (2, "loop")):
        model = await engine.load(ModelSpec("iris", version, path, policy=BatchPolicy(executor=executor)))
    body = document(model.signature.inputs[0].name, 4)
    for executor, version in (("loop", 2), ("thread", 1)):
        raw = (
            b"POST /v2/models/iris/versions/%d/infer HTTP/1.1\r\nhost: localhost:8000\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (version, len(body), body)
        )
        for count in CONNECTIONS:
            print_cost(f"whole trip on the {executor}, {count} a turn", await trip_us(engine, count, raw))
    service = Inference(engine, Limits(), lambda model: Hooks(engine, model))
    decoding(model, service)
    numbers()
    running(model, service)
    remembering(model)
    await print_round_trip_cost()
    await print_hook_cost(engine, path)
    await engine.stop(1.0)
    await print_front_end_cost(path)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "perf/.models/iris/1/model.onnx")))
