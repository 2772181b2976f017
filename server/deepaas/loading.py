"""Loading of DEEPaaS models: Desk, prediction workers, and Trainers. Made by dialect.py, called by the Engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.server.carrying.hosts import Crew
from penstock.server.carrying.loading import make_order, open_carried

from .desk import Desk
from .entries import DEEPAAS
from .inside.files import remove_stale_folders
from .jobs import Jobs
from .messages import WorkerRole
from .store import Store, file_of
from .trainer import Trainer
from .trainings import Trainings

if TYPE_CHECKING:
    from penstock.batching.running.external_models import OpenedVersion
    from penstock.batching.spec import ModelSpec
    from penstock.server.environments.environments import Environments
    from penstock.server.settings import Settings
    from penstock.server.workers.order import Order

SERVICE = "penstock.server.deepaas.inside.service"


@dataclass(eq=False)
class DeepaasCrew(Crew):
    """The workers that predict, and, once all are open, the Desk, which ends with them. Then `on_empty` is called."""

    desk: Desk | None = None
    on_empty: Callable[[Desk], None] = lambda _: None

    async def on_host_closed(self) -> None:
        """Stop the Desk after the last worker."""
        if self.desk is not None and all(host.restarting_worker.closing for host in self.hosts):
            await self.desk.close()
            self.on_empty(self.desk)
            await asyncio.to_thread(remove_stale_folders)  # uploads of killed workers


class DeepaasModels:
    """Opens models, and holds their trainings. `desks` are those of the served models, by name.

    Threads: the event loop's.
    """

    def __init__(self, environments: Environments, settings: Settings) -> None:
        self.desks: dict[str, Desk] = {}
        self.trainings = Trainings(self._make_trainer, Store(file_of(settings, os.environ)), settings.deepaas_workers)
        self.jobs = Jobs(self.desk_of, self.trainings)
        self._environments = environments
        self._trainer_orders: dict[str, Order] = {}
        self._unloading: set[asyncio.Task[None]] = set()

    def desk_of(self, name: str) -> Desk:
        """Return the Desk of a model. Raises: InferError (NOT_READY)."""
        desk = self.desks.get(name)
        if desk is None:
            raise InferError(Code.NOT_READY, f"model '{name}' is not available: the log has the reason")
        return desk

    async def close(self) -> None:
        """End all trainings; the Engine closes the workers that predict."""
        await self.trainings.close()

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Start a Desk, and a worker for each instance. Raises: InferError, after closing all that was started."""
        label = f"model '{spec.name}'"
        interpreter = await asyncio.to_thread(self._environments.interpreter, spec.worker, label)
        await self.trainings.open()
        desk = Desk(_order(spec, interpreter, WorkerRole.DESK))
        crew = DeepaasCrew(spec.worker.timeout_s, on_empty=lambda desk: self._on_desk_closed(spec.name, desk))
        orders = [_order(spec, interpreter, WorkerRole.PREDICT, f"_{at + 1}") for at in range(spec.instances[0].count)]
        opening = asyncio.ensure_future(open_carried(spec, orders, crew, DEEPAAS))
        starting = asyncio.ensure_future(desk.start())
        try:
            opened, _ = await asyncio.gather(opening, starting)
        except BaseException:
            opening.cancel()
            starting.cancel()
            await asyncio.gather(opening, starting, return_exceptions=True)
            await asyncio.gather(*(host.close() for host in crew.hosts), desk.close(), return_exceptions=True)
            raise
        crew.desk = self.desks[spec.name] = desk
        self._trainer_orders[spec.name] = _order(spec, interpreter, WorkerRole.TRAIN)
        return opened

    def _on_desk_closed(self, name: str, desk: Desk) -> None:
        """Handle a closed Desk: of an unloaded model, or of a version that was replaced."""
        if self.desks.get(name) is desk:
            del self.desks[name], self._trainer_orders[name]
            ending = asyncio.get_running_loop().create_task(self.trainings.on_unload(name))
            self._unloading.add(ending)
            ending.add_done_callback(self._unloading.discard)

    def _make_trainer(self, name: str, uuid: str, line: Callable[[str], None]) -> Trainer:
        """Make a Trainer for a model as served now. Raises: InferError (NOT_READY)."""
        order = self._trainer_orders.get(name)
        if order is None:
            raise InferError(Code.NOT_READY, f"model '{name}' is no longer available")
        about = {**order.log_fields, "training": uuid}
        return Trainer(replace(order, label=f"training {uuid} of {order.label}", log_fields=about, on_line=line))


def _order(spec: ModelSpec, interpreter: str, role: WorkerRole, number: str = "") -> Order:
    settings = {
        "model": spec.name,
        "target": spec.options["target"],
        "role": role.value,
        **{name: spec.options[name] == "true" for name in ("warm", "accept_header", "show_errors")},
    }
    order = make_order(spec, SERVICE, settings, f"model '{spec.name}'", interpreter, role.value + number)
    return replace(order, path=(str(spec.path),))
