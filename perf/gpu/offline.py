"""Offline: ONNX Runtime alone in a tight loop with IO binding, rows/s by batch size: the reference for all else.

`on the device`: inputs and outputs stay there, and runs are queued without waiting for each, which gives the device's
greatest rate. `with host copies`: every run copies its input from the host and its output back, one run after another.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.backends.cuda import find_runtime, unavailable_reason

from .context import CheckContext, best_batch, best_rate
from .models import Tensor, Variant
from .rows import Row, at_most, failed

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS, _MIN_RUNS, _WARM_RUNS = 0.3, 4, 2
_NEAR = 0.98
"""The smallest batch that reaches this fraction of the greatest rate is preferred: its answers come sooner."""


def report(context: CheckContext) -> Iterator[Row]:
    """Yield the rate of each model at each batch size, its best batch, and the rate of that batch with host copies."""
    batches = BATCHES[:3] if context.quick else BATCHES
    for kind, precision in context.measured():
        variant = context.variant(kind, precision)
        try:
            yield from _swept(context, variant, batches)
        except Exception as error:  # noqa: BLE001 - the other models may do
            yield failed("offline", variant.name, error)


@dataclass(frozen=True, slots=True)
class Session:
    """A model in ONNX Runtime, with Penstock's provider options. `wait`: until all runs have ended."""

    runtime: Any
    kind: str
    wait: Callable[[], None]


def session_of(context: CheckContext, variant: Variant) -> Session:
    """Load a model as Penstock would, but without Penstock. Raises: RuntimeError if the device is not available."""
    import onnxruntime

    from penstock.backends import onnx_providers

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    chosen: list[Any] = [onnx_providers.CPU]
    wait: Callable[[], None] = _nothing
    if context.on_gpu:
        runtime = find_runtime()
        if runtime is None:
            raise RuntimeError(unavailable_reason())
        onnx_providers.check_provider(onnx_providers.CUDA)
        stream = runtime.create_stream(0)
        chosen = [(onnx_providers.CUDA, onnx_providers.cuda_options(0, {}, stream, graphs=False))]
        wait = partial(runtime.synchronize_stream, stream)
    session = onnxruntime.InferenceSession(str(context.file(variant)), options, providers=chosen, enable_fallback=0)
    if context.on_gpu and session.get_providers()[0] != onnx_providers.CUDA:
        raise RuntimeError(f"ONNX Runtime did not start CUDA: {onnx_providers.start_failure(onnx_providers.CUDA)}")
    return Session(session, "cuda" if context.on_gpu else "cpu", wait)


def _nothing() -> None:
    """Do nothing: runs on the CPU have ended when they return."""


def best(rates: dict[int, float]) -> tuple[int, float]:
    """Return the smallest batch that is about as fast as the fastest, and its rate."""
    best_rate = max(rates.values())
    rows = min(rows for rows, rate in rates.items() if rate >= _NEAR * best_rate)
    return rows, rates[rows]


def _swept(context: CheckContext, variant: Variant, batches: tuple[int, ...]) -> Iterator[Row]:
    session = session_of(context, variant)
    yield _cpu_nodes(context, session.runtime, variant)
    rates: dict[int, float] = {}
    for rows in batches:
        try:
            rates[rows] = _rate(rows, _on_device(session, variant, rows), context.seconds(_SECONDS))
        except Exception as error:
            if not rates:
                raise
            yield failed("offline", f"{variant.name}: batch {rows}", error)
            break
        yield Row("offline", f"{variant.name}: batch {rows}", rates[rows], "rows/s", note="on the device")
    rows, rate = best(rates)
    yield Row("offline", best_batch(variant), rows, "rows")
    yield Row("offline", best_rate(variant), rate, "rows/s", note=f"batch {rows}, on the device")
    copied = _rate(rows, _with_copies(session.runtime, variant, rows), context.seconds(_SECONDS))
    yield Row(
        "offline", f"{variant.name}: with host copies", copied, "rows/s", note=f"batch {rows}, one after the other"
    )


def _cpu_nodes(context: CheckContext, session: Any, variant: Variant) -> Row:
    """List the nodes that ONNX Runtime assigns to the CPU."""
    label = f"{variant.name}: nodes on the CPU"
    try:
        placed = [(each.ep_name, each.get_nodes()) for each in session.get_provider_graph_assignment_info()]
    except Exception as error:  # noqa: BLE001 - an older one does not tell
        return Row("offline", label, "not told", note=str(error)[:100])
    strays = Counter(node.op_type for name, nodes in placed for node in nodes if name == "CPUExecutionProvider")
    note = ", ".join(f"{count} {kind}" for kind, count in strays.most_common())
    return context.judged(at_most("offline", label, strays.total(), 0, note=note))


Runs = Callable[[int], None]
"""Runs a batch the given number of times, and returns when all runs have ended."""


def _rate(rows: int, run: Runs, seconds: float) -> float:
    """Return rows/s, from as many runs as take about `seconds`, after a few warm-up runs."""
    run(_WARM_RUNS)
    begin_s = time.perf_counter()
    run(_MIN_RUNS)
    seconds_per_run = (time.perf_counter() - begin_s) / _MIN_RUNS
    count = max(int(seconds / max(seconds_per_run, 1e-6)), _MIN_RUNS)
    begin_s = time.perf_counter()
    run(count)
    return rows * count / (time.perf_counter() - begin_s)


def _on_device(session: Session, variant: Variant, rows: int) -> Runs:
    import onnxruntime

    binding = session.runtime.io_binding()
    for name, values in variant.inputs(rows).items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(values, session.kind, 0))
    binding.bind_output("output", session.kind, 0)
    session.runtime.run_with_iobinding(binding)
    (output,) = binding.get_outputs()
    binding.bind_ortvalue_output("output", output)  # the same memory in every later run
    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", "-1")  # otherwise each run looks for it, with an exception
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(times: int) -> None:
        for _ in range(times):
            session.runtime.run_with_iobinding(binding, options)
        session.wait()

    return run


def _with_copies(session: Any, variant: Variant, rows: int) -> Runs:
    inputs: dict[str, Tensor] = variant.inputs(rows)
    binding = session.io_binding()

    def run(times: int) -> None:
        for _ in range(times):
            for name, values in inputs.items():
                binding.bind_cpu_input(name, values)
            binding.bind_output("output", "cpu")
            session.run_with_iobinding(binding)
            binding.copy_outputs_to_cpu()

    return run
