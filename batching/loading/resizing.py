"""Resizing: a serving Model gets other Instances, while those that stay continue undisturbed.

Called by the Engine. First, missing Instances are made beside the serving ones. Then, on the event loop, they join and
the superfluous ones take no more (`Change.commit`) and end once they have delivered. Counts and learned times stay.
Source of which Instances stay: Triton core, backend_model.cc: those whose group is the same, except for name and count.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.backends.backend import Loader
from penstock.batching.devices.placement import Devices, Placement, needs_threads, pinned_to_cpus, resize_shares
from penstock.batching.model import Model
from penstock.batching.running.external import ExternalInstance
from penstock.batching.running.external_models import close_executors, make_instances, run_samples, single_groups
from penstock.batching.running.in_place import devices_of
from penstock.batching.running.instance import ThreadInstance
from penstock.batching.scheduling.sizing import fast_ns

from .closing import end_with_timeout
from .counting import GPU_MEMORY
from .opening import close_model, session_options
from .preparing import prepare
from .samples import run_samples_on

if TYPE_CHECKING:
    from penstock.batching.devices.rate_limiter import Claim, RateLimiter
    from penstock.batching.running.external_models import ExternalLoader
    from penstock.batching.spec import InstanceGroup, ModelSpec

logger = logging.getLogger("penstock.batching")

Instance = ThreadInstance | ExternalInstance


@dataclass(slots=True)
class Change:
    """A Model's next Instances: the spec that defines them, those that join, and those that end.

    Invariant: it is committed or abandoned, once. Threads: the event loop's.
    """

    model: Model
    spec: ModelSpec
    ended: list[Instance]
    added: list[Instance] = field(default_factory=list)

    def commit(self) -> list[asyncio.Task[None]]:
        """Apply the change. Returns: the shutdown tasks of idle Instances; the others may end later."""
        model, idle = self.model, [instance for instance in self.ended if instance.idle]
        for instance in self.ended:
            instance.retiring = True
        staying = [instance for instance in model.instances if not instance.retiring]
        with model.lock:
            self._assign_numbers(model)
            model.spec = self.spec
            # the first repairs the loop's device, and those that leave are woken last
            model.instances = [*staying, *self.added, *(each for each in model.instances if each.retiring)]
            self._move_sequences(model, staying)
            ends = [(instance, _stop_or_wait(model, instance)) for instance in self.ended]
            model.executors = [each.executor for each in model.instances if isinstance(each, ExternalInstance)]
            count = len(staying) + len(self.added)
            model.scheduler.resize(count, fast_ns(model.spec.policy.executor, count))
            if model.lost_loop_binding is not None:
                staying[0].request_loop_restore()
            if model.placements:
                self._update_placements(model)
            if model.scheduler.request_count:
                model.wake_one()  # an Instance that was woken for waiting requests may be one that ends
        text = "model %s version %s: %d instances kept, %d added, %d removed"
        logger.info(text, model.name, model.version, len(staying), len(self.added), len(self.ended))
        tasks = [asyncio.ensure_future(_end(model, instance, vacated)) for instance, vacated in ends]
        for task in tasks:
            model.shutdown_tasks.add(task)
            task.add_done_callback(model.shutdown_tasks.discard)
        pairs = zip(tasks, ends, strict=True)
        return [task for task, (instance, vacated) in pairs if instance in idle and vacated is None]

    def _assign_numbers(self, model: Model) -> None:
        used_numbers = {instance.number for instance in model.instances}
        free_numbers = (number for number in itertools.count() if number not in used_numbers)
        for instance, number in zip(self.added, free_numbers, strict=False):
            instance.number = number

    def _move_sequences(self, model: Model, staying: Sequence[Instance]) -> None:
        """Let sequences start on the current Instances, and have the event loop serve those that may."""
        scheduler, sequences = model.scheduler, model.scheduler.sequences
        if sequences is not None:
            current, now_ns = [*staying, *self.added], time.monotonic_ns()
            numbers = [instance.number for instance in current] if sequences.model_keeps_state else range(len(current))
            sequences.set_instances(numbers, now_ns)
            scheduler.expired += scheduler.expire(now_ns)
            model.notify_loop()

    def _update_placements(self, model: Model) -> None:
        used = dict.fromkeys(instance.placement for instance in model.thread_instances)
        model.placements += [placement for placement in used if placement not in model.placements]
        model.overlaps = any(instance.overlaps for instance in model.thread_instances)
        model.in_place_devices = devices_of(model, [binding for each in model.placements for binding in each.bindings])
        resize_shares(model.spec, model.placements)

    async def abandon(self) -> None:
        """End the Instances made for it."""
        for instance in self.added:
            with self.model.lock:
                instance.stop()
            await _end(self.model, instance)


async def make_change(
    model: Model, spec: ModelSpec, loaders: Mapping[str, Loader], external_loaders: Mapping[str, ExternalLoader],
    devices: Devices,
) -> Change | None:  # fmt: skip
    """Make the Instances that a Model lacks of a spec that is otherwise equal to the Model's.

    Returns: None if the Model must be opened anew. Raises: InferError, leaving nothing behind.
    """
    if model.ensemble is not None or not model.instances:
        return None
    if model.spec.backend in external_loaders:
        return await _external_change(model, spec, external_loaders[model.spec.backend], devices)
    change_task = asyncio.ensure_future(asyncio.to_thread(_thread_change, model, spec, loaders[spec.backend]))
    try:
        return await asyncio.shield(change_task)
    except asyncio.CancelledError:
        task = asyncio.ensure_future(_abandon_later(change_task))
        model.shutdown_tasks.add(task)
        task.add_done_callback(model.shutdown_tasks.discard)
        raise


async def _abandon_later(change_task: asyncio.Future[Change | None]) -> None:
    """End what a thread, which cannot be stopped, makes for nothing. The Model must not be closed before that."""
    await asyncio.wait([change_task])
    if change_task.exception() is None and (change := change_task.result()) is not None:
        await change.abandon()


def match_groups(old: Sequence[InstanceGroup], new: Sequence[InstanceGroup]) -> list[int | None]:
    """Return for each new Instance's group the index of the old one that stays for it, the first equal one, or None."""
    remaining = list(enumerate(old))
    matches: list[int | None] = []
    for group in new:
        equal = next((each for each in remaining if each[1] == group), None)
        if equal is not None:
            remaining.remove(equal)
        matches.append(None if equal is None else equal[0])
    return matches


