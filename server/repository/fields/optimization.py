"""Settings passed to the runtime: `optimization`, `parameters` and `model_operations`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from penstock.batching.devices.fallback import CPU_FALLBACK
from penstock.server.repository.findings import path_exists
from penstock.server.repository.libraries import LIBRARIES

from . import gpu
from .accelerators import flag
from .ensembles import PLATFORM as ENSEMBLE
from .identity import PYTHON, TENSORFLOW
from .parse_context import ParseContext, enum_name

HONOURED = ("optimization.graph.level", "optimization.priority", "parameters", "model_operations.op_library_filename")
HINTS = {
    "optimization.gather_kernel_buffer_threshold": "inputs are gathered in pinned memory or by copies on the device",
    "optimization.eager_batching": "a batch is gathered when an instance takes it",
}

_PRIORITIES = {"PRIORITY_DEFAULT": 1.0, "PRIORITY_MAX": 4.0, "PRIORITY_MIN": 0.25}
"""A model's weight in its device's turns: its share of time relative to a default model that is as busy."""
_GRAPH_LEVELS = {-1: "basic", 0: "all", 1: "extended", 2: "disabled"}
_TRUE, _FALSE = frozenset({"true", "1", "on", "yes"}), frozenset({"false", "0", "off", "no"})


def _thread_count(value: str) -> str | None:
    if not value.isascii() or not value.isdigit() or int(value) > 4096:
        raise ValueError("an integer from 0 to 4096")
    return str(int(value)) if int(value) else None


def _zero_or_one(value: str) -> str:
    if value not in {"0", "1"}:
        raise ValueError("0 or 1")
    return value


PARAMETERS: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "intra_op_thread_count": ("runtime.intra_op_threads", _thread_count),
    "inter_op_thread_count": ("runtime.inter_op_threads", _thread_count),
    "execution_mode": ("runtime.execution_mode", _zero_or_one),
    "enable_mem_arena": ("runtime.mem_arena", flag),
    "enable_mem_pattern": ("runtime.mem_pattern", flag),
}
"""The `parameters` that are honored, each with its setting and its check."""


def _boolean(value: str) -> str:
    """Accept what Triton accepts as a boolean, and the "yes" of its own example."""
    if value.lower() not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return "1" if value.lower() in _TRUE else "0"


def _name(value: str) -> str | None:
    return value or None


TENSORFLOW_PARAMETERS: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "TF_SIGNATURE_DEF": ("runtime.signature", _name),
    "TF_GRAPH_TAG": ("runtime.graph_tag", _name),
    "TF_NUM_INTRA_THREADS": ("runtime.intra_op_threads", _thread_count),
    "TF_NUM_INTER_THREADS": ("runtime.inter_op_threads", _thread_count),
    "TF_USE_PER_SESSION_THREADS": ("runtime.session_threads", _boolean),
}
"""The `parameters` of a TensorFlow model that are honored. Source: tensorflow_backend's README."""
SHARE_COUNT, INIT_OPS = "MAX_SESSION_SHARE_COUNT", "TF_INIT_OPS_FILE"
"""Two more: how many instances share a session (here all of a device do), and what a GraphDef must run first."""
ENVIRONMENT = "EXECUTION_ENV_PATH"
"""The parameter of a Python model that names its packed environment."""
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
"""A placeholder for the model's folder in that parameter. Source: python_backend's README."""
SESSION_ENTRIES = ("session.use_device_allocator_for_initializers", "memory.enable_memory_arena_shrinkage")
"""The `parameters` that are passed to ONNX Runtime unchanged."""
_RESERVED = ("penstock.", "TRITON_")
"""Prefixes of our own names and Triton's: those have a meaning, such as TRITON_BATCH_STRATEGY_PATH."""
_MIN_SIMILARITY = 0.8
"""From this similarity, a name is taken for a misspelled known one, not for one of the user's own."""


def read(context: ParseContext) -> None:
    """Read the fields of this module."""
    optimization, backend = context.config.optimization, context.values.get("model.backend")
    if context.config.platform == ENSEMBLE:
        for name in sorted(context.config.parameters):
            _warn_unused(context, name)
        return
    if backend == PYTHON:
        if context.config.HasField("optimization"):
            context.add_warning("optimization", "field 'optimization' has no effect on a Python model, as in Triton")
        _read_libraries(context)
        _read_environment(context)
        return
    if optimization.HasField("graph") and backend == TENSORFLOW:
        _check_xla(context)
    elif optimization.HasField("graph"):
        level = _GRAPH_LEVELS.get(optimization.graph.level)
        if level is None:
            text = f"optimization.graph.level {optimization.graph.level} is unknown, known: -1, 0, 1, 2"
            context.add_mistake("optimization.graph.level", text)
        context.set_value("runtime.graph_level", level or "all", "optimization.graph.level")
    _read_priority(context)
    _read_libraries(context)
    if backend == TENSORFLOW:
        _read_tensorflow_parameters(context)
    else:
        _read_parameters(context)


