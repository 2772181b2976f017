"""GpuSettings: the part of the settings that is about GPUs. Settings has it.

Read where models are. Names are Triton's where the meaning is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from .setting import setting

AUTO = "auto"
_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d{0,3})", re.ASCII)
_LIMIT = re.compile(r"\s*(\d{1,4})\s*:\s*(\d{1,20}(?:\.\d*)?|\.\d+)\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class GpuSettings:
    """On which GPUs models run, and what becomes of those that ask for one where none works."""

    default_device: str = setting(
        AUTO, "GPU", "Where a model runs whose configuration does not say. `auto`: on every GPU that there is, if the "
        "ONNX Runtime installed can use it, else on the CPU; TensorFlow models on the CPU. Or `cpu`, or some GPUs: "
        "`cuda:0,cuda:1`. CUDA_VISIBLE_DEVICES holds: `cuda:0` is the first of those.", unit="DEVICES",
    )  # fmt: skip
    cpu_fallback: bool = setting(
        False, "GPU", "Serve a model that asks for a GPU on the CPU, with a warning, where none works. Off: it is "
        "UNAVAILABLE. A model may say otherwise. One that does not ask is served on the CPU in any case.",
    )  # fmt: skip
    model_load_gpu_limit: tuple[str, ...] = setting(
        (), "GPU", "`DEVICE:FRACTION`: an ONNX model is not loaded on this GPU while more than this part of its memory "
        "is in use, by whomever. Repeatable.", unit="RULE",
    )  # fmt: skip
    min_supported_compute_capability: float = setting(
        6.0, "GPU", "A GPU of a lower compute capability is not used.", unit="version", bounds=(0.0, 1000.0)
    )


def parse_devices(text: str) -> tuple[str, ...]:
    """Read --default-device. Returns: the devices; none for `auto`. Raises: ValueError."""
    words = tuple(word.strip() for word in text.split(","))
    if words == (AUTO,):
        return ()
    if len(set(words)) < len(words) or not all(_DEVICE.fullmatch(word) for word in words):
        raise ValueError(f"must be auto, cpu, or distinct devices such as cuda:0,cuda:1, not {text!r}")
    return words


def parse_limits(entries: Iterable[str]) -> dict[int, float]:
    """Read the values of --model-load-gpu-limit, of what is said twice the last.

    Returns: the fraction by device. Raises: ValueError.
    Source: Triton server, command_line_parser.cc.
    """
    limits: dict[int, float] = {}
    for entry in entries:
        found = _LIMIT.fullmatch(entry)
        if found is None or not 0 <= float(found[2]) <= 1:
            raise ValueError(f"--model-load-gpu-limit option format is '<device id>:<fraction>'. Got {entry}")
        limits[int(found[1])] = float(found[2])
    return limits


GPU_RULES: Mapping[str, Callable[[Any], object]] = MappingProxyType({
    "default_device": parse_devices, "model_load_gpu_limit": parse_limits,
})  # fmt: skip
"""What reads those of them that are rules."""