# -- Instances on threads --------------------------------------------------------------------------------------------


def _thread_change(model: Model, spec: ModelSpec, loader: Loader) -> Change | None:
    """Make the Change of a model that runs in this process. It blocks while a device loads."""
    new_groups, old = single_groups(spec), [instance for instance in model.thread_instances if not instance.retiring]
    matches = match_groups([instance.group for instance in old], new_groups)
    staying = [instance for index, instance in enumerate(old) if index in matches]
    missing = [group for group, index in zip(new_groups, matches, strict=True) if index is None]
    if not _can_resize(model, spec, staying, missing):
        return None
    groups = [replace(group, devices=(device,)) for group in spec.instances for device in group.devices]
    if _model_keeps_state(model):
        groups = new_groups
    ended = [instance for instance in old if instance not in staying]
    added: list[ThreadInstance] = []
    try:
        for group in missing:
            added.append(_add_instance(model, group, [*staying, *added], loader))
    except BaseException:
        for instance in added:
            with model.lock:
                instance.stop()
            _end_thread(model, instance)
        raise
    return Change(model, replace(model.spec, instances=tuple(groups)), [*ended], [*added])


def _can_resize(
    model: Model, spec: ModelSpec, staying: Sequence[ThreadInstance], missing: Sequence[InstanceGroup]
) -> bool:
    """Whether everything that a Model has besides its Instances suits the new ones as well."""
    devices = {instance.placement.name for instance in staying}
    uses_loop = model.loop_binding is not None or model.lost_loop_binding is not None
    if not devices or not devices.issuperset(group.devices[0] for group in missing):
        return False
    places = [instance.placement for instance in staying]
    if uses_loop and (model.loop_placement not in places or needs_threads(spec, places[0].devices)):
        return False
    passive = any(group.passive for each in (model.spec, spec) for group in each.instances)
    # GPU memory per Instance depends on their number; after a CPU fallback the groups that run are not the spec's
    return not (passive or GPU_MEMORY in spec.options or model.spec.fallback_reason)


def _add_instance(
    model: Model, group: InstanceGroup, others: Sequence[ThreadInstance], loader: Loader
) -> ThreadInstance:
    """Make an Instance and get it ready, sharing a loaded model with its equals if they share. Raises: InferError."""
    device = group.devices[0]
    may_share = device == "cpu" and not _model_keeps_state(model)
    shareable = [each.placement for each in others if each.group == group] if may_share else []
    placement = shareable[0] if shareable else _load_placement(model, group, others, loader)
    claim_index = placement.add_claim() if shareable else 0
    name = f"{model.name}/{model.version}#{len(model.instances) + len(others)}"
    try:
        instance = ThreadInstance(model, placement, name, claim_index)
        instance.start()
    except BaseException:
        if shareable:
            placement.release((), placement.claims[claim_index] if placement.claims else None)
        else:
            placement.close()
        raise
    try:
        instance.run_on_thread(partial(_prepare_instance, model, instance))
    except BaseException:
        with model.lock:
            instance.stop()
        _end_thread(model, instance)
        raise
    return instance


