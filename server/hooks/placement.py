"""HookPlacement: where a model's hooks run, in the server's process or in workers, and the move to workers.

Called by `runner.py`, on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from penstock.backends.cpus import usable_cpus
from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.spec import HookSpec, WorkerSpec

from .gil_monitor import GilMonitor
from .loading import brief
from .plan import ReplicaPlan, plan
from .replicas import Replicas
from .private_modules import FolderOnPath
from .replica_lease import ReplicaLease
from .worker_replicas import Interpreters, WorkerReplicas

MOST_WORKERS = 4
"""The most workers, if no number is configured."""

logger = logging.getLogger("penstock.hooks")


def own_interpreter(spec: WorkerSpec, label: str) -> str:
    """Return the configured interpreter, for callers that cannot make environments. Raises: InferError."""
    if spec.requirements is not None:
        raise InferError(Code.UNSUPPORTED, f"{label}: nothing here can make the environment of {spec.requirements}")
    return spec.interpreter


class HookPlacement:
    """The replicas for new requests, and those that finish their requests.

    Invariant: hooks move at most once, from the server's process to workers, and only if the number of workers is not
    configured.
    """

    def __init__(self, model: Model, spec: HookSpec, interpreters: Interpreters) -> None:
        self._model = model
        self._spec = spec
        self._interpreters = interpreters
        self._loop = asyncio.get_running_loop()
        self._replicas: Replicas | None = None
        self._leaving: Replicas | None = None
        self._on_path: FolderOnPath | None = None
        self._holding: GilMonitor | None = None
        self._moving: asyncio.Task[None] | None = None
        self._decided: ReplicaPlan | None = None

    @property
    def replicas(self) -> Replicas:
        """The replicas for new requests. Raises: InferError once it is closed."""
        if self._replicas is None:
            raise InferError(Code.NOT_READY, f"model '{self._model.name}' is being unloaded")
        return self._replicas

    async def open(self) -> Any:
        """Load the file. Returns: a replica, which describes the file's hooks. Raises: InferError."""
        decided = self._decided = await self._loop.run_in_executor(None, plan, self._spec)
        if self._spec.workers:
            self._replicas, first = await self._in_workers(self._spec.workers, decided)
            reason = f"in {_processes(self._spec.workers)}"
            reason += ", any of which takes any call" if decided.shared else ", each with a request at a time"
        else:
            self._replicas, first = await self._in_server(decided)
            reason = decided.reason
            if first.swift:
                swift = " and ".join(sorted(first.swift, reverse=True))
                reason += f"; on the event loop for small requests, since they cannot block: {swift}"
        logger.info("hooks of %s: %s", self._model.name, reason, extra={"model": self._model.name})
        self._replicas.leave(first)
        return first

    async def _in_server(self, decided: ReplicaPlan) -> tuple[Replicas, Any]:
        replicas = Replicas(self._model, self._spec, decided, self._loop)
        if self._spec.workers is None:
            self._holding = replicas.holding = GilMonitor(self._loop, replicas.runs, self._found)
        on_path = FolderOnPath(*(self._spec.roots or (self._spec.path.parent,)))
        try:
            first = await replicas.start()
        except BaseException:
            replicas.close()
            on_path.close()
            raise
        self._on_path = on_path
        return replicas, first

    async def _in_workers(self, count: int, decided: ReplicaPlan) -> tuple[Replicas, Any]:
        replicas = WorkerReplicas(self._model, self._spec, replace(decided, replicas=count), self._loop)
        try:
            await self._loop.run_in_executor(None, replicas.prepare, self._interpreters)
            return replicas, await replicas.start()
        except BaseException:
            replicas.close()
            replicas.kill()
            await replicas.ended()
            raise

    def admit(self) -> ReplicaLease:
        """Admit a request. Raises: InferError (OVERLOADED, NOT_READY)."""
        return self.replicas.admit()

    def watch(self, now_ns: int) -> None:
        """Fail calls that have exceeded their limit at `now_ns`."""
        for replicas in filter(None, (self._replicas, self._leaving)):
            replicas.watch(now_ns)

    # -- moving ------------------------------------------------------------------------------------------------

    def _found(self, hook: str, computed_ns: int, late_ns: int) -> None:
        count = self._sensible()
        # projects of other dialects have no penstock.toml
        way = f". hooks.workers = {count} in penstock.toml starts them there, 0 keeps them in the server"
        logger.warning(
            "%s of model '%s' computes for %.1f ms per call and delays the server's event loop by %.1f ms: the hooks "
            "move to %d worker %s%s",
            hook, self._model.name, computed_ns / 1e6, late_ns / 1e6, count, "processes" if count > 1 else "process",
            "" if self._spec.dialect else way, extra={"model": self._model.name},
        )  # fmt: skip
        self._moving = asyncio.ensure_future(self._move(count))

    def _sensible(self) -> int:
        """Return a sensible number of workers: at most the configured number of instances of the file."""
        said = self._spec.replicas
        alone = self._decided is not None and self._decided.alone
        allowed = 1 if alone or said == "shared" else said if isinstance(said, int) else MOST_WORKERS
        return max(1, min(MOST_WORKERS, usable_cpus(), allowed))

    async def _move(self, count: int) -> None:
        if self._decided is None:
            return
        try:
            replicas, first = await self._in_workers(count, self._decided)
        except Exception as error:  # noqa: BLE001 - nobody waits for this task
            text = error.message if isinstance(error, InferError) else brief(error)
            logger.warning(
                "the hooks of model '%s' are not moved: %s", self._model.name, text,
                extra={"model": self._model.name},
            )  # fmt: skip
            return
        replicas.leave(first)
        self._leaving, self._replicas = self._replicas, replicas
        if self._leaving is not None:
            self._leaving.retire()
        logger.info("hooks of %s: now in %s", self._model.name, _processes(count))

    # -- end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all replicas once they have finished; waiting requests are rejected."""
        if self._holding is not None:
            self._holding.close()
        if self._moving is not None:
            self._moving.cancel()
        for replicas in filter(None, (self._replicas, self._leaving)):
            replicas.close()
        if self._on_path is not None:
            self._on_path.close()
        self._on_path = None

    async def ended(self) -> None:
        """Wait for the workers to end, after `close`."""
        waits = [replicas.ended() for replicas in (self._replicas,) if isinstance(replicas, WorkerReplicas)]
        self._replicas = self._leaving = None
        if self._moving is not None:
            waits.append(self._moved())
        await asyncio.gather(*waits)

    async def kill(self) -> None:
        """Kill the workers now; after `close`."""
        replicas = self._replicas
        if isinstance(replicas, WorkerReplicas):
            replicas.kill()
        await self.ended()

    async def _moved(self) -> None:
        if self._moving is not None:
            await asyncio.wait((self._moving,))


def _processes(count: int) -> str:
    return "1 worker process" if count == 1 else f"{count} worker processes"
