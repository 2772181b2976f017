"""Fakes shared by several tests: the interfaces of `backends/` and `batching/` without a runtime or a clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array, Backend, Binding, Loader
from penstock.backends.errors import Code, RunStopped
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest, Key, Sink
from penstock.batching.spec import HookSpec, ModelSpec

Function = Callable[[list[Array | None]], list[Any]]

PATIENCE_S = 10.0
"""How long a fake waits for what must come before it fails the test. Working code never takes nearly as long."""


@dataclass(frozen=True)
class FakeRun:
    """What one run was given: its rows, a copy of its inputs, and the positions wanted."""

    rows: int
    inputs: list[Array | None]
    positions: tuple[int, ...]


@dataclass
class FakeBackend:
    """A Backend whose model is `function`: it takes all inputs and returns all outputs, in the graph's shapes.

    `runs` records each run. `function` may raise, or wait on an event that the test holds, or on `stopped`, which is
    set from when a Binding is stopped until it is lent again: a run that ends meanwhile has been stopped.
    """

    graph: Signature
    function: Function
    platform: str = "fake"
    runs: list[FakeRun] = field(default_factory=list)
    bindings: list[FakeBinding] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)
    closed: bool = False
    stateful: bool = False
    shared_scale: str = ""
    compiles_each_size: bool = False

    def __post_init__(self) -> None:
        self.node_inputs: Sequence[Any] = self.graph.inputs
        self.runtime_metadata: Mapping[str, Any] = {}
        self.node_outputs: Sequence[Any] = self.graph.outputs

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        binding = FakeBinding(self, signature, capacity_rows)
        self.bindings.append(binding)
        return binding

    def close(self) -> None:
        self.closed = True


class FakeBinding:
    """Lends fresh buffers, filled with garbage so that an unfilled row shows."""

    def __init__(self, backend: FakeBackend, signature: Signature, capacity_rows: int) -> None:
        self.capacity_rows = capacity_rows
        self._backend = backend
        self._signature = signature
        self._lent: list[Array | None] = []
        self._rows = 0

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        if rows > self.capacity_rows:
            raise ValueError(f"{rows} rows lent, capacity is {self.capacity_rows}")
        self._backend.stopped.clear()
        self._rows = rows
        self._lent = [
            None if shape is None else _garbage(spec, shape)
            for spec, shape in zip(self._signature.inputs, shapes, strict=True)
        ]
        return list(self._lent)

    def run(self, wanted: Sequence[int]) -> list[Any]:
        backend = self._backend
        copies = [None if array is None else array.copy() for array in self._lent]
        backend.runs.append(FakeRun(self._rows, copies, tuple(wanted)))
        inputs = [
            None if array is None else (array.reshape(()) if spec.shape == () else array.copy())
            for spec, array in zip(backend.graph.inputs, copies, strict=True)
        ]
        outputs = backend.function(inputs)
        if backend.stopped.is_set():
            raise RunStopped(Code.EXPIRED, "the fake was stopped")
        return [self._present(position, outputs[position]) for position in wanted]

    def stop(self) -> None:
        self._backend.stopped.set()

    def _present(self, position: int, output: Any) -> Any:
        if self._backend.graph.outputs[position].shape == () and self._signature.outputs[position].shape == (1,):
            return np.asarray(output).reshape(1)
        return output


def fake_loader(backend: FakeBackend) -> Loader:
    """A Loader that returns `backend` for every model."""

    def load(path: Path, device: str, options: Mapping[str, str]) -> Backend:
        return backend

    return load


def _garbage(spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    if not spec.is_tensor or spec.type.dtype.hasobject:
        return np.full(shape, b"garbage", dtype=object)
    array = np.empty(shape, spec.type.dtype)
    array.reshape(-1).view(np.uint8)[...] = 0xA5
    if spec.datatype == "BOOL":
        array[...] = True
    return array


def fake_model(
    name: str = "m", version: int = 1, signature: Signature | None = None, hooks: HookSpec | None = None
) -> Model:
    """A Model that is not opened: no threads. By default batched, with FP32 `x` [-1,4] as input and `y` as output."""
    if signature is None:
        signature = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)
    backend = FakeBackend(signature, list)
    return Model(ModelSpec(name, version, Path("model"), signature=signature, hooks=hooks), [backend], lambda *_: None)


class ListSink:
    """A Sink that keeps what it receives, one list per delivery, and lets a test await it."""

    def __init__(self) -> None:
        self.deliveries: list[list[InferRequest]] = []
        self._arrived = asyncio.Event()

    @property
    def requests(self) -> list[InferRequest]:
        """Everything delivered, in order."""
        return [request for delivery in self.deliveries for request in delivery]

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        self.deliveries.append(list(requests))
        self._arrived.set()

    async def holds(self, count: int) -> list[InferRequest]:
        """Wait until `count` requests were delivered, and return them."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.requests) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return self.requests


def no_more_threads(patch: pytest.MonkeyPatch) -> None:
    """Make every later start of a thread fail, as at a limit of processes and threads."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    patch.setattr(threading.Thread, "start", start)


class Gate:
    """A model's function that lets runs through only while it is open, as it is at first."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._open = threading.Event()
        self._open.set()
        self._entered = threading.Semaphore(0)

    def __call__(self, inputs: list[Array | None]) -> list[Any]:
        if not self._open.is_set():
            self._entered.release()
            if not self._open.wait(PATIENCE_S):
                raise TimeoutError("nobody opened the gate")
        return self._function(inputs)

    def close(self) -> None:
        """Block the runs that come from now on."""
        self._open.clear()

    def open(self) -> None:
        """Let all runs continue."""
        self._open.set()

    async def entered(self) -> None:
        """Wait until one more run has reached the closed gate."""
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(None, self._entered.acquire, True, PATIENCE_S):
            raise TimeoutError("no run came to the gate")


class Doors:
    """A model's function in which each run reports that it has entered, and waits until the test lets it out."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._out = threading.Semaphore(0)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.entered.release()
        if not self._out.acquire(timeout=PATIENCE_S):
            raise TimeoutError("nobody let it out")
        return list(inputs)

    def wait_in(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)

    def let_out(self, count: int = 1) -> None:
        self._out.release(count)

    @property
    def empty(self) -> bool:
        """Whether nobody has come in that has not been noticed."""
        return not self.entered.acquire(blocking=False)


class NoSink:
    """A Sink for requests that are never delivered."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        raise AssertionError("nothing is delivered here")


def fake_request(
    model: Model, rows: int = 1, key: Key = ((4,),), *, value: float = 0.0, sink: Sink | None = None
) -> InferRequest:
    """A request for a batched model: every FP32 input has `rows` rows of `value`, and all outputs are wanted."""
    inputs: list[Array | None] = [None if tail is None else np.full((rows, *tail), value, np.float32) for tail in key]
    request = InferRequest(model, inputs, rows, key, model.all_outputs, sink or NoSink())
    request.nbytes = sum(array.nbytes for array in inputs if array is not None)
    return request
