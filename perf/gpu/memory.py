"""Memory: what stays allocated on the device and in the process after 50 loads and unloads of a model that ran."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import uvloop

from penstock.backends.cuda import find_runtime
from penstock.perf import processes

from .context import CheckContext
from .engine_driver import LoadOptions, inputs_of, served
from .models import FP16
from .rows import Row, at_most, failed

LOADS, SKIPPED = 50, 10
"""How many loads, and how many of the first are not counted: libraries keep some memory from their first use."""
MAX_MIB = 1.0
"""What each load may leave behind on average; allocators do not return memory to the byte."""
_MIB = 1 << 20


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the slope of both, in MiB per load."""
    loads = 15 if context.quick else LOADS
    device, host, reason = uvloop.run(_memory_by_load(context, loads))
    for name, used_mib in (("device", device), ("process", host)):
        if used_mib:
            note = f"{len(used_mib)} loads and unloads, from {used_mib[0] / _MIB:.0f} to {used_mib[-1] / _MIB:.0f} MiB"
            yield at_most("memory", f"{name} memory, each load", slope(used_mib[SKIPPED:]) / _MIB, MAX_MIB, "MiB", note)
    if reason:
        yield failed("memory", f"load {len(host) + 1}", reason)


def slope(used_mib: Sequence[float]) -> float:
    """Fit a line; return its slope by position, 0 with fewer than two points."""
    if len(used_mib) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(used_mib)), used_mib, 1)[0])


async def _memory_by_load(context: CheckContext, loads: int) -> tuple[list[float], list[float], str]:
    variant = context.variant("mlp", FP16)
    runtime = find_runtime() if context.on_gpu else None
    device: list[float] = []
    host: list[float] = []
    try:
        for _ in range(loads):
            async with served(context, variant, LoadOptions(8)) as (engine, model):
                await engine.infer(model, inputs_of(model, variant.inputs(8)))
            if runtime is not None:
                free, total = runtime.memory_info(0)
                device.append(float(total - free))
            host.append(float(processes.rss_bytes(os.getpid())))
            if context.remaining_s() < 2:
                return device, host, "no time was left for more"
    except Exception as error:  # noqa: BLE001 - what was seen before it counts
        return device, host, f"{type(error).__name__}: {error}"
    return device, host, ""
