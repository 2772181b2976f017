"""The side effects of Chaos: killing and stopping processes, failing and delaying requests. Off unless configured."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Never

from penstock.backends.backend import Loader
from penstock.backends.errors import Code, InferError
from penstock.batching.engine import Engine
from penstock.batching.ensembles.passage import is_step
from penstock.batching.request import InferRequest

from .chaos import Chaos, parse
from .settings import Settings

logger = logging.getLogger("penstock.chaos")

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_WORKER = str(Path(__file__).parent / "workers" / "child.py").encode()
MAX_SLEEP_S = 3600.0


class Faults:
    """Causes the faults of one process. Without --chaos it does nothing, and `engine` returns a plain Engine.

    `victims` returns the pids that can be hit, by kind: "worker", "front", "engine". `salt` distinguishes this process
    from others of its kind. Threads: the event loop's.
    """

    def __init__(
        self, settings: Settings, victims: Mapping[str, Callable[[], Sequence[int]]], salt: str = ""
    ) -> None:  # fmt: skip
        self._rates = parse(settings.chaos)
        self._victims = victims
        self._chaos = Chaos(self._rates, tuple(victims), time.monotonic_ns(), salt)
        self._task: asyncio.Task[Never] | None = None

    def engine(self, loop: asyncio.AbstractEventLoop, loaders: Mapping[str, Loader]) -> Engine:
        """Return the Engine: one that fails and delays requests if that is configured."""
        affects_requests = self._rates.fail or self._rates.slow
        return ChaoticEngine(loop, loaders, self._chaos) if affects_requests else Engine(loop, loaders)

    def counts(self) -> dict[str, Callable[[], int]]:
        """Return the counters for the metrics page by metric family; empty without --chaos."""
        return {"penstock_chaos_faults_total": lambda: sum(self._chaos.counts.values())} if self._rates else {}

    def start(self) -> None:
        """Log that faults are injected on purpose, and start causing process faults."""
        if self._rates:
            logger.warning("--chaos is on, faults are injected: %s", self._rates)
        if math.isfinite(self._chaos.next_ns) and self._task is None:
            self._chaos.restart(time.monotonic_ns())
            self._task = asyncio.ensure_future(make_faults(self._chaos, self._victims))

    def stop(self) -> None:
        """Stop causing faults."""
        if self._task is not None:
            self._task.cancel()


async def make_faults(chaos: Chaos, victims: Mapping[str, Callable[[], Sequence[int]]]) -> Never:
    """Cause process faults as they become due, until cancelled."""
    while True:
        wait_s = (chaos.next_ns - time.monotonic_ns()) / 1e9
        await asyncio.sleep(min(max(0.0, wait_s), MAX_SLEEP_S))
        for fault in chaos.pop_due(time.monotonic_ns()):
            action, _, kind = fault.partition("-")
            pids = victims[kind]()
            if pids and (pid := _send_signal(chaos.choose_victim(pids), _SIGNALS[action])):
                chaos.count(fault)
                logger.warning("chaos: %s: process %d", fault, pid)


def _send_signal(pid: int, signal_number: signal.Signals) -> int:
    """Send a signal to a process, or to its group if it leads one. Returns: the pid, 0 if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal_number)
        else:
            os.kill(pid, signal_number)
        return pid
    return 0


def own_workers() -> list[int]:
    """Return the pids of this process's workers, read from /proc."""
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            # the process may end while it is inspected
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1])
                if parent == os.getpid() and _WORKER in (folder / "cmdline").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
    return sorted(pids)


class ChaoticEngine(Engine):
    """An Engine that fails some requests and delays others before they are queued. Made only if configured.

    Invariant: as for Engine, each request accepted by `submit` is delivered once unless it is cancelled.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, loaders: Mapping[str, Loader], chaos: Chaos) -> None:
        super().__init__(loop, loaders)
        self._chaos = chaos
        self._delayed: dict[InferRequest, asyncio.TimerHandle] = {}
        self.submit_soon = self.submit

    def submit(self, request: InferRequest) -> None:
        """Accept a request or reject it, in some cases on purpose. Raises: InferError."""
        if is_step(request):
            super().submit(request)
            return
        fails, late_s = self._chaos.draw_request_fault()
        if fails:
            self._chaos.count("fail")
            raise InferError(Code.NOT_READY, "this request fails because of --chaos")
        if not late_s:
            super().submit(request)
            return
        self._chaos.count("slow")
        self.hold(request.model)
        self._delayed[request] = self._loop.call_later(late_s, self._submit_delayed, request)

    def cancel(self, request: InferRequest) -> None:
        """Withdraw a waiting request."""
        if (timer := self._delayed.pop(request, None)) is not None:
            timer.cancel()
            self.release(request.model)
            return
        super().cancel(request)

    async def stop(self, grace_s: float) -> int:
        """Reject new work, finish accepted requests, and close every model. Returns: the number dropped."""
        for request, timer in list(self._delayed.items()):
            timer.cancel()
            self._submit_delayed(request)
        return await super().stop(grace_s)

    def _submit_delayed(self, request: InferRequest) -> None:
        del self._delayed[request]
        try:
            super().submit(request)
        except InferError as error:
            request.error = error
            request.sink.deliver((request,))
        finally:
            self.release(request.model)
