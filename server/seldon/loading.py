"""Loading of Seldon components: a worker for each instance, and the configuration as a model of the v2 protocol.

Made by dialect.py; called by the Engine when it opens a version whose backend is "seldon".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from penstock.batching.running.external_models import OpenedVersion
from penstock.server.carrying.hosts import CarryingHost
from penstock.server.carrying.loading import CALLS_PER_SLOT, complete_spec, make_order

from .batching import Sharing
from .components import SELDON
from .crew import SeldonCrew
from .messages import ComponentDescription, Endpoint
from .tensors import TensorCodec, signature_of

if TYPE_CHECKING:
    from penstock.batching.running.external import ExternalExecutor
    from penstock.batching.spec import ModelSpec
    from penstock.server.environments.environments import Environments
    from penstock.server.workers.order import Order

SERVICE = "penstock.server.seldon.inside.service"


class SeldonModels:
    """Opens components, each instance in a process of its own. Threads: the event loop's.

    `descriptions` has what workers reported about their components, by model; `sharing` decodes calls that may share a
    batch, for the models that allow it. `count_metrics` is called with the metrics of v2 requests.
    """

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self.descriptions: dict[str, ComponentDescription] = {}
        self._crews: dict[str, SeldonCrew] = {}
        self.sharing: dict[str, Sharing] = {}
        self.count_metrics: Callable[[Endpoint, bytes], None] = lambda _endpoint, _metrics: None

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Start a worker for each instance. Raises: InferError."""
        label = f"component '{spec.options['component']}'"
        interpreter = await asyncio.to_thread(self._environments.interpreter, spec.worker, label)

        def on_opened(opened: bytes) -> None:
            description = ComponentDescription.read(opened)
            if self._crews.get(spec.name) is crew:
                self.descriptions[spec.name] = description
            if crew.sharing is not None and not description.batches:
                crew.sharing.allowed = False

        crew = SeldonCrew(
            spec.worker.timeout_s, on_opened, max_calls=partial(_max_calls, spec), count_metrics=self.count_metrics
        )
        count = spec.instances[0].count
        crew.hosts += [CarryingHost(_order(spec, interpreter, label, at + 1), crew) for at in range(count)]
        description = ComponentDescription.read(await crew.start())
        self._crews[spec.name], self.descriptions[spec.name] = crew, description
        batches = spec.options.get("batching") == "true" and description.batches
        spec = _completed(spec, description, batches=batches)
        if spec.signature is not None:
            crew.tensors = TensorCodec(spec.name, spec.signature)
        self.sharing.pop(spec.name, None)
        if batches:
            strict, rows = spec.options.get("strict", "true") == "true", spec.policy.max_batch_rows or 1
            crew.sharing = self.sharing[spec.name] = Sharing(description, rows, strict=strict)
        slots: list[ExternalExecutor] = list(crew.slots())
        return OpenedVersion(spec, slots, SELDON)


def _completed(spec: ModelSpec, description: ComponentDescription, *, batches: bool) -> ModelSpec:
    """Complete the component's configuration as a model of the v2 protocol, and set the capacity of its Batches.

    A component that does not share batches has no axis for rows as such a model. Its calls are still sent to the worker
    several at a time, and a Batch holds that number.
    """
    rows = (spec.policy.max_batch_rows or spec.policy.default_max_batch_rows) if batches else CALLS_PER_SLOT
    return complete_spec(spec, signature_of(description.metadata, batched=batches), rows)


def _max_calls(spec: ModelSpec) -> int:
    """Return how many calls a worker may serve, with a random addition, so that workers do not end at the same time."""
    max_calls, jitter = (int(spec.options.get(name, "0")) for name in ("max_requests", "max_requests_jitter"))
    return max_calls + random.randint(0, jitter) if max_calls else 0  # noqa: S311 - no secret


def _order(spec: ModelSpec, interpreter: str, label: str, number: int) -> Order:
    settings = {
        **spec.options,
        "folder": str(spec.path),
        "parameters": spec.options.get("parameters", "[]"),
        "strict": spec.options.get("strict", "true") == "true",
        "custom_service": number == 1,
    }
    return make_order(spec, SERVICE, settings, label, interpreter, str(number))
