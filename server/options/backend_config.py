"""Backend config: the rules of --backend-config, Triton's flag for settings shared by all models of a backend.

Called by Settings, and where models are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

ONNX, TENSORFLOW = "onnxruntime", "tensorflow"
MAX_BATCH_SIZE = "default-max-batch-size"
OTHER_BACKENDS = frozenset({
    "dali", "fil", "identity", "openvino", "python", "pytorch", "repeat", "square", "tensorrt", "tensorrtllm", "vllm",
})  # fmt: skip
"""Triton's backends whose models are not served here, and python, whose models need no such setting."""
_HINTS = {
    f"{ONNX},enable-global-threadpool": "each session has its own threads",
    f"{ONNX},intra_op_thread_count": "it applies to that pool only; set a model's threads in its config.pbtxt",
    f"{ONNX},inter_op_thread_count": "it applies to that pool only; set a model's threads in its config.pbtxt",
    "python,shm-default-byte-size": "shared memory grows as needed",
    "python,shm-growth-byte-size": "shared memory grows as needed",
    "python,shm-region-prefix-name": "shared memory is unnamed",
    "python,stub-timeout-seconds": "the time limit for opening a model is 300 s",
}
_MAX_ROWS = 2**20


def parse(rules: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read rules of the form `[BACKEND,]SETTING=VALUE`.

    Returns: the settings by backend; the key "" is for all backends. Raises: ValueError.
    """
    settings: dict[str, dict[str, str]] = {"": {}, ONNX: {}, TENSORFLOW: {}}
    for rule in rules:
        qualified_name, equals, value = rule.partition("=")
        backend, _, setting = qualified_name.rpartition(",")
        if not equals or not setting:
            raise ValueError(f"{rule!r} must have the form [BACKEND,]SETTING=VALUE")
        if qualified_name in _HINTS or backend in OTHER_BACKENDS:
            continue
        if backend not in settings:
            known = f"'{ONNX}' and '{TENSORFLOW}'"
            raise ValueError(f"{rule!r}: backend '{backend}' has no such settings, only {known} have")
        checks = {MAX_BATCH_SIZE: _rows_problem} | (_TENSORFLOW_CHECKS if backend == TENSORFLOW else {})
        if setting not in checks:
            raise ValueError(f"{rule!r}: '{setting}' cannot be set, only {_quoted_list(checks)}")
        if (problem := checks[setting](value)) is not None:
            raise ValueError(f"{rule!r}: the value must be {problem}, not {value!r}")
        if settings[backend].setdefault(setting, value) != value:
            raise ValueError(f"{rule!r}: set twice with different values")
    return settings


def ineffective_rules(rules: Sequence[str]) -> list[str]:
    """Say which rules have no effect, and why: they concern Triton's own backends, or models not served here."""
    texts = []
    for name in (rule.partition("=")[0] for rule in rules):
        backend = name.partition(",")[0]
        if name in _HINTS or backend in OTHER_BACKENDS:
            reason = _HINTS.get(name, f"backend {backend} has no settings")
            texts.append(f"--backend-config {name} has no effect: {reason}")
    return texts


def default_rows(rules: Sequence[str], backend: str, default: int) -> int:
    """Return the max_batch_size that completes the configuration of a backend's models; `default` if no rule sets it.

    A backend's own rule takes precedence. 0: a model is batched only if its configuration says so.
    """
    settings = parse(rules)
    return int(settings[backend].get(MAX_BATCH_SIZE) or settings[""].get(MAX_BATCH_SIZE) or default)


def tensorflow_options(rules: Sequence[str]) -> Mapping[str, str]:
    """Return the options that the Loader gets for every TensorFlow model."""
    fraction = parse(rules)[TENSORFLOW].get("gpu-memory-fraction")
    return {} if fraction is None else {"gpu_memory_fraction": str(float(fraction))}


def _rows_problem(value: str) -> str | None:
    is_valid = value.isascii() and value.isdigit() and int(value) <= _MAX_ROWS
    return None if is_valid else f"a whole number from 0 to {_MAX_ROWS}"


def _fraction_problem(value: str) -> str | None:
    try:
        is_valid = 0 <= float(value) <= 1
    except ValueError:
        is_valid = False
    return None if is_valid else "a number from 0 to 1"


def _placement_problem(value: str) -> str | None:
    return None if value.lower() in {"true", "on", "1"} else "true, since TensorFlow 2 always uses soft placement"


def _version_problem(value: str) -> str | None:
    return None if value == "2" else "2, which also serves SavedModels of TensorFlow 1"


_TENSORFLOW_CHECKS: dict[str, Callable[[str], str | None]] = {
    "gpu-memory-fraction": _fraction_problem, "allow-soft-placement": _placement_problem, "version": _version_problem,
}  # fmt: skip
"""Further settings of Triton's TensorFlow backend. Source: its README."""


def _quoted_list(names: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}'" for name in names)
