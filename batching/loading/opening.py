"""Opening: from a ModelSpec to a running Model, and closing it. Called by the Engine on other threads: it blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

from penstock.backends.backend import Backend, Loader, compiles_each_size, is_stateful, shared_scale, supports_trimming
from penstock.backends.errors import Code, InferError
from penstock.batching.devices.fallback import can_fall_back, moved_to_cpu
from penstock.batching.devices.memory import trim_heap
from penstock.batching.devices.placement import Devices, backend_groups, pinned_to_cpus
from penstock.batching.model import Model
from penstock.batching.running.batch import Batch
from penstock.batching.shapes.bound import configured_signature, reshaped_signature
from penstock.batching.spec import THREADS_OPTION, InstanceGroup, ModelSpec

from . import warmup
from .completion import complete
from .counting import GPU_MEMORY, Trial, count_instances
from .freeing import free_rows
from .invariance import set_invariant_size
from .mixing import find_mixing
from .preparing import release_caches
from .rowwise import rows_unspecified, without_rows
from .run_sizes import with_run_sizes
from .samples import run_samples

logger = logging.getLogger("penstock.batching")


def open_model(
    spec: ModelSpec,
    loaders: Mapping[str, Loader],
    on_finished: Callable[[Model, list[Batch]], None],
    devices: Devices | None = None,
) -> Model:
    """Load a model on its devices, complete its spec, start its Instances, and warm it up.

    `devices` are those shared with other models, by name; missing ones are added.
    Raises: InferError if the file, its configuration or the runtime is at fault, leaving nothing behind.
    """
    start, configured, devices = time.monotonic(), spec, Devices() if devices is None else devices
    loader = loaders.get(spec.backend)
    if loader is None:
        known = ", ".join(sorted(loaders))
        raise InferError(Code.INVALID, f"unknown backend '{spec.backend}' for model '{spec.name}', known: {known}")
    backends: list[Backend] = []
    try:
        spec, trials = _load_or_fall_back(spec, loader, backends, devices)
        spec = set_invariant_size(spec, _one_per_group(spec, backends))
        model = Model(spec, backends, on_finished, devices, partial(_reload, spec, loader))
        model.instance_trials = tuple((trial.split.count, trial.rows_per_s) for trial in trials)
        model.open()
    except BaseException:
        for backend in backends:
            backend.close()
        trim_heap()
        raise
    try:
        warmup.prepare_all(model)
        run_samples(model)
        reason = "" if model.passive else warmup.sweep(model)
        if not reason and not model.passive and rows_unspecified(configured):
            reason = find_mixing(model, shares_scale=bool(shared_scale(backends[0])))
    except BaseException:
        close_model(model)
        raise
    if reason and rows_unspecified(configured):
        logger.info(
            "model %s: its first axis is not a batch axis, and requests run one at a time: %s", spec.name, reason
        )
        close_model(model)
        return open_model(without_rows(configured), loaders, on_finished, devices)
    if reason:
        text = "model %s: its configuration gives it rows, but %s; its requests may fail unless max_batch_size is 0"
        logger.warning(text, spec.name, reason)
    # an Instance does this itself when idle, the loop never does
    release_caches(model, filter(supports_trimming, (model.loop_binding,)))
    model.load_s = time.monotonic() - start
    return model


def open_ensemble(spec: ModelSpec) -> Model:
    """Make the Model of an ensemble from its configuration alone. Raises: InferError."""
    return Model(complete_ensemble(spec), (), lambda *_: None)


def complete_ensemble(spec: ModelSpec) -> ModelSpec:
    """Complete an ensemble's spec. Raises: InferError."""
    for tensor in (*spec.inputs, *spec.outputs):
        if not tensor.is_tensor:
            raise InferError(Code.INVALID, f"tensor '{tensor.name}' of ensemble '{spec.name}' has no datatype")
    if not spec.inputs or not spec.outputs:
        raise InferError(Code.INVALID, f"ensemble '{spec.name}' must declare its inputs and outputs")
    signature = configured_signature(spec)
    policy = replace(spec.policy, max_batch_rows=spec.policy.max_batch_rows or 0)
    return replace(
        spec, signature=signature, binding_signature=reshaped_signature(signature), policy=policy, instances=()
    )


