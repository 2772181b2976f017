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

from .fields.accelerators import CUDA, OPTIONS, PATH_OPTIONS, TENSORRT
from .fields.identity import BACKEND
from .fields.instances import DEVICES_CONFIGURED, MISSING_GPU
from .findings import Finding
from .libraries import LIBRARIES
from .parsed_config import ParsedConfig

if TYPE_CHECKING:
    from .defaults import Defaults
    from .gpus import Gpus

ANY_DEVICE = "any"
"""The device of a group that names none, until it is placed."""
_GRAPHS = "runtime.gpu_graphs"
_GPU_SETTINGS = {
    f"runtime.{CUDA}": "execution accelerator 'cuda'", f"runtime.{TENSORRT}": "execution accelerator 'tensorrt'",
    _GRAPHS: "CUDA graphs",
}  # fmt: skip
"""The settings that request a GPU, and their names in messages."""
_HINTS = {**_GPU_SETTINGS, _GRAPHS: "optimization.cuda.graphs"}
_LOADER_OPTIONS = {
    _GRAPHS: "penstock.gpu_graphs", "runtime.gpu_memory": "penstock.gpu_memory_bytes",
    "runtime.pinned": "penstock.pinned", f"runtime.{TENSORRT}": "penstock.tensorrt",
}  # fmt: skip
"""The settings about GPUs that are passed to a Loader, and the names of its options."""
_FALLBACK_HINT = "; set --cpu-fallback=true to serve it on the CPU"


def resolve_devices(parsed: ParsedConfig, backend: str, gpus: Gpus) -> ParsedConfig:
    """Fill in the default devices where penstock.toml leaves them open."""
    groups = parsed.get("instances", ())
    if not any(group.devices == (ANY_DEVICE,) for group in groups):
        return parsed
    return replace(parsed, values={**parsed.values, "instances": tuple(_expand_groups(groups, gpus.default(backend)))})


def without_paths(parsed: ParsedConfig) -> tuple[ParsedConfig, list[Finding]]:
    """Remove what names files from a configuration sent in a request, which must not name any.

    Returns: the rest, and a mistake for each. penstock.toml's value for the same key is not reported beside it.
    """
    text = "names a path on the server's machine and cannot be set by a request"
    mistakes = {
        name: f"parameter '{option}' {text}"
        for name in parsed.values
        if (option := name.rpartition(".")[2]) in PATH_OPTIONS
    }
    if LIBRARIES in parsed.values:
        text = f"{text}: set {LIBRARIES} in penstock.toml in the model's folder instead"
        mistakes[LIBRARIES] = f"field 'model_operations' {text}"
    rest = {name: value for name, value in parsed.values.items() if name not in mistakes}
    return replace(parsed, values=rest), [parsed.make_mistake(name, wrong) for name, wrong in mistakes.items()]


def _expand_groups(groups: tuple[InstanceGroup, ...], devices: tuple[str, ...]) -> Iterator[InstanceGroup]:
    for group in groups:
        for device in devices if group.devices == (ANY_DEVICE,) else group.devices:
            yield replace(group, devices=(device,))


def _missing_device(groups: tuple[InstanceGroup, ...], gpus: Gpus) -> str:
    """Name a device that is missing; "" if none is, as far as is known."""
    requested = [device for group in groups for device in group.devices if device != "cpu"]
    if not requested or gpus.numbers is None:
        return ""
    available = [f"cuda:{number}" for number in gpus.numbers]
    absent = next((device for device in requested if device not in available), "")
    text = f"device '{absent}' does not exist: there is {', '.join(available) or 'no GPU'}"
    return text + (f": {gpus.reason}" if gpus.reason else "") if absent else ""


