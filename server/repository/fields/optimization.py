"""Settings passed to the runtime: `optimization`, `parameters` and `model_operations`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

from penstock.batching.devices.fallback import CPU_FALLBACK
from penstock.server.repository.findings import is_there
from penstock.server.repository.libraries import LIBRARIES

from . import gpu
from .accelerators import flag
from .ensembles import PLATFORM as ENSEMBLE
from .identity import PYTHON, TENSORFLOW
from .notes import Notes, enum_name

HONOURED = ("optimization.graph.level", "optimization.priority", "parameters", "model_operations.op_library_filename")
HINTS = {
    "optimization.gather_kernel_buffer_threshold": "inputs are gathered in pinned memory or by copies on the device",
    "optimization.eager_batching": "a batch is gathered when an instance takes it",
}

_NO_LIBRARIES = {TENSORFLOW: "it is supported for ONNX models only", PYTHON: "the model's own code may load libraries"}
_PRIORITIES = {"PRIORITY_DEFAULT": 1.0, "PRIORITY_MAX": 4.0, "PRIORITY_MIN": 0.25}
"""A model's weight in its device's turns: its share of time relative to a default model that is as busy."""
_GRAPH_LEVELS = {-1: "basic", 0: "all", 1: "extended", 2: "disabled"}
_ON, _OFF = frozenset({"true", "1", "on", "yes"}), frozenset({"false", "0", "off", "no"})


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


def _switch(value: str) -> str:
    """Accept what Triton accepts as a boolean, and the "yes" of its own example."""
    if value.lower() not in _ON | _OFF:
        raise ValueError("true or false")
    return "1" if value.lower() in _ON else "0"


def _name(value: str) -> str | None:
    return value or None


TENSORFLOW_PARAMETERS: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "TF_SIGNATURE_DEF": ("runtime.signature", _name),
    "TF_GRAPH_TAG": ("runtime.graph_tag", _name),
    "TF_NUM_INTRA_THREADS": ("runtime.intra_op_threads", _thread_count),
    "TF_NUM_INTER_THREADS": ("runtime.inter_op_threads", _thread_count),
    "TF_USE_PER_SESSION_THREADS": ("runtime.session_threads", _switch),
}
"""The `parameters` of a TensorFlow model that are honored. Source: tensorflow_backend's README."""
SHARE_COUNT, INIT_OPS = "MAX_SESSION_SHARE_COUNT", "TF_INIT_OPS_FILE"
"""Two more: how many instances share a session (here all of a device do), and what a GraphDef must run first."""
ENVIRONMENT = "EXECUTION_ENV_PATH"
"""The parameter of a Python model that names its packed environment."""
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
"""A placeholder for the model's folder in that parameter. Source: python_backend's README."""
ENTRIES = ("session.use_device_allocator_for_initializers", "memory.enable_memory_arena_shrinkage")
"""The `parameters` that are passed to ONNX Runtime unchanged."""
_RESERVED = ("penstock.", "TRITON_")
"""Prefixes of our own names and Triton's: those have a meaning, such as TRITON_BATCH_STRATEGY_PATH."""
_LIKENESS = 0.8
"""From this similarity, a name is taken for a misspelled known one, not for one of the user's own."""


def read(notes: Notes) -> None:
    """Read the fields of this module."""
    optimization, backend = notes.config.optimization, notes.values.get("model.backend")
    if notes.config.platform == ENSEMBLE:
        for name in sorted(notes.config.parameters):
            _note_own(notes, name)
        return
    if backend == PYTHON:
        if notes.config.HasField("optimization"):
            notes.warn("optimization", "field 'optimization' has no effect on a Python model, as in Triton")
        _libraries(notes)
        _environment(notes)
        return
    if optimization.HasField("graph") and backend == TENSORFLOW:
        _xla(notes)
    elif optimization.HasField("graph"):
        level = _GRAPH_LEVELS.get(optimization.graph.level)
        if level is None:
            text = f"optimization.graph.level {optimization.graph.level} is unknown, known: -1, 0, 1, 2"
            notes.mistake("optimization.graph.level", text)
        notes.say("runtime.graph_level", level or "all", "optimization.graph.level")
    _priority(notes)
    _libraries(notes)
    if backend == TENSORFLOW:
        _tensorflow_parameters(notes)
    else:
        _parameters(notes)


def _priority(notes: Notes) -> None:
    optimization, field = notes.config.optimization, "optimization.priority"
    weight = _PRIORITIES.get(enum_name(optimization, "priority"))
    if weight is None:
        text = f"{field} {optimization.priority} is unknown, known: {', '.join(_PRIORITIES)}"
        notes.mistake(field, text)
    elif optimization.priority:
        notes.say("device_priority", weight, field)