def close_model(model: Model) -> None:
    """Stop a model and free all it has. Blocks until its current runs have ended."""
    model.close()
    trim_heap()


def _load_or_fall_back(
    spec: ModelSpec, loader: Loader, backends: list[Backend], devices: Devices
) -> tuple[ModelSpec, list[Trial]]:
    """Load the model on its devices, or on the CPU if none is usable and it may. As `_load_on_devices`."""
    try:
        return _load_on_devices(spec, loader, backends, devices)
    except InferError as error:
        if not can_fall_back(spec, error):
            raise
        while backends:
            backends.pop().close()
        logger.warning("model '%s' falls back to the CPU: %s", spec.name, error.message)
        return _load_on_devices(moved_to_cpu(spec, error.message), loader, backends, devices)


def _load_on_devices(
    spec: ModelSpec, loader: Loader, backends: list[Backend], devices: Devices
) -> tuple[ModelSpec, list[Trial]]:
    """Load the model into `backends`: once per group and device, or once per Instance if they share no session.

    Returns: the completed spec and the Trials made if the number of Instances was to be found. The spec has one
    instance group per device, or one per Instance if each remembers sequences itself. If Instances were counted on the
    only device, the spec's options include the number of threads.
    """
    groups: list[InstanceGroup] = []
    trials: list[Trial] = []
    threads = spec.threads or None
    if threads is None and sum(len(group.devices) for group in spec.instances) > 1:
        threads = 0  # there is one thread setting for all devices, so nothing can be divided
    for group in spec.instances:
        for device in group.devices:
            count = group.count
            with pinned_to_cpus(devices, group, device):
                if not count:
                    load = partial(_load, spec, loader, device)
                    split, loaded, device_trials = count_instances(spec, device, load, threads)
                    count, spec = split.count, _with_threads(spec, split.threads)
                    trials += device_trials
                else:
                    loaded = [loader(spec.path, device, session_options(spec, device))]
                first = loaded[0]
                if spec.frees_rows and not backends:
                    spec, first = free_rows(spec, loader, device, first)
                backends.append(first)
                device_group = replace(group, count=count, devices=(device,))
                keeps_state = spec.sequence is not None and is_stateful(first) and not group.passive
                groups += [replace(device_group, count=1)] * count if keeps_state else [device_group]
                backends += loaded[1:] if first is loaded[0] else _close_all(loaded[1:])
                for _ in range(len(backends), len(backend_groups(groups))):
                    backends.append(loader(spec.path, device, session_options(spec, device)))
    completed = replace(complete(spec, backends[0].graph), instances=tuple(groups))
    return with_run_sizes(completed, compiled=compiles_each_size(backends[0])), trials


def _load(spec: ModelSpec, loader: Loader, device: str, threads: int) -> Backend:
    return loader(spec.path, device, _with_threads(spec, threads).options)


def _reload(spec: ModelSpec, loader: Loader, position: int) -> Backend:
    """Load a completed model again on one of its devices."""
    (device,) = backend_groups(spec.instances)[position].devices
    return loader(spec.path, device, session_options(spec, device))


def session_options(spec: ModelSpec, device: str) -> Mapping[str, str]:
    """Return the options of one session: the GPU memory limit of a model is divided by its sessions there."""
    memory_bytes = spec.options.get(GPU_MEMORY)
    count = sum(group.count for group in spec.instances if device in group.devices)
    if memory_bytes is None or count < 2:
        return spec.options
    return {**spec.options, GPU_MEMORY: str(int(memory_bytes) // count)}


def _one_per_group(spec: ModelSpec, backends: Sequence[Backend]) -> list[Backend]:
    """Return the first Backend of each group; the others are copies."""
    firsts = accumulate((len(backend_groups([group])) for group in spec.instances[:-1]), initial=0)
    return [backends[position] for position in firsts]


def _close_all(backends: Sequence[Backend]) -> list[Backend]:
    for backend in backends:
        backend.close()
    return []


def _with_threads(spec: ModelSpec, threads: int) -> ModelSpec:
    return replace(spec, options={**spec.options, THREADS_OPTION: str(threads)}) if threads else spec
