"""Opening: from a ModelSpec to a Model that runs, and closing. Called by the Engine on other threads: it blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.backends.backend import Backend, Loader
from penstock.backends.errors import Code, InferError

from . import warmup
from .batch import Batch
from .completion import complete
from .memory import give_back
from .model import Model
from .spec import ModelSpec


def open_model(spec: ModelSpec, loaders: Mapping[str, Loader], finished: Callable[[Model, list[Batch]], None]) -> Model:
    """Load a model on its devices, complete its spec, start its Instances, and warm it up.

    Raises: InferError when the file, its configuration or the runtime is at fault. Nothing is left behind then.
    """
    start = time.monotonic()
    loader = loaders.get(spec.backend)
    if loader is None:
        known = ", ".join(sorted(loaders))
        raise InferError(Code.INVALID, f"unknown backend '{spec.backend}' for model '{spec.name}', known: {known}")
    backends: list[Backend] = []
    try:
        spec = _load_on_devices(spec, loader, backends)
        model = Model(spec, backends, finished)
        model.open()
    except BaseException:
        for backend in backends:
            backend.close()
        give_back()
        raise
    try:
        warmup.sweep(model)
    except BaseException:
        close_model(model)
        raise
    give_back()
    model.load_s = time.monotonic() - start
    return model


def close_model(model: Model) -> None:
    """Stop a model and free all it has. Blocks until the runs under way have ended."""
    model.close()
    give_back()


def _load_on_devices(spec: ModelSpec, loader: Loader, backends: list[Backend]) -> ModelSpec:
    """Load the model once per device into `backends`; give the spec completed, with one instance group per device."""
    groups = []
    for group in spec.instances:
        for device in group.devices:
            backends.append(loader(spec.path, device, spec.options))
            groups.append(replace(group, devices=(device,)))
    return replace(complete(spec, backends[0].graph), instances=tuple(groups))