def _libraries(notes: Notes) -> None:
    """Read the libraries of custom operators. They are located later, for each version (libraries.py)."""
    backend, said = notes.values.get("model.backend", ""), notes.config.model_operations.op_library_filename
    if said and backend in _NO_LIBRARIES:
        kind = {TENSORFLOW: "TensorFlow", PYTHON: "Python"}[backend]
        text = f"field 'model_operations' is not supported for {kind} models: {_NO_LIBRARIES[backend]}"
        notes.mistake("model_operations", text)
    elif said:
        notes.say(LIBRARIES, tuple(said), "model_operations.op_library_filename")


def _xla(notes: Notes) -> None:
    """Read a TensorFlow model's level, which is XLA's: -1 is off, 0 is TensorFlow's default (off), above 0 is on."""
    level, field = notes.config.optimization.graph.level, "optimization.graph.level"
    if level not in {-1, 0}:
        text = "XLA would recompile the graph for each number of rows"
        notes.warn(field, f"{field} {level} has no effect on a TensorFlow model: {text}")


def _environment(notes: Notes) -> None:
    """Read the parameters of a Python model that are meant for the server. The others are the model's own."""
    if CPU_FALLBACK in notes.config.parameters:
        gpu.parameter(notes, CPU_FALLBACK, notes.config.parameters[CPU_FALLBACK].string_value)
    name = notes.config.parameters[ENVIRONMENT].string_value if ENVIRONMENT in notes.config.parameters else ""
    if not name:
        return
    path = Path(name.replace(MODEL_FOLDER, str(notes.folder)))
    if not path.is_absolute():  # in Triton, relative to where the server was started
        path = notes.folder / path if is_there(notes.folder / path) else path.absolute()
    if not is_there(path):
        notes.mistake("parameters", f"parameter '{ENVIRONMENT}': '{name}' does not exist")
    notes.say("worker.requirements", path, "parameters")


def _tensorflow_parameters(notes: Notes) -> None:
    for name, parameter in sorted(notes.config.parameters.items()):
        value = parameter.string_value
        if name == CPU_FALLBACK:
            gpu.parameter(notes, name, value)
        elif name in TENSORFLOW_PARAMETERS:
            _parameter(notes, name, value, TENSORFLOW_PARAMETERS)
        elif name == SHARE_COUNT:
            if not value.isascii() or not value.isdigit() or not int(value):
                # Source: ParseParameters of tensorflow_backend
                text = f"parameter '{name}' must be positive number for TensorFlow model '{notes.name}'"
                notes.mistake("parameters", text)
        elif name == INIT_OPS:
            text = "is for GraphDefs: a SavedModel names its own initialization"
            notes.mistake("parameters", f"parameter '{name}' {text}")
        else:
            _own(notes, name, " for TensorFlow models", (*TENSORFLOW_PARAMETERS, SHARE_COUNT, CPU_FALLBACK))


def _parameter(notes: Notes, name: str, text: str, known: dict[str, tuple[str, Callable[[str], str | None]]]) -> None:
    said, check = known[name]
    try:
        value = check(text)
    except ValueError as error:
        notes.mistake("parameters", f"parameter '{name}' must be {error}, not '{text}'")
        return
    if value is not None:
        notes.say(said, value, "parameters")


def _parameters(notes: Notes) -> None:
    for name, parameter in sorted(notes.config.parameters.items()):
        if name in ENTRIES:
            entries = {**notes.values.get("runtime.entries", {}), name: parameter.string_value}
            notes.say("runtime.entries", entries, "parameters")
            continue
        if gpu.parameter(notes, name, parameter.string_value):
            continue
        if name not in PARAMETERS:
            _own(notes, name, "", (*PARAMETERS, *ENTRIES, *gpu.PARAMETERS, CPU_FALLBACK))
            continue
        _parameter(notes, name, parameter.string_value, PARAMETERS)


def _own(notes: Notes, name: str, whose: str, known: tuple[str, ...]) -> None:
    """Accept a parameter that nothing here reads, since clients may read it (Ultralytics' `metadata`)."""
    every = (*known, *PARAMETERS, *TENSORFLOW_PARAMETERS, INIT_OPS, ENVIRONMENT)
    like = difflib.get_close_matches(name.lower(), map(str.lower, every), 1, _LIKENESS)
    if like or name.startswith(_RESERVED):
        notes.mistake("parameters", f"parameter '{name}' is not supported{whose}, known: {', '.join(known)}")
    else:
        _note_own(notes, name)


def _note_own(notes: Notes, name: str) -> None:
    text = "is informational: it changes nothing here"
    notes.warn("parameters", f"parameter '{name}' {text}")
