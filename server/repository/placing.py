"""Placing: the devices of a model's Instances, and the GPU options of its runtime.

Used by scan.py once a model's configuration has been read, and for Cortex. A model that requests a GPU where none is
present is not served, unless it may run on the CPU; a GPU that does not work is found by loading the model. A model
that requests no device and is given a GPU that turns out not to work runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.batching.devices.fallback import CPU_FALLBACK, moved_to_cpu
from penstock.batching.loading.run_sizes import run_sizes
from penstock.batching.spec import InstanceGroup, ModelSpec

from .fields.accelerators import CUDA, OPTIONS, PLACES, TENSORRT
from .fields.identity import BACKEND
from .fields.instances import ASKED, LACKING
from .findings import Finding
from .libraries import LIBRARIES
from .statement import Statement

if TYPE_CHECKING:
    from .defaults import Defaults
    from .gpus import Gpus

ANY_DEVICE = "any"
"""The device of a group that names none, until it is placed."""
_GRAPHS = "runtime.gpu_graphs"
_ASKS = {
    f"runtime.{CUDA}": "execution accelerator 'cuda'", f"runtime.{TENSORRT}": "execution accelerator 'tensorrt'",
    _GRAPHS: "CUDA graphs",
}  # fmt: skip
"""The settings that request a GPU, and their names in messages."""
_HINTS = {**_ASKS, _GRAPHS: "optimization.cuda.graphs"}
_PASSED = {
    _GRAPHS: "penstock.gpu_graphs", "runtime.gpu_memory": "penstock.gpu_memory_bytes",
    "runtime.pinned": "penstock.pinned", f"runtime.{TENSORRT}": "penstock.tensorrt",
}  # fmt: skip
"""The settings about GPUs that are passed to a Loader, and the names of its options."""
_WAY_OUT = "; set --cpu-fallback=true to serve it on the CPU"


def resolve(stated: Statement, backend: str, gpus: Gpus) -> Statement:
    """Fill in the default devices where penstock.toml leaves them open."""
    groups = stated.get("instances", ())
    if not any(group.devices == (ANY_DEVICE,) for group in groups):
        return stated
    return replace(stated, values={**stated.values, "instances": tuple(_anywhere(groups, gpus.default(backend)))})


def without_places(stated: Statement) -> tuple[Statement, list[Finding]]:
    """Remove what names files from a configuration sent in a request, which must not name any.

    Returns: the rest, and a mistake for each. penstock.toml's value for the same key is not reported beside it.
    """
    text = "names a path on the server's machine and cannot be set by a request"
    found = {
        name: f"parameter '{option}' {text}" for name in stated.values if (option := name.rpartition(".")[2]) in PLACES
    }
    if LIBRARIES in stated.values:
        text = f"{text}: set {LIBRARIES} in penstock.toml in the model's folder instead"
        found[LIBRARIES] = f"field 'model_operations' {text}"
    left = {name: value for name, value in stated.values.items() if name not in found}
    return replace(stated, values=left), [stated.mistake(name, wrong) for name, wrong in found.items()]


def _anywhere(groups: tuple[InstanceGroup, ...], devices: tuple[str, ...]) -> Iterator[InstanceGroup]:
    for group in groups:
        for device in devices if group.devices == (ANY_DEVICE,) else group.devices:
            yield replace(group, devices=(device,))


def _lacking(groups: tuple[InstanceGroup, ...], gpus: Gpus) -> str:
    """Name a device that is missing; "" if none is, as far as is known."""
    wanted = [device for group in groups for device in group.devices if device != "cpu"]
    if not wanted or gpus.numbers is None:
        return ""
    there = [f"cuda:{number}" for number in gpus.numbers]
    absent = next((device for device in wanted if device not in there), "")
    text = f"device '{absent}' does not exist: there is {', '.join(there) or 'no GPU'}"
    return text + (f": {gpus.why}" if gpus.why else "") if absent else ""


def place(spec: ModelSpec, stated: Statement, defaults: Defaults) -> tuple[ModelSpec, list[Finding]]:
    """Set a model's devices, and its Loader's options for GPUs.

    Returns: also a mistake if there is no GPU for it, or a warning if it is served without one.
    """
    if spec.ensemble is not None:
        return spec, []
    gpus, groups = defaults.gpus, stated.get("instances")
    if groups is None:
        groups = tuple(InstanceGroup(devices=(device,)) for device in gpus.default(spec.backend))
    lacking = stated.get(LACKING) or _lacking(groups, gpus)
    spec = replace(spec, instances=groups)
    on_gpu = any(device != "cpu" for group in groups for device in group.devices)
    asks = [name for name in _ASKS if stated.get(name, "0") not in {"0", "auto"}]
    hints = [name for name in asks if _is_a_hint(stated, name)]
    asking = next((name for name in asks if name not in hints), "")
    left_open = not (asking or gpus.are_said or ASKED in stated.values)
    allowed = stated.get("runtime.cpu_fallback", "1" if defaults.cpu_fallback or left_open else "0") == "1"
    if not on_gpu and asking:
        why = f": {gpus.why}" if gpus.why else ""
        lacking = f"{_ASKS[asking]} requires an instance_group with a GPU{why}"
    if not lacking:
        if on_gpu:
            return replace(spec, options=_options(spec, stated, defaults, allowed)), []
        text = "has no effect: the model runs on the CPU"
        return spec, [replace(stated.mistake(name, f"{_HINTS[name]} {text}"), mistake=False) for name in hints]
    at = stated.mistake(asking or (LACKING if LACKING in stated.places else "instances"), lacking)
    if not allowed or (groups is stated.get("instances") and gpus.numbers):  # what would work can be named
        open_to_it = gpus.numbers == () and "runtime.cpu_fallback" not in stated.values
        return spec, [replace(at, message=lacking + _WAY_OUT) if open_to_it else at]
    spec = moved_to_cpu(spec, lacking) if on_gpu else replace(spec, fallback_reason=lacking)
    return spec, [replace(at, message=f"is served on the CPU: {lacking}", mistake=False)]


def _is_a_hint(stated: Statement, name: str) -> bool:
    """Return whether a setting that elsewhere requests a GPU does not, because it comes from a ModelConfig.

    `graphs` never requests one there: Triton has it for TensorRT only. Accelerators do if the devices are left open.
    Source: ModelState::LoadModel in Triton's onnxruntime.cc, which reads them only for instances on GPUs.
    """
    place = stated.places.get(name)
    said_there = place is not None and place[0].suffix != ".toml"
    return said_there and (name == _GRAPHS or ASKED in stated.values)


def _options(spec: ModelSpec, stated: Statement, defaults: Defaults, allowed: bool) -> dict[str, str]:
    """Return the Loader's options of a model that has a GPU."""
    said = {CPU_FALLBACK: "1"} if allowed else {}
    if spec.backend != BACKEND:
        return {**spec.options, **said}
    said |= {option: f"{stated.values[name]:d}" if stated.values[name] is True else str(stated.values[name])
             for name, option in _PASSED.items() if name in stated.values}  # fmt: skip
    if said.get("penstock.tensorrt") and (graphs := said.pop("penstock.gpu_graphs", "auto")) != "auto":
        said["tensorrt.trt_cuda_graph_enable"] = graphs  # TensorRT captures graphs itself
    if not said.get("penstock.tensorrt"):
        said.setdefault("penstock.gpu_graphs", "auto")
    for provider, options in OPTIONS.items():
        names = {f"{provider}.{option}": f"runtime.{provider}.{option}" for option in options}
        said |= {option: stated.values[name] for option, name in names.items() if name in stated.values}
    if defaults.gpu_limits:
        said["penstock.gpu_limit"] = ",".join(f"{gpu}:{part:g}" for gpu, part in sorted(defaults.gpu_limits.items()))
    if sizes := _rows(spec, stated):
        said["penstock.rows"] = ",".join(map(str, sizes))
    return {**spec.options, **said}


def _rows(spec: ModelSpec, stated: Statement) -> tuple[int, ...]:
    """Return the sizes to build graphs and TensorRT profiles for, configured or derived; empty if none are needed."""
    policy = spec.policy
    most = policy.default_max_batch_rows if policy.max_batch_rows is None else policy.max_batch_rows
    if policy.allowed_rows or most < 1:
        return policy.allowed_rows
    said = stated.get("runtime.gpu_rows", ())
    if not said and f"runtime.{TENSORRT}" not in stated.values and stated.get(_GRAPHS) != "1":
        return ()
    return (*(size for size in said if size < most), most) if said else run_sizes(most)
