"""Outsides: opens and closes models whose Instances are OutsideInstances. Called by the Engine, on the event loop.

Nothing about such a model is read from its file: its configuration defines what it takes and returns.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec
from penstock.batching.devices.placement import Devices, limiter_of
from penstock.batching.loading.samples import prepare_sample, sample_error
from penstock.batching.model import Model
from penstock.batching.sequences.controls import check_sequence
from penstock.batching.shapes.bound import bound_signature, configured_signature
from penstock.batching.spec import InstanceGroup, ModelSpec
from penstock.batching.stream import AnswerStream

from .batch import Batch
from .outside import Outside, OutsideInstance

if TYPE_CHECKING:
    from penstock.batching.devices.rates import Claim, RateLimiter
    from penstock.batching.request import InferRequest

logger = logging.getLogger("penstock.batching")


@dataclass(frozen=True, slots=True)
class OpenedVersion:
    """An opened version: its completed spec, and an Outside for each Instance, group by group."""

    spec: ModelSpec
    outsides: list[Outside]
    platform: str


class OutsideLoader(Protocol):
    """Opens the Outsides of versions of one backend. Threads: the event loop's."""

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Start everything that runs a version's Batches. Raises: InferError, leaving nothing behind."""


class MoreLoader(OutsideLoader, Protocol):
    """A loader that can open more Outsides for a version it has opened."""

    async def more(self, served: ModelSpec, spec: ModelSpec, places: Sequence[int]) -> OpenedVersion:
        """Start the Instances of a spec at these positions among all that run.

        `served` is the completed spec being served, which differs only in instances. Raises: as `open`.
        """


async def open_outside(
    spec: ModelSpec,
    loader: OutsideLoader,
    finished: Callable[[Model, list[Batch]], None],
    devices: Devices,
) -> Model:
    """Open a model whose Batches run outside. Raises: InferError, leaving nothing behind."""
    start = time.monotonic()
    opened = await loader.open(spec)
    claims: list[tuple[RateLimiter, Claim]] = []
    try:
        model = Model(opened.spec, (), finished, devices)
        model.outsides, model.platform = opened.outsides, opened.platform
        await run_samples(model, opened.outsides)
        model.instances += instances_of(model, zip(singles(opened.spec), opened.outsides, strict=True), devices, claims)
    except BaseException:
        for limiter, claim in claims:
            limiter.leave(claim)
        await asyncio.gather(*(each.close() for each in opened.outsides))
        raise
    model.load_s = time.monotonic() - start
    return model


def instances_of(
    model: Model, seats: Iterable[tuple[InstanceGroup, Outside]], devices: Devices,
    claims: list[tuple[RateLimiter, Claim]],
) -> list[OutsideInstance]:  # fmt: skip
    """Make an Instance for each Outside, appending their RateLimiter claims to `claims`. Raises: InferError."""
    instances: list[OutsideInstance] = []
    for group, outside in seats:
        limiter, claim = limiter_of(group, devices), None
        if limiter is not None:
            claim = limiter.join(group.devices[0], group.resources, group.rate_priority)
            claims.append((limiter, claim))
        instance = OutsideInstance(model, outside, group, limiter, claim)
        instance.seat += len(instances)
        outside.attach(instance)
        instances.append(instance)
    return instances


class _Rehearsal:
    """Stands in for an Instance while a sample's Batch runs. `done` resolves to its requests."""

    def __init__(self, batch: Batch, count: Callable[[str], None]) -> None:
        self.count = count
        self.done = asyncio.get_running_loop().create_future()
        self._left = set(batch.requests)

    def freed(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Take the answered requests."""
        self._left.difference_update(answered, batch.again)
        if not self._left and not self.done.done():
            self.done.set_result(batch.requests)

    def late(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Take the answered requests, as `freed`."""
        self.freed(batch, answered)

    def unrun(self, batch: Batch) -> None:
        """Do nothing: `down` reports what is wrong."""

    def down(self, failure: InferError, *, hopeless: bool) -> None:
        """Fail with `failure` if requests are unanswered, or in any case if `hopeless`."""
        if not self.done.done() and (hopeless or self._left):
            self.done.set_exception(failure)

    def up(self) -> None:
        """Do nothing: nothing waits for it."""


async def run_samples(model: Model, outsides: Sequence[Outside]) -> None:
    """Run all samples on each Outside. Raises: InferError (INVALID), naming the sample."""
    for sample in model.spec.samples:
        prepared = prepare_sample(model, sample)
        runs = itertools.product(range(1, sample.count + 1), enumerate(outsides))
        for iteration, (number, outside) in runs:
            requests = prepared.requests(str(number), iteration)
            if model.spec.decoupled:
                for request in requests:
                    request.answers = AnswerStream()
            batch = Batch(requests, len(requests), requests[0].key, time.monotonic_ns())
            rehearsal = _Rehearsal(batch, model.count)
            outside.attach(rehearsal)
            outside.begin(batch)
            try:
                await rehearsal.done
                error = next((request.error for request in requests if request.error is not None), None)
            except InferError as failure:
                error = failure
            for request in batch.again:
                outside.abandon(request)
            if error is not None:
                raise sample_error(sample, error.message)


async def says_ready(model: Model) -> bool:
    """Whether a model is ready and its user code, if it defines a check, agrees: every Instance, as in Triton."""
    if not model.ready:
        return False
    return all(await asyncio.gather(*(each.says_ready() for each in model.outsides)))


async def close_outsides(model: Model) -> None:
    """End the processes that run a model's Batches, if any."""
    closing = [each.close() for each in model.outsides]
    for error in filter(None, await asyncio.gather(*closing, return_exceptions=True)):
        logger.error("model %s: its executor could not be stopped", model.name, exc_info=error)


def active(spec: ModelSpec) -> list[InstanceGroup]:
    """List the groups whose Instances run, one for each device."""
    groups = [group for group in spec.instances if not group.passive]
    return [replace(group, devices=(device,)) for group in groups for device in group.devices]


def singles(spec: ModelSpec) -> list[InstanceGroup]:
    """Return the group of each Instance that runs, as a group of one."""
    return [replace(group, count=1) for group in active(spec) for _ in range(group.count)]


def complete_outside(spec: ModelSpec) -> ModelSpec:
    """Complete the spec of a model of user code, from its configuration alone.

    Raises: InferError (INVALID).
    """
    rows = spec.policy.max_batch_rows or 0
    if not spec.inputs and not spec.outputs:
        where = "declare them in config.pbtxt, or in auto_complete_config of its model.py"
        raise InferError(Code.INVALID, f"model '{spec.name}' has neither inputs nor outputs: {where}")
    signature = configured_signature(spec)
    if max(spec.policy.preferred_rows, default=0) > rows:
        raise InferError(Code.INVALID, spec.too_preferred)
    controls = () if spec.sequence is None else spec.sequence.controls
    shape = (-1, 1) if signature.batched else (1,)
    told = [TensorSpec(control.name, control.datatype, shape) for control in controls]
    graph = replace(signature, inputs=(*signature.inputs, *told))
    # the event loop runs none of its batches
    spec = replace(spec, policy=replace(spec.policy, max_batch_rows=rows, executor="thread"))
    check_sequence(spec, graph)
    return replace(spec, signature=signature, bound=bound_signature(spec, signature, graph, ungathered=True))
