"""GpuSettings: the settings of GPUs. Settings inherits them.

Read where models are loaded. Names are Triton's where the meaning is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .setting import setting

AUTO = "auto"
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})", re.ASCII)
_LIMIT = re.compile(r"\s*(\d{1,4})\s*:\s*(\d{1,20}(?:\.\d*)?|\.\d+)\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class GpuSettings:
    """Which GPUs models run on, and what happens to a model that requests a GPU if none works."""

    default_device: str = setting(
        AUTO, "GPU", "Device for models whose configuration names none. `auto`: every GPU that the installed ONNX "
        "Runtime can use, otherwise the CPU; TensorFlow models run on the CPU. Or `cpu`, or a list of GPUs: "
        "`cuda:0,cuda:1`. CUDA_VISIBLE_DEVICES applies: `cuda:0` is the first device it lists.", unit="DEVICES",
    )  # fmt: skip
    cpu_fallback: bool = setting(
        False, "GPU", "If a model requests a GPU and none works, serve it on the CPU with a warning. Off: the model is "
        "UNAVAILABLE. A model's own setting overrides this. A model that does not request a GPU always falls back to "
        "the CPU.",
    )  # fmt: skip
    model_load_gpu_limit: tuple[str, ...] = setting(
        (), "GPU", "`DEVICE:FRACTION`: do not load an ONNX model on this GPU while more than this fraction of its "
        "memory is in use by any process. Repeatable.", unit="RULE",
    )  # fmt: skip
    min_supported_compute_capability: float = setting(
        6.0, "GPU", "Do not use GPUs with a lower compute capability.", unit="version", bounds=(0.0, 1000.0)
    )


def parse_devices(text: str) -> tuple[str, ...]:
    """Read --default-device. Returns: the devices; empty for `auto`. Raises: ValueError."""
    devices = tuple(device.strip() for device in text.split(","))
    if devices == (AUTO,):
        return ()
    if len(set(devices)) < len(devices) or not all(_DEVICE.fullmatch(device) for device in devices):
        raise ValueError(f"must be auto, cpu, or distinct devices such as cuda:0,cuda:1, not {text!r}")
    return devices


def parse_limits(entries: Iterable[str]) -> dict[int, float]:
    """Read the values of --model-load-gpu-limit. If a device is given twice, the last value counts.

    Returns: the fraction by device. Raises: ValueError.
    Source: Triton server, command_line_parser.cc.
    """
    limits: dict[int, float] = {}
    for entry in entries:
        match = _LIMIT.fullmatch(entry)
        if match is None or not 0 <= float(match[2]) <= 1:
            raise ValueError(f"--model-load-gpu-limit option format is '<device id>:<fraction>'. Got {entry}")
        limits[int(match[1])] = float(match[2])
    return limits
