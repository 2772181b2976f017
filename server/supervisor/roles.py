"""Roles: what a supervised process runs: a front end or the engine. Created by `child.py`, by assigned name."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from penstock.server.settings import Settings

if TYPE_CHECKING:
    import socket

    from .child import SupervisorLink

logger = logging.getLogger("penstock.supervisor")


def prepare() -> None:
    """Import what either role needs: most of a start's second."""
    from penstock.server.process import GC_THRESHOLD, collect_and_freeze

    gc.set_threshold(*GC_THRESHOLD)
    import penstock.backends.onnx
    import penstock.server.fronts.engine_server
    import penstock.server.fronts.front
    import penstock.server.supervisor.lasting  # noqa: F401

    # otherwise the collector would traverse all of it once models are served: 0.1 s without an answer
    collect_and_freeze()


class Role(Protocol):
    """What a process runs. `answer` and `load` are called in either order, once each."""

    async def answer(self) -> None:
        """Listen. Raises: StartError."""

    async def load(self) -> dict[str, Any]:
        """Become ready to serve requests. Returns: details for the supervisor."""

    def attach(self, sock: socket.socket) -> None:
        """Connect to an engine, or to a front end, over this socket."""

    def meet(self, place: int, sock: socket.socket) -> None:
        """Add the socket to a front end that was started after this one."""

    def counted(self, counts: Mapping[str, Any]) -> None:
        """Update the number of processes and of their restarts."""

    def kept(self, key: str) -> None:
        """Handle a change made to the previous engine since this one was started."""

    def hurry(self) -> None:
        """Hold no more batches open: the front ends are about to end."""

    async def drain(self, *, last: bool) -> int:
        """Finish accepted requests; `last`: nothing replaces the process. Returns: how much was dropped."""

    async def close(self) -> None:
        """End immediately, dropping everything."""


class FrontProcess:
    """A front end."""

    def __init__(self, settings: Settings, told: SupervisorLink, assigned: Mapping[str, Any]) -> None:
        from penstock.server.fronts.front import FrontServer
        from penstock.server.fronts.spreading import ConnectionSpread

        self._told = told
        self._spread = ConnectionSpread.of(*told.board) if told.board else None
        self._server = FrontServer(settings, self._lost, told.logs.apply, self._spread)

    def _lost(self, why: str) -> None:
        logger.warning("the engine is gone: %s", why)
        self._told.unlinked()

    async def answer(self) -> None:
        await self._server.open()

    async def load(self) -> dict[str, Any]:
        while not await self._server.placed(60.0):
            pass
        return {}

    def attach(self, sock: socket.socket) -> None:
        self._server.attach(sock)

    def meet(self, place: int, sock: socket.socket) -> None:
        if self._spread is None:
            sock.close()
        else:
            self._spread.meet(place, sock)

    def counted(self, counts: Mapping[str, Any]) -> None:
        """Do nothing: not sent to a front end."""

    def kept(self, key: str) -> None:
        """Do nothing: not sent to a front end."""

    def hurry(self) -> None:
        """Do nothing: not sent to a front end."""

    async def drain(self, *, last: bool) -> int:
        return await self._server.drain(last=last)

    async def close(self) -> None:
        await self._server.close()


class EngineProcess:
    """The engine's process. It drains when its front ends have gone, since they may still send accepted requests.

    It also drains when the supervisor says so: a signal has reached the engine alone, and another will replace it. If
    it has lost a device for good, it ends without waiting, and another replaces it. The two do not overlap, as they do
    when all are replaced: it holds device memory until it has ended, and there may be no room for both.
    """

    def __init__(self, settings: Settings, told: SupervisorLink, assigned: Mapping[str, Any]) -> None:
        from penstock.server.fronts.engine_server import EngineServer

        from .lasting import Lasting

        self._settings = settings
        self._told = told
        self._fronts: set[int] = set()
        self._alone = asyncio.Event()
        self._alone.set()
        self._lasting = Lasting(told, told.kept)
        self._server = EngineServer(settings, lost=self._lost, apply=self._lasting.logs(told.logs.apply))
        self._lasting.watch(self._server)
        self._server.server.on_device_lost = told.end
        self._loaded = False
        self._late: list[asyncio.Future[None]] = []

    def _lost(self, number: int, why: str) -> None:
        self._fronts.discard(number)
        if not self._fronts:
            self._alone.set()

    async def answer(self) -> None:
        await self._lasting.put_back_first(self._server)
        await self._server.open()

    async def load(self) -> dict[str, Any]:
        reasons = await self._server.load(partial(self._lasting.put_back, self._server))
        self._loaded = True
        return {"reasons": reasons, "serves": self._server.server.status_line}

    def attach(self, sock: socket.socket) -> None:
        self._fronts.add(self._server.attach(sock))
        self._alone.clear()

    def meet(self, place: int, sock: socket.socket) -> None:
        """Do nothing: not sent to the engine."""

    def counted(self, counts: Mapping[str, Any]) -> None:
        self._server.server.metrics.processes = {
            f'{metric}{{role="{role}"}}': number
            for metric, of_roles in counts.items()
            for role, number in of_roles.items()
        }

    def kept(self, key: str) -> None:
        if self._loaded:
            self._late.append(asyncio.ensure_future(self._lasting.put_back_one(self._server, key)))

    def hurry(self) -> None:
        self._server.engine.hurry()

    async def drain(self, *, last: bool) -> int:
        self.hurry()
        if self._server.server.health.device_lost:
            return await self._server.drain()
        # if a signal has reached this process only, the front ends stay: the supervisor then sends DRAIN
        either = [asyncio.ensure_future(each.wait()) for each in (self._alone, self._told.told_to_end)]
        done, _ = await asyncio.wait(
            either, timeout=self._settings.exit_timeout_secs, return_when=asyncio.FIRST_COMPLETED
        )
        for each in either:
            each.cancel()
        if not done:
            logger.warning("front ends are still connected")
        return await self._server.drain()

    async def close(self) -> None:
        await self._server.close()
