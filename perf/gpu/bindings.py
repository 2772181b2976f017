"""Bindings: what `backends/onnx_cuda_binding.py` assumes about ONNX Runtime, tested on the device itself.

These assumptions come from reading ONNX Runtime's sources, and were tried on a fake CUDA that computes nothing. If a
Row here fails, fix that before you look at a rate.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

from penstock.backends.backend import (
    Array,
    Backend,
    Binding,
    OverlappingBinding,
    supports_overlap,
    supports_preparation,
)
from penstock.backends.loading import load_onnx
from penstock.backends.onnx_cuda import CudaBackend
from penstock.batching.loading.completion import complete

from .context import KINDS, CheckContext
from .correct import TOLERANCE, max_error, on_cpu
from .engine_driver import LoadOptions, spec_of
from .models import FP16, Tensor, Variant, bf16_to_fp32
from .rows import Row, at_least, at_most, failed

ROWS, TRIES = 8, 5
LARGE: Mapping[str, int] = MappingProxyType({"cnn": 128, "encoder": 128, "mlp": 4096})
"""Enough rows that the device computes for longer than queuing the run takes; with few rows the host is slower."""
_PART = "bindings"
NO_GRAPHS: Mapping[str, str] = MappingProxyType({})


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the findings for each model, with graphs and without."""
    for kind in KINDS:
        variant = context.variant(kind, FP16)
        graphs = {"penstock.gpu_graphs": "1", "penstock.rows": f"{ROWS},{LARGE[kind]}"}
        for name, options in ((", graphs", graphs), ("", NO_GRAPHS))[0 if context.on_gpu else 1 :]:
            try:
                yield from _check_variant(context, variant, name, options)
            except Exception as error:  # noqa: BLE001 - the other models may do
                yield failed(_PART, f"{variant.name}{name}", error)


def _check_variant(context: CheckContext, variant: Variant, name: str, options: Mapping[str, str]) -> Iterator[Row]:
    backend = load_onnx(context.file(variant), context.device, options)
    try:
        first_binding, second_binding = (bind_rows(context, variant, backend, ROWS) for _ in range(2))
        inputs = draw_inputs(backend, variant, 2 * ROWS)
        feeds = [[each[start : start + ROWS] for each in inputs] for start in (0, ROWS)]
        if isinstance(backend, CudaBackend):
            yield from (
                _graph_rows(variant, backend, (first_binding, second_binding), feeds)
                if options
                else _placement_rows(variant, backend)
            )
        expected = on_cpu(context, context.variant(variant.kind, "fp32"), 2 * ROWS)
        error = run_alternately(first_binding, second_binding, feeds, expected, variant)
        yield at_most(_PART, f"{variant.name}: two under way, off by at most{name}", error, TOLERANCE[FP16])
        if supports_overlap(first_binding):
            rows = LARGE[variant.kind]
            large, feed = bind_rows(context, variant, backend, rows), draw_inputs(backend, variant, rows)
            prepare(large, feed)
            if supports_overlap(large):  # as all Bindings of a Backend do, or none
                yield context.judged(_early_return_rows(variant, name, count_early_returns(large, feed)))
    finally:
        backend.close()


def bind_rows(context: CheckContext, variant: Variant, backend: Backend, rows: int) -> Binding:
    """Bind this many rows, as an Engine would."""
    spec = complete(spec_of(context, variant, LoadOptions(rows)), backend.graph)
    signature = spec.binding_signature or spec.signature
    if signature is None:
        raise ValueError("the spec must be completed first")
    return backend.bind(signature, rows)


def draw_inputs(backend: Backend, variant: Variant, rows: int) -> list[Array]:
    """Draw rows of input, in the order of the model's inputs."""
    inputs = variant.inputs(rows)
    return [inputs[tensor.name] for tensor in backend.graph.inputs]


def _graph_rows(
    variant: Variant, backend: CudaBackend, bindings: tuple[Binding, Binding], feeds: list[list[Array]]
) -> Iterator[Row]:
    for binding, feed in zip(bindings, feeds, strict=True):
        prepare(binding, feed)
    yield at_least(_PART, f"{variant.name}: graphs captured", backend.graphs, 2)


def _placement_rows(variant: Variant, backend: CudaBackend) -> Iterator[Row]:
    for label, names in (("nodes on the CPU", backend.cpu_nodes), ("tensors on the host", backend.host_tensors)):
        value = "not told" if names is None else len(names)
        yield Row(_PART, f"{variant.name}: {label}", value, "", "0", names == (), ", ".join(names or ())[:200])


def _early_return_rows(variant: Variant, name: str, tries: int) -> Row:
    label = f"{variant.name}: begin returns before the device is done{name}"
    return at_least(_PART, label, tries, TRIES // 2 + 1, f"of {TRIES}", f"{LARGE[variant.kind]} rows")


def fill(binding: Binding, feed: list[Array]) -> None:
    """Fill the buffers that the Binding lends."""
    for buffer, values in zip(binding.acquire_buffers(len(feed[0]), [each.shape for each in feed]), feed, strict=True):
        if buffer is not None:
            np.copyto(buffer, values)


def prepare(binding: Binding, feed: list[Array]) -> None:
    """Capture the graph for this many rows, if the session uses graphs."""
    fill(binding, feed)
    if supports_preparation(binding):
        binding.prepare(len(feed[0]), [each.shape for each in feed])


def run_alternately(
    first: Binding, second: Binding, feeds: list[list[Array]], expected: Tensor, variant: Variant
) -> float:  # fmt: skip
    """Run both at once, a few times; return the greatest deviation of their answers."""
    max_deviation = 0.0
    for _ in range(TRIES):
        for binding, feed in zip((first, second), feeds, strict=True):
            fill(binding, feed)
            if supports_overlap(binding):
                binding.begin((0,))
        for index, binding in enumerate((first, second)):
            (answer,) = binding.end() if supports_overlap(binding) else binding.run((0,))
            expected_rows = expected[index * ROWS : (index + 1) * ROWS]
            max_deviation = max(
                max_deviation, max_error(bf16_to_fp32(np.asarray(answer), variant.precision), expected_rows)
            )
    return max_deviation


def count_early_returns(binding: OverlappingBinding, feed: list[Array]) -> int:
    """Count how often `begin` takes less than half the device's time, or returns while the device still computes."""
    early_returns = 0
    for _ in range(TRIES):
        fill(binding, feed)
        start_ns = time.perf_counter_ns()
        binding.begin((0,))
        took_ns = time.perf_counter_ns() - start_ns
        still = not getattr(binding, "is_done", lambda: True)()
        binding.end()
        early_returns += still or took_ns * 2 < binding.device_ns
    return early_returns
