"""Settings for models on a GPU: accelerators, graphs, pinned memory, and the older `parameters` for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.batching.devices.fallback import CPU_FALLBACK

from . import accelerators
from .accelerators import CUDA, CUDA_OPTIONS, TENSORRT, TITLES, flag
from .identity import PYTHON, TENSORFLOW
from .parse_context import ParseContext

_ACCELERATOR = "optimization.execution_accelerators.gpu_execution_accelerator"
HONOURED = (
    _ACCELERATOR, "optimization.cuda.graphs", "optimization.cuda.graph_spec", "optimization.cuda.output_copy_stream",
    "optimization.input_pinned_memory", "optimization.output_pinned_memory",
)  # fmt: skip
REFUSED = ("optimization.execution_accelerators.cpu_execution_accelerator",)
REASONS = {
    REFUSED[0]: "ONNX Runtime's OpenVINO provider gives wrong answers for some models; without it they use its own "
    "operators",
}
"""Reasons beyond the name of the field: docs/adr/0004-onnx-runtime-binding.md."""
HINTS = {
    "optimization.cuda.busy_wait_events": "a thread that waits for a GPU sleeps, which leaves the cores to the "
    "front end"
}


def _choice_by_number(*names: str) -> Callable[[str], str]:
    """Accept the number of one of some words."""

    def check(value: str) -> str:
        if value not in map(str, range(len(names))):
            raise ValueError("one of " + ", ".join(f"{number} ({name})" for number, name in enumerate(names)))
        return names[int(value)]

    return check


PARAMETERS: Mapping[str, Callable[[str], str]] = MappingProxyType({
    "arena_extend_strategy": _choice_by_number("kNextPowerOfTwo", "kSameAsRequested"),
    "cudnn_conv_algo_search": _choice_by_number("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "do_copy_in_default_stream": CUDA_OPTIONS["do_copy_in_default_stream"],
    "gpu_mem_limit": CUDA_OPTIONS["gpu_mem_limit"],
})  # fmt: skip
"""The `parameters` for CUDA that Triton still accepts, with their checks. The values are passed to the provider."""


def read(context: ParseContext) -> None:
    """Read the fields of this module. What runs the model must have been read before."""
    backend = context.values.get("model.backend")
    if backend == PYTHON:
        return
    _read_pinned(context)
    if backend == TENSORFLOW:
        _read_tensorflow(context)
        if context.config.optimization.HasField("cuda"):
            context.add_warning("optimization.cuda", "field 'optimization.cuda' has no effect on a TensorFlow model")
        return
    for accelerator in context.config.optimization.execution_accelerators.gpu_execution_accelerator:
        _read_accelerator(context, accelerator)
    if context.config.optimization.HasField("cuda"):
        _read_graphs(context)


def read_parameter(context: ParseContext, name: str, text: str) -> bool:
    """Read one of the `parameters` if it is about GPUs. Returns: whether it is."""
    if name not in {CPU_FALLBACK, *PARAMETERS}:
        return False
    try:
        if name == CPU_FALLBACK:
            context.set_value("runtime.cpu_fallback", flag(text), "parameters")
        else:
            _set_option(context, CUDA, name, PARAMETERS[name](text), "parameters")
    except ValueError as error:
        context.add_mistake("parameters", f"parameter '{name}' must be {error}, not '{text}'")
    return True


def _read_pinned(context: ParseContext) -> None:
    """Read whether host memory may be pinned: no if either side says no, since a permission need not be used."""
    for side in ("input_pinned_memory", "output_pinned_memory"):
        if not context.config.optimization.HasField(side) or getattr(context.config.optimization, side).enable:
            continue
        field = f"optimization.{side}"
        if context.values.get("model.backend") == TENSORFLOW:
            context.add_warning(field, f"field '{field}' has no effect on a TensorFlow model")
        else:
            context.set_value("runtime.pinned", "0", field)


def _read_accelerator(context: ParseContext, accelerator: Any) -> None:
    """Read an accelerator of ONNX Runtime. Source of the text: Triton's onnxruntime_backend, onnxruntime.cc."""
    name = accelerator.name
    if name not in TITLES:
        text = f"unknown Execution Accelerator '{name}' is requested, known: {', '.join(TITLES)}"
        context.add_mistake(f"{_ACCELERATOR}.name", text)
        return
    context.set_value(f"runtime.{name}", True, _ACCELERATOR)
    for option, value, problem in accelerators.read(name, accelerator.parameters):
        if problem:
            context.add_mistake(f"{_ACCELERATOR}.parameters", problem)
        elif option == "enable_cuda_graph":
            _set_once(context, "runtime.gpu_graphs", value, _ACCELERATOR)
        else:
            _set_option(context, name, option, value, _ACCELERATOR)


def _set_option(context: ParseContext, provider: str, option: str, value: str, field: str) -> None:
    _set_once(context, f"runtime.{provider}.{option}", value, field)


def _set_once(context: ParseContext, name: str, value: str, field: str) -> None:
    """Record a value that may be set in two places of one configuration."""
    if context.values.get(name, value) != value:
        context.add_mistake(field, f"{name} is set twice with different values: {context.values[name]} and {value}")
        return
    context.set_value(name, value, field)


def _read_graphs(context: ParseContext) -> None:
    """Read `optimization.cuda`. Outputs are always copied on their own stream, requested or not."""
    cuda, field = context.config.optimization.cuda, "optimization.cuda.graph_spec"
    _set_once(context, "runtime.gpu_graphs", "1" if cuda.graphs else "0", "optimization.cuda.graphs")
    if cuda.graph_spec and not cuda.graphs:
        context.add_warning(field, f"{field} has no effect without optimization.cuda.graphs: true")
    for spec in cuda.graph_spec:
        for name in ("input", "graph_lower_bound"):
            if spec.input if name == "input" else spec.HasField(name):
                text = "there is one graph per number of rows, for the shapes that the model is warmed up with"
                context.add_warning(field, f"{field}.{name} has no effect: {text}")
        max_rows = context.config.max_batch_size
        if not 0 <= spec.batch_size <= max(max_rows, 1):
            text = f"has no effect: it must be from 0 to the max batch size, {max_rows}"
            context.add_warning(field, f"{field}.batch_size {spec.batch_size} {text}")
    sizes = tuple(sorted({spec.batch_size for spec in cuda.graph_spec if 0 < spec.batch_size <= max(max_rows, 1)}))
    if sizes and cuda.graphs:
        context.set_value("runtime.gpu_rows", sizes, field)


def _read_tensorflow(context: ParseContext) -> None:
    """Read a TensorFlow model's accelerators. `gpu_io` is a permission: where tensors are kept changes no answer."""
    for accelerator in context.config.optimization.execution_accelerators.gpu_execution_accelerator:
        if accelerator.name in {TENSORRT, "auto_mixed_precision"}:
            text = f"execution accelerator '{accelerator.name}' is not supported for TensorFlow models"
            context.add_mistake(f"{_ACCELERATOR}.name", f"{text}: apply it to the graph before saving it")
        elif accelerator.name != "gpu_io":
            text = f"unknown Execution Accelerator '{accelerator.name}' is requested"
            context.add_mistake(f"{_ACCELERATOR}.name", text)
