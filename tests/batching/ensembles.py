"""Ensembles for tests: an Engine over models made of functions, each behind a gate of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.backend import Array, Backend
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, EnsembleSpec, InstanceGroup, ModelSpec, Step
from tests.fakes import PATIENCE_S, FakeBackend, Function, Gate, ListSink

ROWS = 16


def tensors(*names: str, shape: tuple[int, ...] = (4,), datatype: str = "FP32") -> tuple[TensorSpec, ...]:
    """Describe tensors as in a configuration: without rows."""
    return tuple(TensorSpec(name, datatype, shape) for name in names)


def step(model: str, inputs: str, outputs: str, version: str = "") -> Step:
    """Make a step from maps such as `a=x b=y`: the model's tensor, then the ensemble's."""
    sides = [dict(pair.split("=") for pair in side.split()) for side in (inputs, outputs)]
    return Step(model, version, *sides)


def ensemble_spec(name: str, inputs: str, outputs: str, *steps: Step, **terms: Any) -> ModelSpec:
    """Make the spec of an ensemble over tensors of four FP32."""
    rows = terms.pop("rows", ROWS)
    return ModelSpec(
        name, terms.pop("version", 1), Path(name),
        inputs=terms.pop("takes", None) or tensors(*inputs.split()), outputs=tensors(*outputs.split()),
        policy=BatchPolicy(max_batch_rows=rows), ensemble=EnsembleSpec(steps), **terms,
    )  # fmt: skip


@dataclass
class House:
    """An Engine, with the backend and gate of each model."""

    engine: Engine
    loop: asyncio.AbstractEventLoop
    backends: dict[str, FakeBackend] = field(default_factory=dict)
    gates: dict[str, Gate] = field(default_factory=dict)
    sink: ListSink = field(default_factory=ListSink)

    async def serve(
        self, name: str, function: Function, inputs: str = "x", outputs: str = "y", *, count: int = 1, **terms: Any
    ) -> Model:
        """Load a model of a function; `graph`: a Signature other than tensors of four FP32."""
        model = await self.engine.load(self.spec(name, function, inputs, outputs, count=count, **terms))
        self.backends[name].runs.clear()  # the warm-up's
        return model

    def spec(self, name: str, function: Function, inputs: str = "x", outputs: str = "y", **terms: Any) -> ModelSpec:
        """Make the spec of a model of a function."""
        sides = [tuple(TensorSpec(each, "FP32", (-1, 4)) for each in side.split()) for side in (inputs, outputs)]
        graph = terms.pop("graph", None) or Signature(sides[0], sides[1])
        gate = self.gates[name] = Gate(function)
        version, instance_count = terms.pop("version", 1), terms.pop("count", 1)
        self.backends[name] = FakeBackend(graph, gate)
        more: dict[str, Any] = {field: terms.pop(field) for field in ("hooks", "decoupled") if field in terms}
        more["inputs"] = terms.pop("declared", ())
        policy = BatchPolicy(**{"max_batch_rows": ROWS, "cap_rows": ROWS, "executor": "thread", **terms})
        instances = (InstanceGroup(instance_count),)
        return ModelSpec(name, version, Path(name), policy=policy, instances=instances, backend="fake", **more)

    def request(
        self, name: str, *values: float, rows: int = 1, positions: tuple[int, ...] | None = None
    ) -> InferRequest:
        """Make a request: an input of `rows` rows of each value."""
        model = self.engine.model(name)
        inputs: list[Array | None] = [np.full((rows, 4), value, np.float32) for value in values]
        key = tuple(None if array is None else array.shape[1:] for array in inputs)
        request = InferRequest(
            model, inputs, rows, key, model.all_outputs if positions is None else positions, self.sink
        )
        request.nbytes = sum(array.nbytes for array in inputs if array is not None)
        return request

    def submit(self, name: str, *values: float, **how: Any) -> InferRequest:
        """Submit such a request."""
        timeout_ns = how.pop("timeout_ns", 0)
        request = self.request(name, *values, **how)
        if timeout_ns:
            request.deadline_ns = time.monotonic_ns() + timeout_ns
        self.engine.submit(request)
        return request

    def runs(self, name: str) -> list[int]:
        """Return the rows of each run of a model."""
        return [run.rows for run in self.backends[name].runs]

    def at_rest(self) -> bool:
        """Return whether no request is in flight, and only links hold models."""
        models = self.engine.models()
        runs = [model.ensemble.passages for model in models if model.ensemble is not None]
        return not self.engine.inflight and not any(model.inflight for model in models) and not any(runs)


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    """Run an Engine for the duration of the block."""
    loop = asyncio.get_running_loop()
    created: list[House] = []

    def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
        return created[0].backends[path.name]

    engine = Engine(loop, {"fake": load})
    created.append(House(engine, loop))
    try:
        async with asyncio.timeout(2 * PATIENCE_S):
            yield created[0]
    finally:
        for gate in created[0].gates.values():
            gate.open()
        await engine.stop(PATIENCE_S)


def values_of(requests: Sequence[InferRequest]) -> list[float]:
    """Return the first value of each request's first output."""
    return [float(request.outputs[0].reshape(-1)[0]) for request in requests if request.outputs]