def place_model(spec: ModelSpec, parsed: ParsedConfig, defaults: Defaults) -> tuple[ModelSpec, list[Finding]]:
    """Set a model's devices, and its Loader's options for GPUs.

    Returns: also a mistake if there is no GPU for it, or a warning if it is served without one.
    """
    if spec.ensemble is not None:
        return spec, []
    gpus, groups = defaults.gpus, parsed.get("instances")
    if groups is None:
        groups = tuple(InstanceGroup(devices=(device,)) for device in gpus.default(spec.backend))
    missing = parsed.get(MISSING_GPU) or _missing_device(groups, gpus)
    spec = replace(spec, instances=groups)
    on_gpu = any(device != "cpu" for group in groups for device in group.devices)
    requests = [name for name in _GPU_SETTINGS if parsed.get(name, "0") not in {"0", "auto"}]
    hints = [name for name in requests if _is_hint(parsed, name)]
    requesting = next((name for name in requests if name not in hints), "")
    chosen_by_default = not (requesting or gpus.is_configured or DEVICES_CONFIGURED in parsed.values)
    may_fall_back = (
        parsed.get("runtime.cpu_fallback", "1" if defaults.cpu_fallback or chosen_by_default else "0") == "1"
    )
    if not on_gpu and requesting:
        why = f": {gpus.reason}" if gpus.reason else ""
        missing = f"{_GPU_SETTINGS[requesting]} requires an instance_group with a GPU{why}"
    if not missing:
        if on_gpu:
            return replace(spec, options=_loader_options(spec, parsed, defaults, may_fall_back)), []
        text = "has no effect: the model runs on the CPU"
        return spec, [replace(parsed.make_mistake(name, f"{_HINTS[name]} {text}"), is_mistake=False) for name in hints]
    mistake = parsed.make_mistake(
        requesting or (MISSING_GPU if MISSING_GPU in parsed.locations else "instances"), missing
    )
    if not may_fall_back or (groups is parsed.get("instances") and gpus.numbers):  # what would work can be named
        fallback_unset = gpus.numbers == () and "runtime.cpu_fallback" not in parsed.values
        return spec, [replace(mistake, message=missing + _FALLBACK_HINT) if fallback_unset else mistake]
    spec = moved_to_cpu(spec, missing) if on_gpu else replace(spec, fallback_reason=missing)
    return spec, [replace(mistake, message=f"is served on the CPU: {missing}", is_mistake=False)]


def _is_hint(parsed: ParsedConfig, name: str) -> bool:
    """Return whether a setting that elsewhere requests a GPU does not, because it comes from a ModelConfig.

    `graphs` never requests one there: Triton has it for TensorRT only. Accelerators do if the devices are left open.
    Source: ModelState::LoadModel in Triton's onnxruntime.cc, which reads them only for instances on GPUs.
    """
    location = parsed.locations.get(name)
    in_model_config = location is not None and location[0].suffix != ".toml"
    return in_model_config and (name == _GRAPHS or DEVICES_CONFIGURED in parsed.values)


def _loader_options(spec: ModelSpec, parsed: ParsedConfig, defaults: Defaults, may_fall_back: bool) -> dict[str, str]:
    """Return the Loader's options of a model that has a GPU."""
    options = {CPU_FALLBACK: "1"} if may_fall_back else {}
    if spec.backend != BACKEND:
        return {**spec.options, **options}
    options |= {option: f"{parsed.values[name]:d}" if parsed.values[name] is True else str(parsed.values[name])
             for name, option in _LOADER_OPTIONS.items() if name in parsed.values}  # fmt: skip
    if options.get("penstock.tensorrt") and (graphs := options.pop("penstock.gpu_graphs", "auto")) != "auto":
        options["tensorrt.trt_cuda_graph_enable"] = graphs  # TensorRT captures graphs itself
    if not options.get("penstock.tensorrt"):
        options.setdefault("penstock.gpu_graphs", "auto")
    for provider, known in OPTIONS.items():
        names = {f"{provider}.{option}": f"runtime.{provider}.{option}" for option in known}
        options |= {option: parsed.values[name] for option, name in names.items() if name in parsed.values}
    if defaults.gpu_limits:
        options["penstock.gpu_limit"] = ",".join(
            f"{gpu}:{fraction:g}" for gpu, fraction in sorted(defaults.gpu_limits.items())
        )
    if sizes := _run_sizes(spec, parsed):
        options["penstock.rows"] = ",".join(map(str, sizes))
    return {**spec.options, **options}


def _run_sizes(spec: ModelSpec, parsed: ParsedConfig) -> tuple[int, ...]:
    """Return the sizes to build graphs and TensorRT profiles for, configured or derived; empty if none are needed."""
    policy = spec.policy
    max_rows = policy.default_max_batch_rows if policy.max_batch_rows is None else policy.max_batch_rows
    if policy.allowed_rows or max_rows < 1:
        return policy.allowed_rows
    configured = parsed.get("runtime.gpu_rows", ())
    if not configured and f"runtime.{TENSORRT}" not in parsed.values and parsed.get(_GRAPHS) != "1":
        return ()
    return (*(size for size in configured if size < max_rows), max_rows) if configured else run_sizes(max_rows)
