"""An engine and a front end without processes or ports: both halves over a socketpair, on one loop."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.engine import Engine
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.environments.environments import Environments
from penstock.server.fronts.engine_service import EngineService
from penstock.server.fronts.message_kinds import MODELS
from penstock.server.fronts.model_table import FrontModelTable
from penstock.server.fronts.published_engine import PublishedEngine
from penstock.server.fronts.remote_engine import RemoteEngine
from penstock.server.ipc.link import Link
from penstock.server.ipc.wire import Message
from tests.fakes import FakeBackend, Function, fake_loader

SIGNATURE = Signature((TensorSpec("x", "FP32", (-1, -1)),), (TensorSpec("y", "FP32", (-1, -1)),), batched=True)
SPEC = ModelSpec("m", 1, Path("m"), "fake", policy=BatchPolicy(8, executor="thread"))


class EngineSide:
    """The engine, with as many front ends as are joined."""

    def __init__(self, function: Function = list) -> None:
        self.engine = Engine(asyncio.get_running_loop(), {"fake": fake_loader(FakeBackend(SIGNATURE, function))})
        self.published = PublishedEngine(self.engine)
        self.services: dict[Link, EngineService] = {}

    async def load(self, spec: ModelSpec = SPEC) -> Model:
        model = await self.published.open(spec)
        await self.published.publish(spec.name, [model])
        self.published.complete_load()
        return model

    def join(self, sock: socket.socket) -> Link:
        def take(messages: list[Message]) -> None:
            for kind, number, body, _, _ in self.services[link].receive(messages):
                self.published.receive(link, kind, number, body)

        link = Link(sock, take, lambda _: self.part(link))
        self.services[link] = EngineService(self.engine, link, self.published.models)
        self.published.attach(link)
        return link

    def part(self, link: Link) -> None:
        """Handle that a front end has disconnected, or disconnect it."""
        link.close()
        service = self.services.pop(link, None)
        if service is not None:
            service.close()
            self.published.detach(link)

    async def stop(self) -> None:
        for link in list(self.services):
            self.part(link)
        await self.published.stop(5)


class FrontSide:
    """A front end's engine and models, with one engine at a time."""

    def __init__(self) -> None:
        self.engine = RemoteEngine()
        self.placed = asyncio.Event()
        self.link: Link | None = None
        self.model_table: FrontModelTable | None = None

    def join(self, sock: socket.socket) -> None:
        def take(messages: list[Message]) -> None:
            for kind, number, body, _, _ in self.engine.receive(messages):
                assert kind == MODELS
                model_table.receive(number, body)

        link = self.link = Link(sock, take, lambda _: self.part())
        model_table = self.model_table = FrontModelTable(self.engine, link, Environments().interpreter, self.placed.set)
        self.engine.attach(link)

    def part(self) -> None:
        """Handle that the engine has disconnected, or disconnect it."""
        link, self.link = self.link, None
        if link is not None:
            link.close()
            self.placed.clear()
            self.engine.detach()

    async def stop(self) -> None:
        self.part()
        if self.model_table is not None:
            await self.model_table.close()


@asynccontextmanager
async def sides(function: Function = list) -> AsyncIterator[tuple[EngineSide, FrontSide]]:
    """Make both sides, not connected, and stop them in the end."""
    engine, front = EngineSide(function), FrontSide()
    try:
        yield engine, front
    finally:
        await front.stop()
        await engine.stop()


@asynccontextmanager
async def pair(function: Function = list) -> AsyncIterator[tuple[EngineSide, FrontSide]]:
    """Make both sides, connected, with one model."""
    async with sides(function) as (engine, front):
        await engine.load()
        await joined(engine, front)
        yield engine, front


async def joined(engine: EngineSide, front: FrontSide) -> Link:
    """Connect a front end to an engine, and wait until all models are placed. Returns: the engine's Link."""
    here, there = socket.socketpair()
    front.join(there)
    link = engine.join(here)
    async with asyncio.timeout(10):
        await front.placed.wait()
    return link


def request(model: Model, value: float, sink: Any, width: int = 4, rows: int = 1) -> InferRequest:
    """A request whose answer is its input."""
    infer_request = InferRequest(
        model, [np.full((rows, width), value, np.float32)], rows, ((width,),), model.all_outputs, sink
    )
    infer_request.context = value
    return infer_request


async def until(condition: Any) -> None:
    """Let the loop turn until a condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            gc.collect(0)
            await asyncio.sleep(0)
