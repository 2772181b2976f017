"""Affinity: a model that remembers sequences itself continues each where its state is, or not at all.

What such a model remembers is in its Instance: in the process of a `model.py`, or in the variables of a session. Each
Instance has a `state_id`, an object that is replaced when all of that is lost: its process ended, or its session was
closed. Used by both kinds of Instance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.backends.backend import is_stateful
from penstock.backends.errors import Code, InferError, RunStopped
from penstock.batching.request import NO_SEQUENCE
from penstock.batching.running.batch import Batch
from penstock.batching.running.isolation import LostBatch, fail_requests

from .sequence_slots import pin
from .sequences import Sequences

if TYPE_CHECKING:
    from penstock.backends.backend import Backend, Binding
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Pin
    from penstock.batching.spec import ModelSpec

LOST_STATE_TEXT = (
    "inference request for sequence {} to model '{}' must specify the START flag on the first request of the sequence: "
    "the instance that ran it was lost, with its state"
)

LOST_INSTANCE_TEXT = "the instance of model '{}' that ran the request was lost, with its state"
"""The same, if each request is its own sequence."""


class StatefulInstance(Protocol):
    """The part of an Instance that is used here."""

    state_id: object
    idle: bool
    number: int

    def wake(self) -> None: ...


class BoundStatefulInstance(StatefulInstance, Protocol):
    """One that has a Binding."""

    binding: Binding


def make_sequences(spec: ModelSpec, rows: int, instances: int, backends: Sequence[Backend]) -> Sequences | None:
    """Make the Sequences of a model with `rows` rows per batch; None if it has no sequences.

    User code, which has no Backends, remembers sequences itself.
    """
    if spec.sequence is None:
        return None
    return Sequences(
        spec.name, spec.sequence, rows, instances, model_keeps_state=not backends or is_stateful(backends[0])
    )


def pin_of(model: Model, instance: StatefulInstance) -> Pin:
    """Return the Pin of the Keys that an Instance may run; None if it may run all."""
    sequences = model.scheduler.sequences
    return None if sequences is None or not sequences.model_keeps_state else pin(_number_of(model, instance))


def wake_next(model: Model, instance: StatefulInstance, *, has_taken: bool) -> None:
    """Wake an idle Instance for what waits and this one has not taken. Call with the model's lock held."""
    if pin_of(model, instance) is None:
        if has_taken:
            model.wake_one()
        return
    # only its own Instance can run a request, and a sequence that ends here may let one begin at any Instance
    scheduler, now_ns = model.scheduler, time.monotonic_ns()
    for each in model.instances:
        if each.idle and scheduler.next_lane(now_ns, pin=pin(each.number)) is not None:
            each.wake()
            return


def report_availability(model: Model, instance: StatefulInstance, *, can_run: bool) -> None:
    """Record whether an Instance can run; while it cannot, no sequence begins there."""
    scheduler, sequences = model.scheduler, model.scheduler.sequences
    with model.lock:
        if sequences is not None and sequences.model_keeps_state:
            now_ns = time.monotonic_ns()
            sequences.set_available(_number_of(model, instance), now_ns, available=can_run)
            scheduler.expired += scheduler.expire(now_ns)
            if scheduler.request_count:
                model.wake_one()


def split_by_state(model: Model, instance: StatefulInstance, batch: Batch) -> tuple[Batch | None, list[Batch]]:
    """Divide a Batch into what an Instance can run of it, and rejected requests whose state is elsewhere or lost.

    Sequences that begin with the Batch have their state there from now on.
    """
    sequences = model.scheduler.sequences
    if sequences is None or not sequences.model_keeps_state:
        return batch, []
    misplaced: list[InferRequest] = []
    for request in batch.requests:
        if (request.sequence or NO_SEQUENCE).start:
            request.active_sequence.state_id = instance.state_id
        elif request.active_sequence.state_id is not instance.state_id:
            misplaced.append(request)
    if not misplaced:
        return batch, []
    rejected: list[Batch] = []
    for request in misplaced:
        single = Batch([request], request.rows, batch.key, batch.exec_start_ns)
        error = InferError(Code.INVALID, LOST_STATE_TEXT.format(request.active_sequence.id, model.name))
        if sequences.generated_ids is not None:
            error = InferError(Code.NOT_READY, LOST_INSTANCE_TEXT.format(model.name))
        rejected += fail_requests(single, error)
    return _without(batch, misplaced), rejected


def execute_with_state(
    instance: BoundStatefulInstance,
    model: Model,
    run: Callable[..., list[Batch]],
    batch: Batch,
    *errors: Exception | None,
) -> list[Batch]:
    """Run what an Instance can run of a Batch, and reject the rest. Returns and raises: as `run`.

    `run` is `execute` or `execute_singly` of isolation.py, `errors` as there. A run that was stopped has closed its
    session, and what that remembered is lost.
    """
    sequences = model.scheduler.sequences
    if sequences is None or not sequences.model_keeps_state:
        return run(model, instance.binding, batch, *errors)
    runnable, rejected = split_by_state(model, instance, batch)
    if runnable is None:
        return rejected
    try:
        batches = run(model, instance.binding, runnable, *errors)
    except LostBatch as lost:
        lost.finished[:0] = rejected
        raise
    if any(isinstance(request.error, RunStopped) for each in batches for request in each.requests):
        instance.state_id = object()
    return rejected + batches


def _number_of(model: Model, instance: StatefulInstance) -> int:
    """Return the number of an Instance in its model; -1 before it is added, and once the model is closed."""
    return instance.number if any(each is instance for each in model.instances) else -1


def _without(batch: Batch, excluded: list[InferRequest]) -> Batch | None:
    positions = [position for position, request in enumerate(batch.requests) if request not in excluded]
    if not positions:
        return None
    requests = [batch.requests[position] for position in positions]
    remaining = Batch(requests, sum([request.rows for request in requests]), batch.key, batch.exec_start_ns)
    remaining.cost_ns = batch.cost_ns
    if batch.row_positions is not None:
        remaining.row_positions = [batch.row_positions[position] for position in positions]
        remaining.span_rows = remaining.row_positions[-1] + 1
    return remaining
