"""Crews for tests: the real Engine, Hosts and WorkerSlots, with workers that are not processes.

A Staged worker runs its calls on the loop, one per turn, as its `plan` says; what it opens is a service object like
that of a worker (inside/service.py). A body starts with two bytes, where Seldon's calls have their kind.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.external_models import OpenedVersion
from penstock.batching.spec import BatchPolicy, InstanceGroup, ModelSpec
from penstock.server.carrying.calls import RawCall
from penstock.server.carrying.hosts import Crew
from penstock.server.carrying.loading import open_carried
from penstock.server.carrying.messages import CALL
from penstock.server.workers import restarting
from penstock.server.workers.order import NotStartedError, Order, WorkerLost

GUARD_S = 30.0
NAME = "Staged"
CARRIED = "carried"
HEAD = b"--"


class Echo:
    """A service that echoes calls. `ran` has the payload of each call that it has begun."""

    def __init__(self) -> None:
        self.ran: list[bytes] = []

    def call(self, kind: int, number: int, body: bytes, arrays: Sequence[Any]) -> tuple[bytes, Any]:
        assert kind == CALL
        self.ran.append(body[2:])
        return body[2:], None


class Staged:
    """A worker. Before each call, `plan` decides its outcome: "answer", "die" or "hang"."""

    def __init__(self, stage: Stage, order: Any, lost: Callable[[Any], None]) -> None:
        self.stage, self.order, self._lost = stage, order, lost
        self.loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Any] = self.loop.create_future()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.serving, self.pid = True, 1
        self.most = self.served = 0
        self._calls: deque[Any] = deque()
        self._due = self._stopping = False
        stage.workers.append(self)
        if stage.fails_to_start():
            self.serving = False
            self.ready.set_exception(WorkerLost("does not start"))
            self.ended.set_result(None)
        else:
            self.ready.set_result((stage.on_open(), []))

    def send_call(self, answered: Any, kind: int, body: bytes, arrays: Any = None, limit_s: float = 0.0) -> None:
        if not self.serving:
            raise NotStartedError
        if not self.stage.travels(body):
            raise ValueError("too long")
        self._calls.append((answered, kind, body, arrays))
        self.most = max(self.most, len(self._calls))
        self._soon()

    def _soon(self) -> None:
        if not self._due:
            self._due = True
            self.loop.call_soon(self._step)

    def _step(self) -> None:
        self._due = False
        if not self._calls:
            return
        answered, kind, body, arrays = self._calls[0]
        what = self.stage.plan(body)
        if what == "hang":
            return
        if what == "die":
            self.stage.service.ran.append(body[2:])
            self.end(began=True)
            return
        self._calls.popleft()
        self.served += 1
        reply, sent = self.stage.service.call(kind, 0, body, [each.copy() for each in arrays or ()])
        answered(reply, list(sent or ()), None)
        if self._calls:
            self._soon()

    def end(self, *, began: bool) -> None:
        """End, together with the first call if it has begun."""
        self.serving = False
        calls, self._calls = self._calls, deque()
        for at, (answered, *_) in enumerate(calls):
            answered(b"", [], WorkerLost("ended", Code.NOT_READY) if began and not at else NotStartedError())
        if not self.ended.done():
            self.ended.set_result(None)
            if not self._stopping:
                self._lost(self)

    def stop(self) -> None:
        self._stopping = True
        self.end(began=False)

    def kill(self, why: str, *_: Any) -> None:
        self._stopping = True
        self.end(began=True)


class Stage:
    """What the workers of one test have in common. `crew` makes their Crew."""

    backend = CARRIED

    def __init__(
        self, service: Any, plan: Callable[[bytes], str] = lambda _: "answer", crew: Callable[..., Crew] = Crew
    ) -> None:
        self.service, self.plan = service, plan
        self.workers: list[Staged] = []
        self.fails_to_start: Callable[[], bool] = lambda: False
        self.travels: Callable[[bytes], bool] = lambda _: True
        self._crew = crew

    def on_open(self) -> bytes:
        """Return a worker's answer to its opening."""
        return b""

    def make_external_loader(self) -> Any:
        """Return what opens the model."""
        return self

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Open it, as the loaders of dialects do."""
        orders = [Order("", {}, NAME, {}) for _ in range(spec.instances[0].count)]
        return await open_carried(spec, orders, self._crew(spec.worker.timeout_s), CARRIED)

    @staticmethod
    def call(model: Model, name: str, ledger: Ledger) -> RawCall:
        """Make a call whose payload is its name."""
        raw_call = RawCall(model, HEAD + name.encode(), ledger)
        raw_call.context = name
        return raw_call

    def submit(self, engine: Engine, model: Model, ledger: Ledger, numbers: range) -> None:
        """Submit calls that are named after numbers."""
        for number in numbers:
            engine.submit(self.call(model, str(number), ledger))

    def run(
        self, monkeypatch: pytest.MonkeyPatch, scene: Callable[[Engine, Model], Awaitable[None]], workers: int = 1,
        policy: BatchPolicy = BatchPolicy(), **options: str,  # noqa: B008 - frozen
    ) -> None:  # fmt: skip
        """Serve for as long as the scene lasts."""
        monkeypatch.setattr(restarting, "Worker", lambda order, lost, _on_message: Staged(self, order, lost))
        monkeypatch.setattr(restarting, "Backoff", NoBackoff)
        monkeypatch.setattr(NoBackoff, "forgotten", 0)
        spec = ModelSpec(
            NAME, 1, Path(), self.backend, policy=policy, instances=(InstanceGroup(workers),),
            options={"component": NAME, **options},
        )  # fmt: skip

        async def main() -> None:
            async with asyncio.timeout(GUARD_S):
                engine = Engine(asyncio.get_running_loop(), {})
                engine.external_loaders[self.backend] = self.make_external_loader()
                model = await engine.load(spec)
                await scene(engine, model)
                await engine.stop(1.0)

        asyncio.run(main())


class NoBackoff:
    """Restarts immediately. `forgotten` counts the resets."""

    forgotten = 0

    def record_serving(self, _now_s: float) -> None: ...

    def reset(self) -> None:
        NoBackoff.forgotten += 1

    def next_delay_s(self, _now_s: float) -> float:
        return 0.0


class Ledger:
    """A sink that records all outcomes of each call. `lost` has the calls whose worker ended."""

    def __init__(self) -> None:
        self.ends: dict[Any, list[Any]] = {}
        self.lost: set[Any] = set()
        self.done = asyncio.Event()
        self.expected = -1
        self.deliveries = 0

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            end = request.error.message if request.error is not None else getattr(request, "reply", request.outputs)
            self.ends.setdefault(request.context, []).append(end)
            if isinstance(request.error, WorkerLost):
                self.lost.add(request.context)
        if len(self.ends) == self.expected:
            self.done.set()

    async def all(self, count: int) -> None:
        """Wait until a number of calls have been answered."""
        self.expected = count
        self.done.clear()
        if len(self.ends) < count:
            await self.done.wait()
