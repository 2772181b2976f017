"""Opens and closes models whose Instances are ExternalInstances. Called by the Engine, on the event loop.

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
from .external import ExternalExecutor, ExternalInstance

if TYPE_CHECKING:
    from penstock.batching.devices.rate_limiter import Claim, RateLimiter
    from penstock.batching.request import InferRequest

logger = logging.getLogger("penstock.batching")


@dataclass(frozen=True, slots=True)
class OpenedVersion:
    """An opened version: its completed spec, and an ExternalExecutor for each Instance, group by group."""

    spec: ModelSpec
    executors: list[ExternalExecutor]
    platform: str


class ExternalLoader(Protocol):
    """Opens the ExternalExecutors of versions of one backend. Threads: the event loop's."""

    async def open(self, spec: ModelSpec) -> OpenedVersion:
        """Start everything that runs a version's Batches. Raises: InferError, leaving nothing behind."""


class ResizableLoader(ExternalLoader, Protocol):
    """A loader that can open more ExternalExecutors for a version it has opened."""

    async def open_more(self, served: ModelSpec, spec: ModelSpec, places: Sequence[int]) -> OpenedVersion:
        """Start the Instances of a spec at these positions among all that run.

        `served` is the completed spec being served, which differs only in instances. Raises: as `open`.
        """


async def open_external(
    spec: ModelSpec,
    loader: ExternalLoader,
    finished: Callable[[Model, list[Batch]], None],
    devices: Devices,
) -> Model:
    """Open a model whose Batches run outside. Raises: InferError, leaving nothing behind."""
    start = time.monotonic()
    opened = await loader.open(spec)
    claims: list[tuple[RateLimiter, Claim]] = []
    try:
        model = Model(opened.spec, (), finished, devices)
        model.executors, model.platform = opened.executors, opened.platform
        await run_samples(model, opened.executors)
        model.instances += make_instances(
            model, zip(single_groups(opened.spec), opened.executors, strict=True), devices, claims
        )
    except BaseException:
        for limiter, claim in claims:
            limiter.leave(claim)
        await asyncio.gather(*(each.close() for each in opened.executors))
        raise
    model.load_s = time.monotonic() - start
    return model


def make_instances(
    model: Model, members: Iterable[tuple[InstanceGroup, ExternalExecutor]], devices: Devices,
    claims: list[tuple[RateLimiter, Claim]],
) -> list[ExternalInstance]:  # fmt: skip
    """Make an Instance for each ExternalExecutor. Append their RateLimiter claims to `claims`. Raises: InferError."""
    instances: list[ExternalInstance] = []
    for group, executor in members:
        limiter, claim = limiter_of(group, devices), None
        if limiter is not None:
            claim = limiter.join(group.devices[0], group.resources, group.rate_priority)
            claims.append((limiter, claim))
        instance = ExternalInstance(model, executor, group, limiter, claim)
        instance.number += len(instances)
        executor.attach(instance)
        instances.append(instance)
    return instances


class _SampleRun:
    """Stands in for an Instance while a sample's Batch runs. `done` resolves to its requests."""

    def __init__(self, batch: Batch, count_event: Callable[[str], None]) -> None:
        self.count_event = count_event
        self.done = asyncio.get_running_loop().create_future()
        self._unanswered = set(batch.requests)

    def on_free(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Take the answered requests."""
        self._unanswered.difference_update(answered, batch.rerun_requests)
        if not self._unanswered and not self.done.done():
            self.done.set_result(batch.requests)

    def on_answered(self, batch: Batch, answered: Sequence[InferRequest]) -> None:
        """Take the answered requests, as `on_free`."""
        self.on_free(batch, answered)

    def on_not_run(self, batch: Batch) -> None:
        """Do nothing: `on_down` reports what is wrong."""

    def on_down(self, failure: InferError, *, permanent: bool) -> None:
        """Fail with `failure` if requests are unanswered, or in any case if `permanent`."""
        if not self.done.done() and (permanent or self._unanswered):
            self.done.set_exception(failure)

    def on_up(self) -> None:
        """Do nothing: nothing waits for it."""


async def run_samples(model: Model, executors: Sequence[ExternalExecutor]) -> None:
    """Run all samples on each ExternalExecutor. Raises: InferError (INVALID), naming the sample."""
    for sample in model.spec.samples:
        prepared = prepare_sample(model, sample)
        runs = itertools.product(range(1, sample.count + 1), enumerate(executors))
        for iteration, (number, executor) in runs:
            requests = prepared.requests(str(number), iteration)
            if model.spec.decoupled:
                for request in requests:
                    request.answer_sink = AnswerStream()
            batch = Batch(requests, len(requests), requests[0].key, time.monotonic_ns())
            sample_run = _SampleRun(batch, model.count_event)
            executor.attach(sample_run)
            executor.begin(batch)
            try:
                await sample_run.done
                error = next((request.error for request in requests if request.error is not None), None)
            except InferError as failure:
                error = failure
            for request in batch.rerun_requests:
                executor.abandon(request)
            if error is not None:
                raise sample_error(sample, error.message)


async def check_ready(model: Model) -> bool:
    """Whether a model is ready and its user code, if it defines a check, agrees: every Instance, as in Triton."""
    if not model.ready:
        return False
    return all(await asyncio.gather(*(each.check_ready() for each in model.executors)))


async def close_executors(model: Model) -> None:
    """End the processes that run a model's Batches, if any."""
    closing = [each.close() for each in model.executors]
    for error in filter(None, await asyncio.gather(*closing, return_exceptions=True)):
        logger.error("model %s: its executor could not be stopped", model.name, exc_info=error)


def active_groups(spec: ModelSpec) -> list[InstanceGroup]:
    """List the groups whose Instances run, one for each device."""
    groups = [group for group in spec.instances if not group.passive]
    return [replace(group, devices=(device,)) for group in groups for device in group.devices]


def single_groups(spec: ModelSpec) -> list[InstanceGroup]:
    """Return the group of each Instance that runs, as a group of one."""
    return [replace(group, count=1) for group in active_groups(spec) for _ in range(group.count)]


def complete_external(spec: ModelSpec) -> ModelSpec:
    """Complete the spec of a model of user code, from its configuration alone.

    Raises: InferError (INVALID).
    """
    rows = spec.policy.max_batch_rows or 0
    if not spec.inputs and not spec.outputs:
        where = "declare them in config.pbtxt, or in auto_complete_config of its model.py"
        raise InferError(Code.INVALID, f"model '{spec.name}' has neither inputs nor outputs: {where}")
    signature = configured_signature(spec)
    if max(spec.policy.preferred_rows, default=0) > rows:
        raise InferError(Code.INVALID, spec.preferred_size_error)
    controls = () if spec.sequence is None else spec.sequence.controls
    shape = (-1, 1) if signature.batched else (1,)
    control_specs = [TensorSpec(control.name, control.datatype, shape) for control in controls]
    graph = replace(signature, inputs=(*signature.inputs, *control_specs))
    # the event loop runs none of its batches
    spec = replace(spec, policy=replace(spec.policy, max_batch_rows=rows, executor="thread"))
    check_sequence(spec, graph)
    return replace(
        spec, signature=signature, binding_signature=bound_signature(spec, signature, graph, ungathered=True)
    )