def _read_priority(context: ParseContext) -> None:
    optimization, field = context.config.optimization, "optimization.priority"
    weight = _PRIORITIES.get(enum_name(optimization, "priority"))
    if weight is None:
        text = f"{field} {optimization.priority} is unknown, known: {', '.join(_PRIORITIES)}"
        context.add_mistake(field, text)
    elif optimization.priority:
        context.set_value("device_priority", weight, field)


def _read_libraries(context: ParseContext) -> None:
    """Read the libraries of custom operators. They are located later, for each version (libraries.py)."""
    names = context.config.model_operations.op_library_filename
    if names and context.values.get("model.backend") == PYTHON:
        text = "field 'model_operations' is not supported for Python models: the model's own code may load libraries"
        context.add_mistake("model_operations", text)
    elif names:
        context.set_value(LIBRARIES, tuple(names), "model_operations.op_library_filename")


def _check_xla(context: ParseContext) -> None:
    """Read a TensorFlow model's level, which is XLA's: -1 is off, 0 is TensorFlow's default (off), above 0 is on."""
    level, field = context.config.optimization.graph.level, "optimization.graph.level"
    if level not in {-1, 0}:
        text = "XLA would recompile the graph for each number of rows"
        context.add_warning(field, f"{field} {level} has no effect on a TensorFlow model: {text}")


def _read_environment(context: ParseContext) -> None:
    """Read the parameters of a Python model that are meant for the server. The others are the model's own."""
    if CPU_FALLBACK in context.config.parameters:
        gpu.read_parameter(context, CPU_FALLBACK, context.config.parameters[CPU_FALLBACK].string_value)
    name = context.config.parameters[ENVIRONMENT].string_value if ENVIRONMENT in context.config.parameters else ""
    if not name:
        return
    path = Path(name.replace(MODEL_FOLDER, str(context.folder)))
    if not path.is_absolute():  # in Triton, relative to where the server was started
        path = context.folder / path if path_exists(context.folder / path) else path.absolute()
    if not path_exists(path):
        context.add_mistake("parameters", f"parameter '{ENVIRONMENT}': '{name}' does not exist")
    context.set_value("worker.requirements", path, "parameters")


def _read_tensorflow_parameters(context: ParseContext) -> None:
    for name, parameter in sorted(context.config.parameters.items()):
        value = parameter.string_value
        if name == CPU_FALLBACK:
            gpu.read_parameter(context, name, value)
        elif name in TENSORFLOW_PARAMETERS:
            _read_parameter(context, name, value, TENSORFLOW_PARAMETERS)
        elif name == SHARE_COUNT:
            if not value.isascii() or not value.isdigit() or not int(value):
                # Source: ParseParameters of tensorflow_backend
                text = f"parameter '{name}' must be positive number for TensorFlow model '{context.name}'"
                context.add_mistake("parameters", text)
        elif name == INIT_OPS:
            text = "is for GraphDefs: a SavedModel names its own initialization"
            context.add_mistake("parameters", f"parameter '{name}' {text}")
        else:
            _accept_unused(context, name, " for TensorFlow models", (*TENSORFLOW_PARAMETERS, SHARE_COUNT, CPU_FALLBACK))


def _read_parameter(
    context: ParseContext, name: str, text: str, known: dict[str, tuple[str, Callable[[str], str | None]]]
) -> None:
    setting, check = known[name]
    try:
        value = check(text)
    except ValueError as error:
        context.add_mistake("parameters", f"parameter '{name}' must be {error}, not '{text}'")
        return
    if value is not None:
        context.set_value(setting, value, "parameters")


def _read_parameters(context: ParseContext) -> None:
    for name, parameter in sorted(context.config.parameters.items()):
        if name in SESSION_ENTRIES:
            entries = {**context.values.get("runtime.entries", {}), name: parameter.string_value}
            context.set_value("runtime.entries", entries, "parameters")
            continue
        if gpu.read_parameter(context, name, parameter.string_value):
            continue
        if name not in PARAMETERS:
            _accept_unused(context, name, "", (*PARAMETERS, *SESSION_ENTRIES, *gpu.PARAMETERS, CPU_FALLBACK))
            continue
        _read_parameter(context, name, parameter.string_value, PARAMETERS)


def _accept_unused(context: ParseContext, name: str, qualifier: str, known: tuple[str, ...]) -> None:
    """Accept a parameter that nothing here reads, since clients may read it (Ultralytics' `metadata`)."""
    known_names = (*known, *PARAMETERS, *TENSORFLOW_PARAMETERS, INIT_OPS, ENVIRONMENT)
    similar = difflib.get_close_matches(name.lower(), map(str.lower, known_names), 1, _MIN_SIMILARITY)
    if similar or name.startswith(_RESERVED):
        context.add_mistake("parameters", f"parameter '{name}' is not supported{qualifier}, known: {', '.join(known)}")
    else:
        _warn_unused(context, name)


def _warn_unused(context: ParseContext, name: str) -> None:
    text = "is informational: it changes nothing here"
    context.add_warning("parameters", f"parameter '{name}' {text}")
