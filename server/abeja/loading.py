"""Loading of handlers: the workers that import them. Made by dialect.py, called by the Engine."""

from __future__ import annotations

import asyncio
import sysconfig
from typing import TYPE_CHECKING

from penstock.server.carrying.hosts import Crew
from penstock.server.carrying.loading import make_order, open_carried

from .folder import ABEJA

if TYPE_CHECKING:
    from penstock.batching.running.external_models import OpenedVersion
    from penstock.batching.spec import ModelSpec, WorkerSpec
    from penstock.server.environments.environments import Environments

SERVICE = "penstock.server.abeja.inside.service"


class Handlers:
    """Opens handlers, each instance in a process of its own. Threads: the event loop's."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Start a worker for each instance. Raises: InferError."""
        label = f"handler '{spec.options['handler']}'"
        interpreter = await asyncio.to_thread(self._environments.interpreter, spec.worker, label)
        settings = {
            "handler": spec.options["handler"],
            "strict": spec.options["strict"] == "true",
            "fallback_folders": _server_packages(spec.worker),
        }
        numbers = range(1, spec.instances[0].count + 1)
        orders = [make_order(spec, SERVICE, settings, label, interpreter, str(number)) for number in numbers]
        return await open_carried(spec, orders, Crew(spec.worker.timeout_s), ABEJA)


def _server_packages(worker: WorkerSpec) -> list[str]:
    """Return the folders for packages that a handler's requirements do not name, which the original's images had.

    The requirements are installed apart from the server's packages; these folders make the latter available, too.
    """
    if worker.requirements is None or worker.interpreter:
        return []
    paths = sysconfig.get_paths()
    return list(dict.fromkeys((paths["purelib"], paths["platlib"])))
