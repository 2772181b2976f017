"""Engines: a model in an Engine in this process, and callers that keep it busy. Used by several parts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock.backends.backend import Array, Backend, Binding, Loader, supports_preparation
from penstock.backends.loading import LOADERS
from penstock.backends.signature import Signature
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec

from .context import CheckContext
from .models import Tensor, Variant

_STOP_S = 10.0
REQUESTS_PER_BATCH = 4
"""Callers keep this many batches requested: one runs, one is copied, and the next is always complete."""


USUAL: Mapping[str, str] = MappingProxyType({"penstock.gpu_graphs": "auto"})
"""The options of a model whose configuration sets none (server/repository/placing.py)."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is loaded. `overlap` False: no Binding has separate `begin` and `end`. `options`: a Loader's."""

    rows: int
    instances: int = 1
    overlap: bool = True
    options: Mapping[str, str] = field(default_factory=lambda: USUAL)


class _Plain:
    """A Binding of which only `acquire_buffers`, `run` and `stop` are visible."""

    def __init__(self, binding: Binding) -> None:
        self.capacity_rows = binding.capacity_rows
        self.acquire_buffers, self.run, self.stop = binding.acquire_buffers, binding.run, binding.stop
        if supports_preparation(binding):
            self.prepare = binding.prepare


class _WithoutOverlap:
    """A Backend whose Bindings are plain."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def bind(self, signature: Signature, capacity_rows: int) -> _Plain:
        return _Plain(self._backend.bind(signature, capacity_rows))


def _loaders(load_options: LoadOptions) -> Mapping[str, Loader]:
    if load_options.overlap:
        return LOADERS

    def load(path: Path, device: str, options: Mapping[str, str]) -> Any:
        return _WithoutOverlap(LOADERS["onnxruntime"](path, device, options))

    return {"onnxruntime": load}


def spec_of(context: CheckContext, variant: Variant, load_options: LoadOptions) -> ModelSpec:
    """Return the specification that a model is served with. Its queue is long enough for all callers."""
    groups = (InstanceGroup(load_options.instances, (context.device,)),)
    policy = BatchPolicy(
        max_batch_rows=load_options.rows, max_queue_rows=64 * load_options.rows, max_queue_bytes=16 << 30
    )
    return ModelSpec(
        variant.name, 1, context.file(variant), policy=policy, instances=groups, options=load_options.options
    )


@asynccontextmanager
async def served(
    context: CheckContext, variant: Variant, load_options: LoadOptions
) -> AsyncIterator[tuple[Engine, Model]]:
    """Serve a model until the block ends. Raises: InferError."""
    engine = Engine(asyncio.get_running_loop(), _loaders(load_options))
    try:
        yield engine, await engine.load(spec_of(context, variant, load_options))
    finally:
        await engine.stop(_STOP_S)


def inputs_of(model: Model, inputs: Mapping[str, Tensor]) -> list[Array | None]:
    """Return the drawn inputs in the order of the model's inputs."""
    return [inputs[tensor.name] for tensor in model.signature.inputs]


@dataclass(frozen=True, slots=True)
class DriveResult:
    """What callers measured. Units: rows/s, seconds from request to answer, rows of the batches that ran.

    `busy`: the share of the time that the device ran the model; 0 on the CPU, which does not report it.
    """

    rows_per_s: float
    took_s: Sequence[float]
    rows_per_batch: float
    busy: float

    def ms(self, quantile: float) -> float:
        """Return a quantile (0 to 1) of the latency."""
        return float(np.quantile(self.took_s, quantile)) * 1e3 if self.took_s else float("nan")


async def drive(engine: Engine, model: Model, feed: list[Array | None], callers: int, seconds: float) -> DriveResult:
    """Keep this many requests in flight: first for a warm-up that is not counted, then for `seconds`."""
    rows = len(feed[0]) if feed and feed[0] is not None else 1
    latencies_s: list[float] = []
    begin_s = time.perf_counter()
    counts, ends = begin_s + seconds / 3, begin_s + seconds / 3 + seconds
    batches, device_ns = [0, 0], [0, 0]

    async def call() -> None:
        while (start := time.perf_counter()) < ends:
            await engine.infer(model, list(feed))
            now = time.perf_counter()
            if counts <= now <= ends:
                latencies_s.append(now - start)

    async def look() -> None:
        for position, when in enumerate((counts, ends)):
            await asyncio.sleep(when - time.perf_counter())
            batches[position] = model.statistics.snapshot().execution_count
            with model.lock:
                device_ns[position] = sum(model.device_ns.values())

    await asyncio.gather(look(), *(call() for _ in range(callers)))
    busy = (device_ns[1] - device_ns[0]) / 1e9 / seconds
    return DriveResult(
        rows * len(latencies_s) / seconds, latencies_s, rows * len(latencies_s) / max(batches[1] - batches[0], 1), busy
    )
