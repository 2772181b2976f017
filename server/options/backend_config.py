"""Backend config: the rules of --backend-config, Triton's flag for settings shared by all models of a backend.

Called by Settings, and where models are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

ONNX, TENSORFLOW = "onnxruntime", "tensorflow"
SETTING = "default-max-batch-size"
OTHERS = frozenset({
    "dali", "fil", "identity", "openvino", "python", "pytorch", "repeat", "square", "tensorrt", "tensorrtllm", "vllm",
})  # fmt: skip
"""Triton's backends whose models are not served here, and python, whose models need no such setting."""
_HINTS = {
    f"{ONNX},enable-global-threadpool": "each session has threads of its own",
    f"{ONNX},intra_op_thread_count": "it is for that pool; config.pbtxt says a model's own",
    f"{ONNX},inter_op_thread_count": "it is for that pool; config.pbtxt says a model's own",
    "python,shm-default-byte-size": "shared memory grows by itself",
    "python,shm-growth-byte-size": "shared memory grows by itself",
    "python,shm-region-prefix-name": "shared memory has no name",
    "python,stub-timeout-seconds": "a model may take 300 s to open",
}
_MOST_ROWS = 2**20


def parse(rules: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read rules of the form `[BACKEND,]SETTING=VALUE`.

    Returns: the settings by backend; the key "" is for all backends. Raises: ValueError.
    """
    found: dict[str, dict[str, str]] = {"": {}, ONNX: {}, TENSORFLOW: {}}
    for rule in rules:
        named, equals, value = rule.partition("=")
        backend, _, setting = named.rpartition(",")
        if not equals or not setting:
            raise ValueError(f"got {rule!r}, wanted [BACKEND,]SETTING=VALUE")
        if named in _HINTS or backend in OTHERS:
            continue
        if backend not in found:
            known = f"'{ONNX}' and '{TENSORFLOW}'"
            raise ValueError(f"{rule!r}: there is no backend '{backend}' with such settings, only {known}")
        checks = {SETTING: _rows} | (_TENSORFLOW if backend == TENSORFLOW else {})
        if setting not in checks:
            raise ValueError(f"{rule!r}: '{setting}' cannot be set, only {_listed(checks)}")
        if (problem := checks[setting](value)) is not None:
            raise ValueError(f"{rule!r}: got {value!r}, {problem}")
        if found[backend].setdefault(setting, value) != value:
            raise ValueError(f"{rule!r}: said twice, and differently")
    return found


def without_effect(rules: Sequence[str]) -> list[str]:
    """Say which rules have no effect, and why: they concern Triton's own backends, or models not served here."""
    found = []
    for name in (rule.partition("=")[0] for rule in rules):
        backend = name.partition(",")[0]
        if name in _HINTS or backend in OTHERS:
            why = _HINTS.get(name, f"there is nothing to set of the backend {backend}")
            found.append(f"--backend-config {name} has no effect: {why}")
    return found


def rows_of(rules: Sequence[str], backend: str, silent: int) -> int:
    """Return the max_batch_size that completes the configuration of a backend's models; `silent` if no rule sets it.

    A backend's own rule takes precedence. 0: a model is batched only if its configuration says so.
    """
    found = parse(rules)
    return int(found[backend].get(SETTING) or found[""].get(SETTING) or silent)


def tensorflow_options(rules: Sequence[str]) -> Mapping[str, str]:
    """Return the options that the Loader gets for every TensorFlow model."""
    fraction = parse(rules)[TENSORFLOW].get("gpu-memory-fraction")
    return {} if fraction is None else {"gpu_memory_fraction": str(float(fraction))}


def _rows(value: str) -> str | None:
    fits = value.isascii() and value.isdigit() and int(value) <= _MOST_ROWS
    return None if fits else f"wanted a whole number from 0 to {_MOST_ROWS}"


def _fraction(value: str) -> str | None:
    try:
        fits = 0 <= float(value) <= 1
    except ValueError:
        fits = False
    return None if fits else "wanted a number from 0 to 1"


def _placement(value: str) -> str | None:
    return None if value.lower() in {"true", "on", "1"} else "wanted true: TensorFlow 2 always places softly"


def _version(value: str) -> str | None:
    return None if value == "2" else "wanted 2: SavedModels of TensorFlow 1 are served, by TensorFlow 2"


_TENSORFLOW: dict[str, Callable[[str], str | None]] = {
    "gpu-memory-fraction": _fraction, "allow-soft-placement": _placement, "version": _version,
}  # fmt: skip
"""Further settings of Triton's TensorFlow backend. Source: its README."""


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}'" for name in names)
