"""Process: runs one Server or Supervisor, with its event loop, signals, logs and exit status.

Called by the command line; a supervisor's processes use the public parts.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib.metadata
import logging
import resource
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from .listening.sockets import StartError
from .options.dialect_settings import DIALECTS
from .settings import Settings
from .signals import on_signal
from .telemetry.log_file import LogFileError
from .telemetry.logs import Logs
from .threads import new_loop

logger = logging.getLogger("penstock.serve")

_SERVICES = {"gRPC": "GRPCInferenceService", "HTTP": "HTTPService", "metrics": "Metrics Service"}
"""Triton's names for the services, by the name used here."""
FORCE_AFTER_S = 0.3
"""A second signal counts only after this time: `timeout`, `make` and init systems send the first one twice."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CANCEL_GRACE_S = 1.0
"""How long interrupted work may take to end."""
GC_THRESHOLD = (20_000, 20, 50)
"""Requests create no cycles; the defaults would run a collection every hundred requests, some over all modules."""
OPEN_FILES = 65_536
"""Enough for tens of thousands of connections, and for what models and workers open."""
SWITCH_S = 0.0005
"""How soon a computing thread yields to a waiting one; Python's default of 5 ms is longer than most model runs. With
mlp at 32 connections: 10% more requests/s, p99 12 ms instead of 53; while rejecting 20,000 requests/s: 12% more."""

KEPT_BYTES = 64 << 20
"""How much freed memory the allocator keeps."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20


def retain_freed_memory() -> None:
    """Make glibc keep the memory that large requests free, for later requests.

    By default glibc may return the memory of a body to the system after each request, depending on what lies above it
    on the heap; the next request then takes a page fault for every 4 KiB. 600 kB over HTTP: 60 to 360 faults and 1.1 to
    2.7 ms of CPU per request without this, none and 0.3 to 0.4 ms with it (docs/adr/0008).
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # another C library, with its own behavior
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


class Servable(Protocol):
    """What a process runs: a Server or a Supervisor."""

    @property
    def urls(self) -> dict[str, str] | None:
        """The URLs it listens on, by name; None if it starts listening only once loaded."""

    @property
    def status_line(self) -> str:
        """What it serves, in words, once loaded: "ready, serving m/1"."""

    async def open(self) -> None:
        """Start listening. Raises: StartError."""

    async def load(self) -> list[str]:
        """Load the models. Returns: the reasons for what is not served."""

    def handle_hangup(self) -> None:
        """Handle SIGHUP."""

    async def drain(self) -> int:
        """Finish accepted work. Returns: how much was dropped."""

    async def close(self) -> None:
        """End whatever is left at once."""

    def force(self) -> None:
        """Kill what would survive this process."""


def prepare() -> None:
    """Configure this process for serving, before the serving modules are imported."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited from some parent programs
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise the exit status of children is lost
    gc.set_threshold(*GC_THRESHOLD)  # otherwise collections would take a sixth of the import time
    sys.setswitchinterval(SWITCH_S)
    raise_open_file_limit()
    retain_freed_memory()


