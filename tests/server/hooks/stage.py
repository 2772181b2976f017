"""Fixtures of the tests of hooks: an Engine that runs on request, and a stage that loads and closes hooks."""

from __future__ import annotations

import asyncio
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.node import Node
from penstock.backends.signature import Signature
from penstock.batching.request import InferRequest
from penstock.batching.sinks import deliver_unordered
from penstock.batching.spec import BatchPolicy, HookSpec
from penstock.server.hooks.runner import Hooks
from tests.fakes import fake_model

GUARD_S = 10.0


class PuppetEngine:
    """Runs the waiting requests when the test calls `run`, or at once; `sizes` records the batch sizes."""

    def __init__(self, function: Callable[[list[Any]], list[Any]] = list, *, at_once: bool = False) -> None:
        self.sizes: list[int] = []
        self.failure: InferError | None = None
        self._function = function
        self._at_once = at_once
        self._waiting: list[InferRequest] = []
        self._came = asyncio.Event()

    def submit(self, request: InferRequest) -> None:
        if self._at_once:
            request.outputs = self._function(request.inputs)
            request.sink.deliver([request])
        else:
            self._waiting.append(request)
            self._came.set()

    submit_soon = submit

    def cancel(self, request: InferRequest) -> None:
        self._waiting.remove(request)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def gather(self, count: int) -> None:
        while len(self._waiting) < count:
            self._came.clear()
            await self._came.wait()

    def run(self) -> None:
        batch, self._waiting = self._waiting, []
        self.sizes.append(len(batch))
        for request in batch:
            request.outputs, request.error = self._function(request.inputs), self.failure
        if batch:
            deliver_unordered(batch)


class Stage:
    """Loads hooks for a model, and closes them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: list[Hooks] = []
        self._gates: list[threading.Event] = []

    async def load(
        self, source: str | None, engine: PuppetEngine | None = None, signature: Signature | None = None, **options: Any
    ) -> Hooks:
        policy = BatchPolicy(max_queue_rows=options.pop("max_queue_rows", 1024))
        decoupled = options.pop("decoupled", False)
        hooks = None
        if source is not None:
            path = self._folder / "hooks.py"
            path.write_text(textwrap.dedent(source))
            hooks = HookSpec(path, **options)
        return await self.load_spec(hooks, signature, engine, policy=policy, decoupled=decoupled)

    async def load_spec(
        self,
        hooks: HookSpec | None,
        signature: Signature | None = None,
        engine: PuppetEngine | None = None,
        **options: Any,
    ) -> Hooks:
        inputs, described = options.pop("node_inputs", None), options.pop("described", {})
        self.model = fake_model(signature=signature, hooks=hooks)
        nodes = [Node(each.name, each.datatype, list(each.shape)) for each in self.model.signature.outputs]
        self.model.node_outputs = nodes
        self.model.node_inputs = inputs or self.model.node_inputs
        self.model.runtime_description = described
        self.model.max_request_rows = 1 << 20
        self.model.spec = replace(self.model.spec, **options)
        self._open.append(await Hooks.load(engine or PuppetEngine(at_once=True), self.model))
        return self._open[-1]

    def sample(self, x: float = 0.0, *, is_open: bool = False) -> dict[str, Any]:
        sample: dict[str, Any] = {"x": x, "began": threading.Event(), "gate": threading.Event()}
        self._gates.append(sample["gate"])
        if is_open:
            sample["gate"].set()
        return sample

    def open_all(self) -> None:
        for gate in self._gates:
            gate.set()

    async def close(self) -> None:
        self.open_all()
        for hooks in self._open:
            await hooks.close()


Act = Callable[[Callable[[Stage], Awaitable[None]]], None]


def left_behind() -> list[str]:
    """Wait for the threads of closed hooks; give the threads and private modules that remain."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("hooks-")]
    for thread in threads:
        thread.join(GUARD_S)
    alive = [thread.name for thread in threads if thread.is_alive()]
    return alive + [name for name in list(sys.modules) if "@" in name]


async def is_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, GUARD_S)


async def refusal(awaitable: Awaitable[Any]) -> tuple[Code, str]:
    with pytest.raises(InferError) as refused:
        await awaitable
    return refused.value.code, refused.value.message


def acted(folder: Path) -> Iterator[Act]:
    """Yield a function that plays a scene on its own stage; nothing may be left behind. For fixtures."""

    def act(scene: Callable[[Stage], Awaitable[None]]) -> None:
        async def main() -> None:
            stage = Stage(folder)
            async with asyncio.timeout(GUARD_S):
                await scene(stage)
                await stage.close()

        asyncio.run(main())

    yield act
    assert left_behind() == []
