"""Fallback: a model configured for a GPU runs on the CPU if none works and its configuration allows that.

Used by opening.py, and by code that loads a model only to inspect it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.batching.spec import InstanceGroup

if TYPE_CHECKING:
    from penstock.batching.spec import ModelSpec

CPU_FALLBACK = "penstock.cpu_fallback"
"""The option that allows it if set to "1"."""


def can_fall_back(spec: ModelSpec, error: InferError) -> bool:
    """Whether to load a model on the CPU after a failure: no GPU is usable, and the option is set."""
    on_gpu = any(device != "cpu" for group in spec.instances for device in group.devices)
    return on_gpu and error.code is Code.UNSUPPORTED and spec.options.get(CPU_FALLBACK) == "1"


def moved_to_cpu(spec: ModelSpec, reason: str) -> ModelSpec:
    """Return the spec with its GPU groups replaced by one Instance on the CPU; its groups on the CPU stay."""
    gpu_group = next(group for group in spec.instances if group.devices != ("cpu",))
    cpu_groups = [replace(group, devices=("cpu",)) for group in spec.instances if "cpu" in group.devices]
    groups = (InstanceGroup(1, number=gpu_group.number), *cpu_groups)
    return replace(spec, instances=groups, fallback_reason=reason)
