"""A fake device: Bindings whose runs begin and end in separate steps, one after another as on one stream."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.backend import Array, Binding
from penstock.backends.errors import Code, DeviceLost, RunStopped
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.devices.device import Device
from penstock.batching.devices.placement import Devices, Reopen
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from tests.batching.running_models import having
from tests.fakes import PATIENCE_S, FakeBackend, fake_request

ROWS = Signature((TensorSpec("x", "FP32", (-1, 4)),), (TensorSpec("y", "FP32", (-1, 4)),), batched=True)
AT_ONCE_NS = 1
"""What batches are predicted to take where what waits is to be taken as soon as one is begun."""
LONG_NS = 3_600_000_000_000
"""What they are predicted to take where it is to be taken when it is full only."""


@dataclass
class Stream(FakeBackend):
    """A Backend on a device. `events`: the actions of its Bindings, by number; `function` is called as a run ends.

    `held`: runs end only when the test lets them (`let_end`). `begins` is called once, as a run is begun; it may raise.
    """

    events: list[tuple[str, int, int]] = field(default_factory=list)
    held: bool = False
    kind: type[StreamBinding] | None = None
    device_bytes: int = 0
    threads_only = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.begun = threading.Semaphore(0)
        self.rested = threading.Semaphore(0)
        self._ends = threading.Semaphore(0)
        self.threads: set[str] = set()
        self.begins: Callable[[], None] | None = None
        self._lost: str | None = None

    def bind(self, signature: Signature, capacity_rows: int) -> Binding:
        binding = (self.kind or StreamBinding)(self, signature, len(self.bindings))
        self.bindings.append(binding)  # type: ignore[arg-type]
        return binding

    def let_end(self, runs: int = 1) -> None:
        self._ends.release(runs)

    @property
    def may_end(self) -> bool:
        return self.held and self._ends._value > 0

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)

    def wait_end(self, stopped: threading.Event) -> None:
        """Wait until the oldest run may end, or is stopped."""
        if self.held:
            assert self._ends.acquire(timeout=PATIENCE_S)
        if stopped.is_set():
            raise RunStopped(Code.EXPIRED, "the fake was stopped")
        self.check()

    def check(self) -> None:
        """Raise the error that the device was lost with: from then on every use of it fails."""
        if self._lost is not None:
            raise DeviceLost(Code.NOT_READY, self._lost)

    def compute(self, inputs: list[Array | None]) -> list[Any]:
        try:
            return self.function(inputs)
        except DeviceLost as error:
            self._lost = error.message
            raise


class StreamBinding:
    """A Binding that reads its inputs when the run ends, as late as a device could; at most one run is in flight."""

    device_ns = 0

    def __init__(self, stream: Stream, signature: Signature, number: int) -> None:
        self.capacity_rows = 64
        self.number = number
        self.stopped = threading.Event()
        self.under_way: tuple[int, ...] | None = None
        self.rested = 0
        self.prepared: list[tuple[int, Any]] = []
        self._stream = stream
        self._signature = signature
        self._lent: list[Array | None] = []
        self._rows = 0

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        assert self.under_way is None
        self._note("acquire", rows)
        self._rows = rows
        self.stopped.clear()
        dtypes = [spec.type.dtype for spec in self._signature.inputs]
        self._lent = [
            None if shape is None else np.full(shape, -77, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        return list(self._lent)

    def begin(self, wanted: Sequence[int]) -> None:
        assert self.under_way is None
        self._note("begin", self._rows)
        begins, self._stream.begins = self._stream.begins, None
        if begins is not None:
            begins()
        self._stream.check()
        self.under_way = tuple(wanted)
        self._stream.begun.release()

    def end(self) -> list[Any]:
        positions, self.under_way = self.under_way, None
        assert positions is not None
        stream = self._stream
        try:
            stream.wait_end(self.stopped)
            outputs = stream.compute([None if array is None else array.copy() for array in self._lent])
        finally:
            self._note("end", self._rows)
        self.device_ns = 1_000 * self._rows
        return [outputs[position] for position in positions]

    def is_done(self) -> bool:
        return self._stream.may_end

    def run(self, wanted: Sequence[int]) -> list[Any]:
        self.begin(wanted)
        return self.end()

    def stop(self) -> None:
        self.stopped.set()
        if self._stream.held:
            self._stream.let_end()

    def _note(self, what: str, rows: int) -> None:
        self._stream.events.append((what, self.number, rows))
        self._stream.threads.add(threading.current_thread().name)


@dataclass
class House:
    """One Model on the device, its Instances running; `finished`: the queue of its finished batches."""

    model: Model
    stream: Stream
    finished: queue.Queue[Batch]
    out: dict[int, InferRequest] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)

    def put(self, *values: float, rows: int = 1) -> list[InferRequest]:
        """Submit requests with these values together."""
        requests = [fake_request(self.model, rows, value=value) for value in values]
        with self.model.lock:
            for request in requests:
                self.model.scheduler.add(request)
        self.model.dispatch(1)
        return requests

    def put_two(self, first: Sequence[float], second: Sequence[float]) -> tuple[list[InferRequest], list[InferRequest]]:
        """Submit requests, and others while the first ones begin."""
        then: list[InferRequest] = []
        self.stream.begins = lambda: then.extend(self.put(*second))
        return self.put(*first), then

    def next(self) -> Batch:
        """Wait for the next finished batch. No request finishes twice."""
        batch = self.finished.get(timeout=PATIENCE_S)
        self.batches.append(batch)
        for request in batch.requests:
            assert id(request) not in self.out
            self.out[id(request)] = request
        return batch

    def ended(self, *requests: list[InferRequest]) -> None:
        """Wait until these requests have finished, in any batches."""
        while any(id(request) not in self.out for each in requests for request in each):
            self.next()

    def takes(self, ns: int) -> None:
        """Predict this time for every batch, whatever is learned."""
        costs = self.model.costs
        costs.observe = lambda *_: False  # type: ignore[method-assign]
        costs.predict_ns = lambda key, rows: ns  # type: ignore[method-assign]


@contextmanager
def opened(
    stream: Stream, reopen: Reopen | None = None, device: Device | Devices | None = None,
    predicted_ns: int = AT_ONCE_NS, group: InstanceGroup | None = None, **policy: Any,
) -> Iterator[House]:  # fmt: skip
    terms = {"max_batch_rows": 8, **policy}
    spec = ModelSpec(
        "m",
        1,
        Path("m"),
        policy=BatchPolicy(**terms),
        instances=(group or InstanceGroup(1, ("cuda:0",)),),
        signature=stream.graph,
    )
    finished: queue.Queue[Batch] = queue.Queue()

    def finish(model: Model, ran: list[Batch]) -> None:
        for batch in ran:
            finished.put(batch)

    devices = having("cuda:0", device) if isinstance(device, Device) else device
    model = Model(spec, [stream], finish, devices, reopen)
    model.open()
    house = House(model, stream, finished)
    house.takes(predicted_ns)
    try:
        yield house
    finally:
        stream.held = False
        stream.let_end(99)
        model.close()
