"""TensorRT under ONNX Runtime: where its engines are cached, and for which shapes they are built. Used by onnx_cuda.py.

An engine takes minutes to build and fits one GPU, one version of each library and one model.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import onnxruntime

from .cuda import CudaError, Runtime, to_infer_error
from .errors import Code, InferError
from .onnx_file import row_shapes
from .onnx_providers import RESERVED_OPTIONS, ROWS_OPTION, options_with_prefix, reserved_options

ENGINE_CACHE_OPTION = "penstock.engine_cache"
_PATH_OPTIONS = ("trt_engine_cache_path", "trt_timing_cache_path")
_LIBRARIES = ("libnvinfer.so.10", "libnvinfer.so.11", "libnvinfer.so")
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")


def tensorrt_options(
    path: Path, device: int, options: Mapping[str, str], stream: int, runtime: Runtime
) -> dict[str, str]:  # fmt: skip
    """Make the options of the TensorRT provider: engines and timings are cached; `tensorrt.<name>` overrides these.

    Raises: InferError (INVALID) for options that Penstock sets itself, and if the folder cannot be made or is unknown.
    """
    configured = options_with_prefix(options, "tensorrt.")
    for name in RESERVED_OPTIONS:
        if name in configured:
            raise InferError(Code.INVALID, f"option 'tensorrt.{name}' cannot be set: Penstock sets it itself")
    result = {"trt_engine_cache_enable": "1", "trt_timing_cache_enable": "1"}
    if unset := [name for name in _PATH_OPTIONS if name not in configured]:
        result |= dict.fromkeys(unset, str(_cache_folder(options) / engine_key(path, device, runtime)))
    result |= profiles(path, options.get(ROWS_OPTION, "")) | configured | reserved_options(device, stream)
    for name in _PATH_OPTIONS:
        _make_folder(Path(result[name]))
    return result


def _make_folder(folder: Path) -> None:
    """Create a folder for this user only: engines are code. TensorRT's provider creates only a path's last part."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InferError(Code.INVALID, f"TensorRT engines cannot be stored in {folder}: {error.strerror}") from error


def engine_key(path: Path, device: int, runtime: Runtime) -> str:
    """Return a name for what an engine fits: the GPU, the versions, the model's content. Raises: InferError."""
    try:
        gpu = f"{runtime.device_name(device)}-sm{runtime.capability(device)}"
    except CudaError as error:
        raise to_infer_error(error) from error
    try:
        with path.open("rb") as file:
            model = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise InferError(Code.NOT_FOUND, f"{path.name}: {error.strerror}") from error
    text = f"{gpu}-onnxruntime{onnxruntime.__version__}-tensorrt{_version()}-{model}"
    return _NOT_IN_NAMES.sub("_", text)


def profiles(path: Path, rows: str) -> dict[str, str]:
    """Return the shapes to build engines for, from the smallest to the largest bucket of rows, the optimum.

    Empty if rows are not the only free axis: TensorRT then builds engines for shapes as they come.
    """
    shapes = row_shapes(path) if rows else None
    if not shapes:
        return {}
    counts = sorted(int(count) for count in rows.split(","))
    return {
        f"trt_profile_{which}_shapes": ",".join(
            f"{name}:{'x'.join(map(str, (count, *shape)))}" for name, shape in shapes.items()
        )
        for which, count in (("min", counts[0]), ("opt", counts[-1]), ("max", counts[-1]))
    }


def _cache_folder(options: Mapping[str, str]) -> Path:
    """Return where engines are cached. Source: XDG Base Directory, "cache". Raises: InferError."""
    configured = options.get(ENGINE_CACHE_OPTION)
    if configured:
        return Path(configured)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "tensorrt"
    except RuntimeError as error:
        text = "TensorRT engines cannot be stored: the user has no home folder; set XDG_CACHE_HOME"
        raise InferError(Code.INVALID, f"{text}, or {' and '.join(_PATH_OPTIONS)}") from error


def _version() -> str:
    for name in _LIBRARIES:
        try:
            return str(ctypes.CDLL(name).getInferLibVersion())
        except (OSError, AttributeError):
            continue
    return "unknown"
