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
from penstock.server.workers.order import Interpreters

from .gil_monitor import GilMonitor
from .loading import exception_line
from .plan import ReplicaPlan, plan_replicas
from .private_modules import FolderOnPath
from .replica_lease import ReplicaLease
from .replicas import Replicas
from .worker_replicas import WorkerReplicas

MAX_WORKERS = 4
"""The most workers, if no number is configured."""

logger = logging.getLogger("penstock.hooks")


def configured_interpreter(spec: WorkerSpec, label: str) -> str:
    """Return the configured interpreter, for callers that cannot make environments. Raises: InferError."""
    if spec.requirements is not None:
        raise InferError(Code.UNSUPPORTED, f"{label}: cannot make the environment of {spec.requirements}")
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
        self._retiring: Replicas | None = None
        self._on_path: FolderOnPath | None = None
        self._gil_monitor: GilMonitor | None = None
        self._move_task: asyncio.Task[None] | None = None
        self._plan: ReplicaPlan | None = None

    @property
    def replicas(self) -> Replicas:
        """The replicas for new requests. Raises: InferError once it is closed."""
        if self._replicas is None:
            raise InferError(Code.NOT_READY, f"model '{self._model.name}' is being unloaded")
        return self._replicas

    async def open(self) -> Any:
        """Load the file. Returns: a replica, which describes the file's hooks. Raises: InferError."""
        plan = self._plan = await self._loop.run_in_executor(None, plan_replicas, self._spec)
        if self._spec.workers:
            self._replicas, first = await self._start_in_workers(self._spec.workers, plan)
            reason = f"in {_processes(self._spec.workers)}"
            reason += ", any of which takes any call" if plan.shared else ", each with a request at a time"
        else:
            self._replicas, first = await self._start_in_server(plan)
            reason = plan.reason
            if first.inline_hooks:
                inline_names = " and ".join(sorted(first.inline_hooks, reverse=True))
                reason += f"; on the event loop for small requests, since they cannot block: {inline_names}"
        logger.info("hooks of %s: %s", self._model.name, reason, extra={"model": self._model.name})
        self._replicas.release(first)
        return first

    async def _start_in_server(self, plan: ReplicaPlan) -> tuple[Replicas, Any]:
        replicas = Replicas(self._model, self._spec, plan, self._loop)
        if self._spec.workers is None:
            self._gil_monitor = replicas.gil_monitor = GilMonitor(
                self._loop, replicas.is_running_hook, self._on_gil_held
            )
        on_path = FolderOnPath(*(self._spec.roots or (self._spec.path.parent,)))
        try:
            first = await replicas.start()
        except BaseException:
            replicas.close()
            on_path.close()
            raise
        self._on_path = on_path
        return replicas, first

    async def _start_in_workers(self, count: int, plan: ReplicaPlan) -> tuple[Replicas, Any]:
        replicas = WorkerReplicas(self._model, self._spec, replace(plan, replicas=count), self._loop)
        try:
            await self._loop.run_in_executor(None, replicas.prepare, self._interpreters)
            return replicas, await replicas.start()
        except BaseException:
            replicas.close()
            replicas.kill()
            await replicas.wait_ended()
            raise

    def admit(self) -> ReplicaLease:
        """Admit a request. Raises: InferError (OVERLOADED, NOT_READY)."""
        return self.replicas.admit()

    def enforce_limits(self, now_ns: int) -> None:
        """Fail calls that have exceeded their limit at `now_ns`."""
        for replicas in filter(None, (self._replicas, self._retiring)):
            replicas.enforce_limits(now_ns)

    # -- moving ------------------------------------------------------------------------------------------------

    def _on_gil_held(self, hook: str, computed_ns: int, delay_ns: int) -> None:
        count = self._worker_count()
        # projects of other dialects have no penstock.toml
        hint = f". hooks.workers = {count} in penstock.toml starts them there, 0 keeps them in the server"
        logger.warning(
            "%s of model '%s' computes for %.1f ms per call and delays the server's event loop by %.1f ms: the hooks "
            "move to %d worker %s%s",
            hook, self._model.name, computed_ns / 1e6, delay_ns / 1e6, count, "processes" if count > 1 else "process",
            "" if self._spec.dialect else hint, extra={"model": self._model.name},
        )  # fmt: skip
        self._move_task = asyncio.ensure_future(self._move(count))

    def _worker_count(self) -> int:
        """Return a sensible number of workers: at most the configured number of instances of the file."""
        configured = self._spec.replicas
        is_exclusive = self._plan is not None and self._plan.is_exclusive
        limit = (
            1 if is_exclusive or configured == "shared" else configured if isinstance(configured, int) else MAX_WORKERS
        )
        return max(1, min(MAX_WORKERS, usable_cpus(), limit))

    async def _move(self, count: int) -> None:
        if self._plan is None:
            return
        try:
            replicas, first = await self._start_in_workers(count, self._plan)
        except Exception as error:  # noqa: BLE001 - nobody waits for this task
            text = error.message if isinstance(error, InferError) else exception_line(error)
            logger.warning(
                "the hooks of model '%s' are not moved: %s", self._model.name, text,
                extra={"model": self._model.name},
            )  # fmt: skip
            return
        replicas.release(first)
        self._retiring, self._replicas = self._replicas, replicas
        if self._retiring is not None:
            self._retiring.retire()
        logger.info("hooks of %s: now in %s", self._model.name, _processes(count))

    # -- end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End all replicas once they have finished; waiting requests are rejected."""
        if self._gil_monitor is not None:
            self._gil_monitor.close()
        if self._move_task is not None:
            self._move_task.cancel()
        for replicas in filter(None, (self._replicas, self._retiring)):
            replicas.close()
        if self._on_path is not None:
            self._on_path.close()
        self._on_path = None

    async def wait_ended(self) -> None:
        """Wait for the workers to end, after `close`."""
        waits = [replicas.wait_ended() for replicas in (self._replicas,) if isinstance(replicas, WorkerReplicas)]
        self._replicas = self._retiring = None
        if self._move_task is not None:
            waits.append(self._wait_moved())
        await asyncio.gather(*waits)

    async def kill(self) -> None:
        """Kill the workers now; after `close`."""
        replicas = self._replicas
        if isinstance(replicas, WorkerReplicas):
            replicas.kill()
        await self.wait_ended()

    async def _wait_moved(self) -> None:
        if self._move_task is not None:
            await asyncio.wait((self._move_task,))


def _processes(count: int) -> str:
    return "1 worker process" if count == 1 else f"{count} worker processes"
