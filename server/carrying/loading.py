"""Loading of models whose calls are carried. Called by the loaders of the dialects that have such models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.backends.signature import Signature
from penstock.batching.running.external_models import OpenedVersion
from penstock.server.workers.order import Order

from .hosts import SLOTS, CarryingHost, Crew

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.batching.running.external import ExternalExecutor
    from penstock.batching.spec import ModelSpec

CALLS_PER_SLOT = 32
"""How many calls each WorkerSlot may have in flight."""
NO_TENSORS = Signature((), (), batched=False)
_OPEN_LIMIT_S = 3600.0
"""The limit for importing and loading a model, which may download it: the originals have none."""


def make_order(
    spec: ModelSpec, service: str, settings: Mapping[str, Any], label: str, interpreter: str, instance: str
) -> Order:
    """Return the Order of a model's worker. `instance` is appended to the model's name in log records."""
    log_fields = {"model": spec.name, "version": str(spec.version), "instance": f"{spec.name}_{instance}"}
    return Order(
        service, settings, label, log_fields, interpreter=interpreter, folder=Path(spec.path), path=spec.worker.path,
        environment=spec.worker.environment, memory_bytes=spec.worker.memory_bytes, open_limit_s=_OPEN_LIMIT_S,
        always_logged=True,
    )  # fmt: skip


async def open_carried(spec: ModelSpec, orders: Iterable[Order], crew: Crew, platform: str) -> OpenedVersion:
    """Start a worker for each of the Orders, one for each instance of the spec. Raises: InferError.

    The model takes no tensors and has no axis for rows. Its calls are nevertheless sent to a worker a few at a time:
    that number is the capacity of a Batch.
    """
    crew.hosts += [CarryingHost(order, crew) for order in orders]
    await crew.start()
    slots: list[ExternalExecutor] = list(crew.slots())
    return OpenedVersion(complete_spec(spec), slots, platform)


def complete_spec(spec: ModelSpec, signature: Signature = NO_TENSORS, rows: int = CALLS_PER_SLOT) -> ModelSpec:
    """Complete the spec of a model whose calls are carried. Units: `rows`, which are calls, per Batch."""
    policy = replace(spec.policy, max_batch_rows=rows, executor="thread")
    group = spec.instances[0]
    # user code decides what its answers are, and its slots are an internal matter
    declared_config = {"name": spec.name, "instance_group": [{"count": group.count, "kind": "KIND_CPU"}]}
    instances = (replace(group, count=group.count * SLOTS),)
    return replace(
        spec, signature=signature, binding_signature=signature, inputs=signature.inputs, outputs=signature.outputs,
        policy=policy, instances=instances, declared_config=json.dumps(declared_config),
    )  # fmt: skip
