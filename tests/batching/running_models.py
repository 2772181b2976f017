"""A Model with its Instances running, to which a test adds requests directly."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.batching.devices.device import Device
from penstock.batching.devices.placement import Devices, Reopen
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.spec import ModelSpec
from tests.fakes import PATIENCE_S, FakeBackend, fake_request


@dataclass
class House:
    """One Model with its Instances running; `finished`: the queue of its finished batches."""

    model: Model
    finished: queue.Queue[Batch]
    backends: Sequence[FakeBackend]

    def add(self, count: int = 1) -> list[InferRequest]:
        return self.put([fake_request(self.model) for _ in range(count)])

    def put(self, requests: list[InferRequest]) -> list[InferRequest]:
        with self.model.lock:
            for request in requests:
                self.model.scheduler.add(request)
        self.model.dispatch(1)
        return requests

    def next(self) -> Batch:
        return self.finished.get(timeout=PATIENCE_S)

    def ended(self, requests: list[InferRequest]) -> None:
        """Wait until these requests have finished, in any batches."""
        missing = {id(request) for request in requests}
        while missing:
            missing -= {id(request) for request in self.next().requests}


def having(name: str, device: Device) -> Devices:
    """Return Devices that already contain one."""
    devices = Devices()
    devices[name] = device
    return devices


@contextmanager
def housed(
    spec: ModelSpec,
    backends: Sequence[FakeBackend],
    devices: Devices,
    reopen: Reopen | None,
) -> Iterator[House]:
    finished: queue.Queue[Batch] = queue.Queue()

    def finish(model: Model, ran: list[Batch]) -> None:
        for batch in ran:
            finished.put(batch)

    model = Model(spec, backends, finish, devices, reopen)
    model.open()
    try:
        yield House(model, finished, backends)
    finally:
        model.close()
