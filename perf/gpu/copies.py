"""Copies: whether copying the next batch in and the last one out overlaps with computing, as CUPTI sees it.

PyTorch's profiler records every kernel and copy of the process, including ONNX Runtime's. On a machine without PyTorch
a Row says so, and then only rates show the overlap (engine.py, with one Binding and with two).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from .context import CheckContext
from .engine import ROWS_EACH
from .engine_driver import REQUESTS_PER_BATCH, LoadOptions, drive, inputs_of, served
from .models import FP16, Variant
from .rows import Row, at_least, failed

COVERED, BUSY = 0.5, 0.9
"""The share of copy time that should overlap with kernels, and the share of time that kernels should run."""
_SECONDS = 0.4
Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class DeviceSpans:
    """When kernels, copies in and copies out ran. Units: microseconds."""

    kernels: Sequence[Span]
    copies_in: Sequence[Span]
    copies_out: Sequence[Span]


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the share of copies that overlapped with kernels, and how busy the device was, for each model."""
    if not context.on_gpu:
        yield Row("copies", "profile", "not made", note="there is no device whose copies could be seen")
        return
    for kind in ("cnn", "encoder"):
        variant = context.variant(kind, FP16)
        try:
            spans = read(json.loads(uvloop.run(_profile_run(context, variant)).read_text("utf-8")))
            yield from _rows(variant, spans)
        except ImportError as error:
            yield Row("copies", "profile", "not made", note=str(error))
            return
        except Exception as error:  # noqa: BLE001 - the other models may do
            yield failed("copies", variant.name, error)


def _rows(variant: Variant, spans: DeviceSpans) -> Iterator[Row]:
    computing = merge_spans(spans.kernels)
    for direction, copies in (("in", spans.copies_in), ("out", spans.copies_out)):
        if not copies:
            yield failed("copies", f"{variant.name}: copies {direction}", "none was seen")
            continue
        long_us, label = sum(end - begin for begin, end in copies), f"{variant.name}: copies {direction} under kernels"
        covered_share = overlap_share(copies, computing)
        note = f"{len(copies)} copies, {long_us / len(copies):.0f} us each"
        yield (
            at_least("copies", label, covered_share, COVERED, note=note)
            if direction == "in"
            else Row("copies", label, covered_share, note=note)
        )
    if computing:
        whole_us = computing[-1][1] - computing[0][0]
        busy = sum(end - begin for begin, end in computing) / max(whole_us, 1e-9)
        yield at_least("copies", f"{variant.name}: share of the time that kernels run", busy, BUSY)


async def _profile_run(context: CheckContext, variant: Variant) -> Path:
    from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found, unused-ignore]

    rows, path = ROWS_EACH[variant.kind], context.folder / f"{variant.name}.trace.json"
    load_options = LoadOptions(context.best_rows(variant))
    async with served(context, variant, load_options) as (engine, model):
        feed, callers = inputs_of(model, variant.inputs(rows)), max(REQUESTS_PER_BATCH * load_options.rows // rows, 2)
        await drive(engine, model, feed, callers, context.seconds(_SECONDS))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            await drive(engine, model, feed, callers, context.seconds(_SECONDS))
    profiler.export_chrome_trace(str(path))
    return path


def read(trace: Mapping[str, Any]) -> DeviceSpans:
    """Sort the events of a trace in Chrome's format: kernels, and copies by direction."""
    kernels: list[Span] = []
    transports: dict[str, list[Span]] = {"HtoD": [], "DtoH": []}
    for event in trace.get("traceEvents", ()):
        if "dur" not in event or "ts" not in event:
            continue
        span = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        if event.get("cat") == "kernel":
            kernels.append(span)
        elif event.get("cat") == "gpu_memcpy":
            for transport, spans in transports.items():
                if transport in event.get("name", ""):
                    spans.append(span)
    return DeviceSpans(kernels, transports["HtoD"], transports["DtoH"])


def merge_spans(spans: Sequence[Span]) -> list[Span]:
    """Merge spans that touch; ascending."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def overlap_share(spans: Sequence[Span], covering: Sequence[Span]) -> float:
    """Return the share of the time of `spans` that lies within `covering`, which is merged; 0 if there is no time."""
    total = covered_us = 0.0
    index = 0
    for begin, end in sorted(spans):
        total += end - begin
        while index < len(covering) and covering[index][1] <= begin:
            index += 1
        number = index
        while number < len(covering) and covering[number][0] < end:
            covered_us += max(min(end, covering[number][1]) - max(begin, covering[number][0]), 0.0)
            number += 1
    return covered_us / total if total else 0.0
