"""Opening: from a ModelSpec to a Model that runs. Called by the Engine, on a thread of its own: it blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.backends.backend import Backend, Loader

from . import warmup
from .batch import Batch
from .completion import complete
from .model import Model
from .spec import ModelSpec


def open_model(spec: ModelSpec, loader: Loader, finished: Callable[[Model, list[Batch]], None]) -> Model:
    """Load a model on its devices, complete its spec, start its Instances, and warm it up.

    Raises: InferError when the file, its configuration or the runtime is at fault.
    """
    backends: list[Backend] = []
    try:
        spec = _load_on_devices(spec, loader, backends)
        model = Model(spec, backends, finished)
        model.open()
    except BaseException:
        for backend in backends:
            backend.close()
        raise
    warmup.sweep(model)
    return model


def _load_on_devices(spec: ModelSpec, loader: Loader, backends: list[Backend]) -> ModelSpec:
    """Load the model once per device into `backends`; give the spec completed, with one instance group per device."""
    groups = []
    for group in spec.instances:
        for device in group.devices:
            backends.append(loader(spec.path, device, spec.options))
            groups.append(replace(group, devices=(device,)))
    return replace(complete(spec, backends[0].graph), instances=tuple(groups))
