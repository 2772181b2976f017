"""Fallback: a model that asks for a GPU and may run on the CPU where none works, as its configuration allows.

Called by opening.py, and by whoever loads a model only to look at it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import InstanceGroup

if TYPE_CHECKING:
    from penstock.batching.spec import ModelSpec

logger = logging.getLogger("penstock.batching")

CPU_FALLBACK = "penstock.cpu_fallback"
"""The option, "1", of a model that may."""


def falls_back(spec: ModelSpec, error: InferError) -> bool:
    """Tell whether a model that could not be loaded is to be loaded on the CPU: the device cannot be had at all."""
    on_gpu = any(device != "cpu" for group in spec.instances for device in group.devices)
    return on_gpu and error.code is Code.UNSUPPORTED and spec.options.get(CPU_FALLBACK) == "1"


def on_cpu(spec: ModelSpec, reason: str) -> ModelSpec:
    """Put a model on the CPU that asked for a GPU, and log why."""
    logger.warning("model '%s' runs on the CPU: %s", spec.name, reason)
    return moved(spec, reason)


def moved(spec: ModelSpec, reason: str) -> ModelSpec:
    """Give the spec of a model whose groups on GPUs are one Instance on the CPU; those that it has there stay."""
    asked = next(group for group in spec.instances if group.devices != ("cpu",))
    said = [replace(group, devices=("cpu",)) for group in spec.instances if "cpu" in group.devices]
    groups = (InstanceGroup(1, number=asked.number), *said)
    return replace(spec, instances=groups, fallback=reason)
