"""Loading of models whose calls are carried. Called by the loaders of the dialects that have such models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backends.signature import Signature
from penstock.batching.running.outsides import Opened

from .hosts import SEATS, Crew, Host

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.batching.running.outside import Outside
    from penstock.batching.spec import ModelSpec
    from penstock.server.workers.order import Order

AT_ONCE = 32
"""How many calls may be on their way to a worker together, from each of its Seats."""
NO_TENSORS = Signature((), (), batched=False)


async def open_carried(spec: ModelSpec, orders: Iterable[Order], crew: Crew, platform: str) -> Opened:
    """Start a worker for each of the Orders, one for each instance of the spec. Raises: InferError.

    The model takes no tensors. It has no axis for rows, and its calls are sent to a worker a few at a time all the
    same: that number is then what a Batch holds.
    """
    crew.hosts += [Host(order, crew) for order in orders]
    await crew.start()
    seats: list[Outside] = list(crew.seats())
    return Opened(as_carried(spec), seats, platform)


def as_carried(spec: ModelSpec, signature: Signature = NO_TENSORS, rows: int = AT_ONCE) -> ModelSpec:
    """Complete the spec of a model whose calls are carried. Units: `rows`, or calls, that a Batch may hold."""
    policy = replace(spec.policy, max_batch_rows=rows, executor="thread")
    group = spec.instances[0]
    # what its answers are is for user code to say, and its Seats are nobody's business
    declared = {"name": spec.name, "instance_group": [{"count": group.count, "kind": "KIND_CPU"}]}
    instances = (replace(group, count=group.count * SEATS),)
    return replace(
        spec, signature=signature, bound=signature, inputs=signature.inputs, outputs=signature.outputs,
        policy=policy, instances=instances, declared=json.dumps(declared),
    )  # fmt: skip
