"""CUDA graphs: one caller, batches up to where graphs cease to pay, with graphs and without; and what graphs cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import uvloop

from penstock.backends.cuda import find_runtime, unavailable_reason
from penstock.backends.loading import load_onnx
from penstock.backends.onnx_cuda_binding import CudaBinding

from .bindings import bind_rows, draw_inputs, fill, prepare
from .context import CheckContext
from .engine_driver import DriveResult, LoadOptions, drive, inputs_of, served
from .models import FP16, Variant
from .rows import Row, failed

BATCHES = (1, 4, 16, 64)
CAPTURED = (*BATCHES, 8)
KINDS = ("encoder", "mlp", "cnn")
_WITHOUT: Mapping[str, str] = MappingProxyType({"penstock.gpu_graphs": "0"})
_WITH: Mapping[str, str] = MappingProxyType(
    {"penstock.gpu_graphs": "1", "penstock.rows": ",".join(map(str, sorted(CAPTURED)))}
)
_SECONDS = 0.25
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _Measured:
    """One load: how long it took, and what a caller measured, by rows."""

    load_s: float
    driven: Mapping[int, DriveResult]


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the memory that graphs take for each model, and its median latency by batch, without graphs and with."""
    for kind in KINDS:
        variant = context.variant(kind, FP16)
        if context.on_gpu:  # first: what libraries allocate in the first run of all must not count for a load below
            try:
                yield _graph_memory_row(context, variant)
            except Exception as error:  # noqa: BLE001 - they may do in an Engine
                yield failed("graphs", f"{variant.name}: memory of the graphs", error)
        seen_by_setting: dict[str, _Measured] = {}
        for setting, options in (("without", _WITHOUT), ("with", _WITH)):
            try:
                seen_by_setting[setting] = uvloop.run(_drive_batches(context, variant, options))
            except Exception as error:  # noqa: BLE001 - the other models may do
                yield failed("graphs", f"{variant.name}: {setting} graphs", error)
        yield from _rows(variant, seen_by_setting)


def _graph_memory_row(context: CheckContext, variant: Variant) -> Row:
    """Capture the graphs of a Binding that has run each size: only they then change the free memory."""
    runtime = find_runtime()
    if runtime is None:
        raise RuntimeError(unavailable_reason())
    backend = load_onnx(context.file(variant), context.device, _WITH)
    try:
        binding, inputs = (
            bind_rows(context, variant, backend, max(CAPTURED)),
            draw_inputs(backend, variant, max(CAPTURED)),
        )
        if not isinstance(binding, CudaBinding):
            raise TypeError(f"{type(binding).__name__} captures no graphs")
        feeds = [[each[:rows] for each in inputs] for rows in sorted(CAPTURED, reverse=True)]
        for feed in feeds:
            fill(binding, feed)
            binding.run((0,))
        free_bytes, began_s = runtime.memory_info(0)[0], time.monotonic()
        for feed in feeds:
            prepare(binding, feed)
        took_s, taken_mib = time.monotonic() - began_s, (free_bytes - runtime.memory_info(0)[0]) / _MIB
        note = f"{binding.graphs} graphs of one Binding, captured in {took_s:.2f} s; an Instance has two Bindings"
        passed = binding.graphs == len(CAPTURED)
        return Row("graphs", f"{variant.name}: memory of the graphs", taken_mib, "MiB", held=passed, note=note)
    finally:
        backend.close()


def _rows(variant: Variant, seen_by_setting: Mapping[str, _Measured]) -> Iterator[Row]:
    for setting, measured in seen_by_setting.items():
        note = f"{len(CAPTURED)} sizes of two Bindings are captured" if setting == "with" else ""
        yield Row("graphs", f"{variant.name}: load, {setting} graphs", measured.load_s, "s", note=note)
    for rows in BATCHES:
        times = {setting: measured.driven[rows].ms(0.5) for setting, measured in seen_by_setting.items()}
        for setting, took_ms in times.items():
            gain_text = (
                f"{times['without'] / took_ms:.2f} times as fast" if setting == "with" and "without" in times else ""
            )
            yield Row("graphs", f"{variant.name}: batch {rows}, {setting} graphs, p50", took_ms, "ms", note=gain_text)


async def _drive_batches(context: CheckContext, variant: Variant, options: Mapping[str, str]) -> _Measured:
    async with served(context, variant, LoadOptions(max(BATCHES), options=options)) as (engine, model):
        load_s, driven_by_rows = model.load_s, {}
        for rows in BATCHES:
            feed = inputs_of(model, variant.inputs(rows))
            driven_by_rows[rows] = await drive(engine, model, feed, 1, context.seconds(_SECONDS))
        return _Measured(load_s, driven_by_rows)
