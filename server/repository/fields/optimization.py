"""What the runtime is told: `optimization` and `parameters`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.batching.spec import InstanceGroup

from .identity import PYTHON
from .notes import Notes, enum_name

HONOURED = (
    "optimization.graph.level", "optimization.execution_accelerators.gpu_execution_accelerator",
    "optimization.input_pinned_memory", "optimization.output_pinned_memory", "optimization.priority", "parameters",
)  # fmt: skip
REFUSED = (
    "optimization.cuda", "optimization.gather_kernel_buffer_threshold",
    "optimization.eager_batching", "optimization.execution_accelerators.cpu_execution_accelerator",
)  # fmt: skip

_PRIORITIES = {"PRIORITY_DEFAULT": 1.0, "PRIORITY_MAX": 4.0, "PRIORITY_MIN": 0.25}
"""The weight of a model in its device's turns: so many times the time of one of the default that is as hot."""
_GRAPH_LEVELS = {-1: "basic", 0: "all", 1: "extended", 2: "disabled"}
_TRUE, _FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})


def _thread_count(value: str) -> str | None:
    if not value.isascii() or not value.isdigit() or int(value) > 4096:
        raise ValueError("an integer from 0 to 4096")
    return str(int(value)) if int(value) else None


def _zero_or_one(value: str) -> str:
    if value not in {"0", "1"}:
        raise ValueError("0 or 1")
    return value


def _boolean(value: str) -> str:
    if value.lower() not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return "1" if value.lower() in _TRUE else "0"


PARAMETERS: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "intra_op_thread_count": ("runtime.intra_op_threads", _thread_count),
    "inter_op_thread_count": ("runtime.inter_op_threads", _thread_count),
    "execution_mode": ("runtime.execution_mode", _zero_or_one),
    "enable_mem_arena": ("runtime.mem_arena", _boolean),
    "enable_mem_pattern": ("runtime.mem_pattern", _boolean),
}
"""The `parameters` that are honoured, each with what it says and its check."""
ENVIRONMENT = "EXECUTION_ENV_PATH"
"""The parameter of a Python model that names its packed environment."""
MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
"""What stands for the model's folder there. Source: python_backend's README."""
ENTRIES = ("session.use_device_allocator_for_initializers", "memory.enable_memory_arena_shrinkage")
"""The `parameters` that are handed to ONNX Runtime as they are."""


def read(notes: Notes) -> None:
    """Read them. Instances must have been read before."""
    optimization = notes.config.optimization
    for side in ("input_pinned_memory", "output_pinned_memory"):
        if optimization.HasField(side) and not getattr(optimization, side).enable:
            notes.mistake(f"optimization.{side}", f"field 'optimization.{side}' is supported as enable: true only")
    if optimization.HasField("graph"):
        level = _GRAPH_LEVELS.get(optimization.graph.level)
        if level is None:
            text = f"optimization.graph.level {optimization.graph.level} is unknown, known: -1, 0, 1, 2"
            notes.mistake("optimization.graph.level", text)
        notes.say("runtime.graph_level", level or "all", "optimization.graph.level")
    _priority(notes)
    _accelerators(notes)
    if notes.config.backend == PYTHON:
        _environment(notes)
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


def _accelerators(notes: Notes) -> None:
    field = "optimization.execution_accelerators.gpu_execution_accelerator"
    for accelerator in notes.config.optimization.execution_accelerators.gpu_execution_accelerator:
        if accelerator.name != "cuda":
            notes.mistake(f"{field}.name", f"execution accelerator '{accelerator.name}' is not supported, known: cuda")
            continue
        if all(group.devices == ("cpu",) for group in notes.values.get("instances", (InstanceGroup(),))):
            notes.mistake(field, "execution accelerator 'cuda' needs an instance_group with a GPU")
        parameters = {f"cuda.{name}": value for name, value in accelerator.parameters.items()}
        notes.say("runtime.cuda", parameters, field)


def _environment(notes: Notes) -> None:
    """Read the parameters of a Python model that are the server's; the others are the model's own."""
    name = notes.config.parameters[ENVIRONMENT].string_value if ENVIRONMENT in notes.config.parameters else ""
    if not name:
        return
    path = Path(name.replace(MODEL_FOLDER, str(notes.folder)))
    path = path if path.is_absolute() else notes.folder / path
    if not path.exists():
        notes.mistake("parameters", f"parameter '{ENVIRONMENT}': '{name}' is not there")
    notes.say("worker.requirements", path, "parameters")


def _parameters(notes: Notes) -> None:
    for name, parameter in sorted(notes.config.parameters.items()):
        if name in ENTRIES:
            entries = {**notes.values.get("runtime.entries", {}), name: parameter.string_value}
            notes.say("runtime.entries", entries, "parameters")
            continue
        if name not in PARAMETERS:
            known = ", ".join((*PARAMETERS, *ENTRIES))
            notes.mistake("parameters", f"parameter '{name}' is not supported, known: {known}")
            continue
        said, check = PARAMETERS[name]
        try:
            value = check(parameter.string_value)
        except ValueError as error:
            notes.mistake("parameters", f"parameter '{name}' is '{parameter.string_value}', takes {error}")
            continue
        if value is not None:
            notes.say(said, value, "parameters")