def _prepare_instance(model: Model, instance: ThreadInstance) -> None:
    prepare(model, instance.bindings)
    run_samples_on(model, instance.bindings, len(model.instances))


def _load_placement(model: Model, group: InstanceGroup, others: Sequence[ThreadInstance], loader: Loader) -> Placement:
    """Load the model again on a device that it is on."""
    existing = next(each.placement for each in others if each.placement.name == group.devices[0])
    load = partial(loader, model.spec.path, existing.name, session_options(model.spec, existing.name))
    with pinned_to_cpus(existing.devices, group, existing.name):
        backend = load()
    placement = Placement(existing.name, backend, existing.device, existing.share, load)
    placement.owns_share = False
    try:
        placement.set_group(group, existing.devices)
    except BaseException:
        placement.close()
        raise
    placement.watch_loss(partial(model.on_backend_lost, placement))
    return placement


def _end_thread(model: Model, instance: ThreadInstance) -> None:
    """Wait for a stopped Instance, and release everything that only it uses."""
    placement = instance.placement
    instance.join()
    with model.lock:
        model.instances = [each for each in model.instances if each is not instance]
        if model.scheduler.request_count:
            model.wake_one()  # its last run may have released other sequences
        in_use = any(each.placement is placement for each in model.thread_instances)
        if not in_use:
            model.placements = [each for each in model.placements if each is not placement]
            successor = next((each for each in model.placements if each.share is placement.share), None)
            if successor is not None and placement.owns_share:
                successor.owns_share, placement.owns_share = True, False
            if model.placements:
                # the descriptions hold the session
                first = model.loop_placement.backend
                model.node_inputs, model.node_outputs = first.node_inputs, first.node_outputs
    placement.release(instance.bindings, instance.share)
    instance.bindings = []
    if not in_use:
        placement.close()


# -- Instances in other processes ------------------------------------------------------------------------------------


async def _external_change(model: Model, spec: ModelSpec, loader: ExternalLoader, devices: Devices) -> Change | None:
    """Make the Change of a model whose Batches run in other processes."""
    open_more = getattr(loader, "open_more", None)
    if open_more is None:
        return None
    groups, old = single_groups(spec), [instance for instance in model.instances if not instance.retiring]
    matches = match_groups([instance.group for instance in old], groups)
    missing = [index for index, match in enumerate(matches) if match is None]
    opened = await open_more(model.spec, spec, missing)
    claims: list[tuple[RateLimiter, Claim]] = []
    pairs = list(zip([groups[index] for index in missing], opened.executors, strict=True))
    try:
        await run_samples(model, opened.executors)
        added = make_instances(model, pairs, devices, claims)
    except BaseException:
        for limiter, claim in claims:
            limiter.leave(claim)
        await asyncio.gather(*(each.close() for each in opened.executors))
        raise
    return Change(model, opened.spec, [each for index, each in enumerate(old) if index not in matches], [*added])


def _model_keeps_state(model: Model) -> bool:
    """Whether each Instance remembers sequences itself."""
    sequences = model.scheduler.sequences
    return sequences is not None and sequences.model_keeps_state


def _stop_or_wait(model: Model, instance: Instance) -> asyncio.Event | None:
    """Stop an Instance, unless sequences continue there and nowhere else. Call with the model's lock held.

    Returns: the event that is set when the last of those is over.
    """
    sequences = model.scheduler.sequences
    if sequences is None or not sequences.model_keeps_state or not sequences.has_sequences_at(instance.number):
        instance.stop()
        return None
    vacated = asyncio.Event()
    sequences.on_vacated[instance.number] = partial(asyncio.get_running_loop().call_soon_threadsafe, vacated.set)
    return vacated


async def _end(model: Model, instance: Instance, vacated: asyncio.Event | None = None) -> None:
    """End an Instance once it has delivered everything it took, and the sequences that it remembers are over."""
    if vacated is not None:
        await vacated.wait()
        with model.lock:
            instance.stop()
            model.wake_one()
    if isinstance(instance, ThreadInstance):
        end = partial(_end_thread, model, instance)
        await asyncio.to_thread(end_with_timeout, model.name, [instance.placement.name], end)
        return
    await instance.wait_drained()
    instance.join()
    with model.lock:
        model.instances = [each for each in model.instances if each is not instance]
    model.executors = [each for each in model.executors if each is not instance.executor]
    await instance.executor.close()


async def close(model: Model) -> None:
    """End a Model, after those of its Instances that are already ending. Nothing may wait or run there."""
    sequences = model.scheduler.sequences
    for callback in () if sequences is None else [*sequences.on_vacated.values()]:
        callback()
    for error in filter(None, await asyncio.gather(*model.shutdown_tasks, return_exceptions=True)):
        logger.error("model %s: an instance could not be removed", model.name, exc_info=error)
    await asyncio.to_thread(close_model, model)
    await close_executors(model)
