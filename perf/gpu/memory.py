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
    device, host, why = uvloop.run(_taken(context, loads))
    for name, taken in (("device", device), ("process", host)):
        if taken:
            note = f"{len(taken)} loads and unloads, from {taken[0] / _MIB:.0f} to {taken[-1] / _MIB:.0f} MiB"
            yield at_most("memory", f"{name} memory, each load", slope(taken[SKIPPED:]) / _MIB, MAX_MIB, "MiB", note)
    if why:
        yield failed("memory", f"load {len(host) + 1}", why)


def slope(taken: Sequence[float]) -> float:
    """Fit a line; return its slope by position, 0 with fewer than two points."""
    if len(taken) < 2:
        return 0.0
    return float(np.polyfit(np.arange(len(taken)), taken, 1)[0])


async def _taken(context: CheckContext, loads: int) -> tuple[list[float], list[float], str]:
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
