"""Roles: what a supervised process runs: a front end or the engine. Created by `child.py`, by assigned name."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    import penstock.server.supervisor.saved_state  # noqa: F401

    # otherwise the collector would traverse all of it once models are served: 0.1 s without an answer
    collect_and_freeze()


class Role:
    """What a process runs. `listen` and `load` are called in either order, once each."""

    async def listen(self) -> None:
        """Listen. Raises: StartError."""
        raise NotImplementedError

    async def load(self) -> dict[str, Any]:
        """Become ready to serve requests. Returns: details for the supervisor."""
        raise NotImplementedError

    def attach(self, sock: socket.socket) -> None:
        """Connect to an engine, or to a front end, over this socket."""
        raise NotImplementedError

    async def drain(self, *, last: bool) -> int:
        """Finish accepted requests; `last`: nothing replaces the process. Returns: how much was dropped."""
        raise NotImplementedError

    async def close(self) -> None:
        """End immediately, dropping everything."""
        raise NotImplementedError

    # -- what only one of the roles is sent ------------------------------------------------------------------------

    def add_neighbor(self, slot: int, sock: socket.socket) -> None:
        """Add the socket to a front end that was started after this one."""

    def update_counts(self, counts: Mapping[str, Any]) -> None:
        """Update the number of processes and of their restarts."""

    def on_saved_change(self, key: str) -> None:
        """Handle a change made to the previous engine since this one was started."""

    def flush(self) -> None:
        """Hold no more batches open: the front ends are about to end."""


class FrontProcess(Role):
    """A front end."""

    def __init__(self, settings: Settings, supervisor: SupervisorLink, assignment: Mapping[str, Any]) -> None:
        from penstock.server.fronts.connection_spread import ConnectionSpread
        from penstock.server.fronts.front import FrontServer

        self._supervisor = supervisor
        self._spread = ConnectionSpread.of(*supervisor.board) if supervisor.board else None
        self._server = FrontServer(settings, self._on_engine_lost, supervisor.logs.apply, self._spread)

    def _on_engine_lost(self, reason: str) -> None:
        logger.warning("the engine is gone: %s", reason)
        self._supervisor.report_disconnect()

    async def listen(self) -> None:
        await self._server.open()

    async def load(self) -> dict[str, Any]:
        while not await self._server.wait_ready(60.0):
            pass
        return {}

    def attach(self, sock: socket.socket) -> None:
        self._server.attach(sock)

    def add_neighbor(self, slot: int, sock: socket.socket) -> None:
        if self._spread is None:
            sock.close()
        else:
            self._spread.add_neighbor(slot, sock)

    async def drain(self, *, last: bool) -> int:
        return await self._server.drain(server_stopping=last)

    async def close(self) -> None:
        await self._server.close()


class EngineProcess(Role):
    """The engine's process. It drains when its front ends have gone, since they may still send accepted requests.

    It also drains when the supervisor says so: a signal has reached the engine alone, and another will replace it. If
    it has lost a device for good, it ends without waiting, and another replaces it. The two do not overlap, as they do
    when all are replaced: it holds device memory until it has ended, and there may be no room for both.
    """

    def __init__(self, settings: Settings, supervisor: SupervisorLink, assignment: Mapping[str, Any]) -> None:
        from penstock.server.fronts.engine_server import EngineServer

        from .saved_state import SavedState

        self._settings = settings
        self._supervisor = supervisor
        self._fronts: set[int] = set()
        self._no_fronts = asyncio.Event()
        self._no_fronts.set()
        self._saved_state = SavedState(supervisor, supervisor.saved)
        self._server = EngineServer(
            settings,
            on_front_lost=self._on_front_lost,
            apply_log_levels=self._saved_state.saving_logs(supervisor.logs.apply),
        )
        self._saved_state.watch(self._server.server)
        self._server.server.on_device_lost = supervisor.request_end
        self._loaded = False
        self._late_restores: list[asyncio.Future[None]] = []

    def _on_front_lost(self, number: int, reason: str) -> None:
        self._fronts.discard(number)
        if not self._fronts:
            self._no_fronts.set()

    async def listen(self) -> None:
        await self._saved_state.restore_settings()
        await self._server.open()

    async def load(self) -> dict[str, Any]:
        reasons = await self._server.load(self._saved_state.restore)
        self._loaded = True
        return {"reasons": reasons, "serves": self._server.server.status_line}

    def attach(self, sock: socket.socket) -> None:
        self._fronts.add(self._server.attach(sock))
        self._no_fronts.clear()

    def update_counts(self, counts: Mapping[str, Any]) -> None:
        self._server.server.metrics.processes = {
            f'{metric}{{role="{role}"}}': number
            for metric, of_roles in counts.items()
            for role, number in of_roles.items()
        }

    def on_saved_change(self, key: str) -> None:
        if self._loaded:
            self._late_restores.append(asyncio.ensure_future(self._saved_state.restore_key(key)))

    def flush(self) -> None:
        self._server.engine.flush()

    async def drain(self, *, last: bool) -> int:
        self.flush()
        if self._server.server.health.device_lost:
            return await self._server.drain()
        # if a signal has reached this process only, the front ends stay: the supervisor then sends DRAIN
        either = [asyncio.ensure_future(each.wait()) for each in (self._no_fronts, self._supervisor.drain_ordered)]
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
