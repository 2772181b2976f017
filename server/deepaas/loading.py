"""Loading of DEEPaaS models: a desk and workers that predict. Made by dialect.py, called by the Engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.server.carrying.hosts import Crew
from penstock.server.carrying.loading import open_carried
from penstock.server.workers.order import Order

from .desk import Desk
from .entries import DEEPAAS
from .messages import Role

if TYPE_CHECKING:
    from penstock.batching.outsides import Opened
    from penstock.batching.spec import ModelSpec
    from penstock.server.environments.environments import Environments

SERVICE = "penstock.server.deepaas.inside.service"
OPEN_LIMIT_S = 3600.0
"""How long importing and warming a model may take: the original had no limit."""
IMPORTABLE = str(Path(__file__).with_name("importable"))


@dataclass
class DeepaasCrew(Crew):
    """The workers that predict, and the desk, which ends with them."""

    desk: Desk | None = None

    async def left(self) -> None:
        """End the desk with the last of them."""
        if self.desk is not None and all(host.closing for host in self.hosts):
            await self.desk.close()


class DeepaasModels:
    """Opens models. `desks` are those of what is served, by name; `interpreters` the Pythons that run them.

    Threads: the event loop's.
    """

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.desks: dict[str, Desk] = {}
        self.interpreters: dict[str, str] = {}

    async def open(self, spec: ModelSpec) -> Opened:
        """Start a desk, and a worker for each instance. Raises: InferError."""
        label = f"model '{spec.name}'"
        interpreter = await asyncio.to_thread(self._environments.interpreter, spec.worker, label)
        desk = Desk(order_of(spec, interpreter, Role.DESK))
        crew = DeepaasCrew(spec.worker.timeout_s, desk=desk)
        orders = [order_of(spec, interpreter, Role.PREDICT, at + 1) for at in range(spec.instances[0].count)]
        desk_started = asyncio.ensure_future(desk.start())
        try:
            opened, _ = await asyncio.gather(open_carried(spec, orders, crew, DEEPAAS), desk_started)
        except BaseException:
            desk_started.cancel()
            await asyncio.gather(*(host.close() for host in crew.hosts), return_exceptions=True)
            raise
        self.desks[spec.name], self.interpreters[spec.name] = desk, interpreter
        return opened


def order_of(spec: ModelSpec, interpreter: str, role: Role, number: int = 0) -> Order:
    """Say what a worker of a model is to be."""
    settings = {
        "model": spec.name,
        "target": spec.options["target"],
        "role": role.value,
        **{name: spec.options[name] == "true" for name in ("warm", "accept_header", "show_errors")},
    }
    suffix = f"_{number}" if number else ""
    about = {"model": spec.name, "version": str(spec.version), "instance": f"{spec.name}_{role.value}{suffix}"}
    return Order(
        SERVICE, settings, f"model '{spec.name}'", about, interpreter=interpreter, folder=Path(spec.path),
        path=(str(spec.path),), environment=spec.worker.environment, open_limit_s=OPEN_LIMIT_S, heard=True,
    )  # fmt: skip