def raise_open_file_limit() -> None:
    """Raise the limit of open files to the hard limit, at most OPEN_FILES.

    Shells and systemd default to 1024 for the sake of select(); beyond the limit libuv drops connections silently.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    limit = OPEN_FILES if hard == unlimited else min(OPEN_FILES, hard)
    if soft != unlimited and soft < limit:
        with contextlib.suppress(OSError, ValueError):  # the system may allow less than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run(settings: Settings) -> int:
    """Serve until a signal arrives. SIGINT and SIGTERM are left ignored, because the process is about to exit.

    Returns: the exit status, 0 only if no accepted work was lost.
    """
    try:
        logs = Logs(settings, sys.stderr, "supervisor" if settings.http_workers else "")
    except LogFileError as error:
        sys.stderr.write(f"penstock: {error}\n")
        return 1
    try:
        logs.start()
        loop = new_loop()
    except RuntimeError as error:
        sys.stderr.write(f"penstock: {error}: the limit on processes and threads is too low (pids.max, ulimit -u)\n")
        return 1
    prepare()
    try:
        return loop.run_until_complete(_Process(settings, logs).run())
    finally:
        # with the default action, another signal would end the process with a different status
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        loop.close()
        logs.stop()


class _Process:
    """The life of one process. The first SIGTERM or SIGINT drains it, the second ends it."""

    def __init__(self, settings: Settings, logs: Logs) -> None:
        self._settings = settings
        self._logs = logs
        self._stop_requested = asyncio.Event()
        self._stop_requested_s = 0.0
        self._forced = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            # not the loop's own handlers, which would be removed before the process exits
            on_signal(number, lambda number: loop.call_soon_threadsafe(self._on_signal, number))
        server = self._make_server()
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup has it ignored
            on_signal(signal.SIGHUP, lambda _: loop.call_soon_threadsafe(server.handle_hangup))
        serving = asyncio.ensure_future(self._serve(server))
        if await finished_first(serving, self._forced.wait()):
            return serving.result()
        logger.critical("forced to stop: requests in flight are lost")
        server.force()
        return 1

    def _make_server(self) -> Servable:
        if self._settings.http_workers:
            from .supervisor.supervisor import Supervisor

            return Supervisor(self._settings)
        from .serve import Server  # takes a second, which a supervisor does not need

        server = Server(self._settings)
        server.observability.logging.apply = self._logs.apply
        return server

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self._stop_requested.is_set():
            if now - self._stop_requested_s > FORCE_AFTER_S:
                self._forced.set()
            return
        self._stop_requested_s = now
        logger.info("%s: finishing the accepted requests; repeat the signal to force", signal.Signals(number).name)
        self._stop_requested.set()

    async def _serve(self, server: Servable) -> int:
        try:
            failed = await self._serve_until_stopped(server)
        except StartError as error:
            for line in str(error).splitlines():
                logger.critical("%s", line)
            await server.close()
            return 1
        dropped = await server.drain()
        await server.close()
        if dropped:
            logger.critical("exit timeout: %d unfinished requests or connections are dropped", dropped)
        status = 1 if dropped or failed else 0
        outcome = f"{dropped} requests or connections dropped" if dropped else "all accepted requests are finished"
        logger.info("stopped: %s, exit status %d", outcome, status)
        return status

    async def _serve_until_stopped(self, server: Servable) -> bool:
        """Serve until a signal arrives. Returns: whether it stops early because loading failed."""
        await server.open()
        is_listening = self._log_urls(server)
        loading = asyncio.ensure_future(server.load())
        if not await finished_first(loading, self._stop_requested.wait()):
            return False
        reasons = loading.result()
        collect_and_freeze()
        if not is_listening:
            self._log_urls(server)
        logger.info("%s", server.status_line)
        if self._settings.exit_on_error and reasons:
            logger.critical("stopping because of --exit-on-error: %s", "; ".join(reasons))
            return True
        if self._settings.dialect == DIALECTS[0]:
            for line in triton_log_lines(server.urls or {}):
                logger.info("%s", line)
        await self._stop_requested.wait()
        return False

    @staticmethod
    def _log_urls(server: Servable) -> bool:
        """Log the URLs it listens on, if any. Returns: whether it is listening."""
        if server.urls is None:
            return False
        urls = ", ".join(f"{name} on {url}" for name, url in server.urls.items()) or "nowhere"
        logger.info("penstock %s: %s", importlib.metadata.version("penstock"), urls)
        return True


def triton_log_lines(urls: Mapping[str, str]) -> Iterator[str]:
    """Yield Triton's log lines for the listening services, which scripts and container wait strategies look for.

    Source: Triton server, grpc_server.cc and http_server.cc, which log them once models are loaded.
    """
    for name, service in _SERVICES.items():
        if name in urls:
            yield f"Started {service} at {urlsplit(urls[name]).netloc}"


def collect_and_freeze() -> None:
    """Exclude objects that live as long as the process from garbage collection.

    A full collection would otherwise walk every module for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()


async def finished_first(work: asyncio.Future[Any], signal_given: Coroutine[Any, Any, Any]) -> bool:
    """Wait for the work or the signal, cancel the other, and return whether the work ended."""
    waiting = asyncio.ensure_future(signal_given)
    await asyncio.wait((work, waiting), return_when=asyncio.FIRST_COMPLETED)
    ended = work.done()
    pending = waiting if ended else work
    pending.cancel()
    await asyncio.wait((pending,), timeout=CANCEL_GRACE_S)
    return ended
