"""Providers: which of ONNX Runtime's a device uses, with what options, and why one did not start.

Used by onnx.py and onnx_cuda.py. Sources: ONNX Runtime's documentation of the CUDA and TensorRT providers, and
cuda_execution_provider_info.cc; options not set here have ONNX Runtime's own defaults.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import onnxruntime

from .errors import Code, InferError
from .onnx_log import route_log

CUDA = "CUDAExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
CPU = "CPUExecutionProvider"
ROWS_OPTION = "penstock.rows"
_LIBRARIES = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}
_CUDNN = "libcudnn.so.9", "libcudnn.so"
_SHARED_LIBRARY = "libonnxruntime_providers_shared.so"
_FATAL_SEVERITY = 4
RESERVED_OPTIONS = ("device_id", "user_compute_stream", "has_user_compute_stream", "enable_cuda_graph")
_ADVICE = {
    CUDA: "pip install 'penstock[gpu]' installs the CUDA and cuDNN libraries",
    TENSORRT: "TensorRT is not part of ONNX Runtime: pip install tensorrt",
}
_CUDA_DEFAULTS = {
    # EXHAUSTIVE, ONNX Runtime's default, tries every algorithm for every new shape: a stall of seconds each time
    "cudnn_conv_algo_search": "HEURISTIC",
    "cudnn_conv_use_max_workspace": "1",
    "do_copy_in_default_stream": "1",
}

Provider = tuple[str, dict[str, str]]


def wants_tensorrt(options: Mapping[str, str]) -> bool:
    """Whether TensorRT is configured."""
    return options.get("penstock.tensorrt") == "1" or any(name.startswith("tensorrt.") for name in options)


def cuda_options(
    device: int, options: Mapping[str, str], stream: int, *, graphs: bool, budget_bytes: int = 0
) -> dict[str, str]:  # fmt: skip
    """Make the options of the CUDA provider: Penstock's defaults, overridden by the model's (`cuda.<name>`).

    Raises: InferError (INVALID) for options that Penstock sets itself, and for copies on a separate stream: they race.
    Source: onnxruntime issue 4829 for the last.
    """
    configured = options_with_prefix(options, "cuda.")
    for name in RESERVED_OPTIONS:
        if name in configured and name != "enable_cuda_graph":
            raise InferError(Code.INVALID, f"option 'cuda.{name}' cannot be set: Penstock sets it itself")
    if configured.get("do_copy_in_default_stream", "1") != "1":
        raise InferError(Code.INVALID, "option 'cuda.do_copy_in_default_stream' must be 1: 0 gives wrong results")
    result = dict(_CUDA_DEFAULTS)
    # powers of two waste memory if shapes are few and known, and save allocations otherwise
    result["arena_extend_strategy"] = "kSameAsRequested" if options.get(ROWS_OPTION) else "kNextPowerOfTwo"
    if budget_bytes:
        result["gpu_mem_limit"] = str(budget_bytes)
    return result | configured | reserved_options(device, stream) | {"enable_cuda_graph": "1" if graphs else "0"}


def check_provider(provider: str) -> None:
    """Load pip's CUDA libraries, once. Raises: InferError (UNSUPPORTED) if this build lacks the provider."""
    if provider not in onnxruntime.get_available_providers():
        text = f"the installed onnxruntime {onnxruntime.__version__} has no {_short(provider)}"
        advice = "pip install 'penstock[gpu]'" if provider == CUDA else "install onnxruntime-gpu"
        raise InferError(Code.UNSUPPORTED, f"{text}{_conflict_note()}: {advice}")
    _preload()


def check_cudnn(options: Mapping[str, str]) -> None:
    """Raise InferError (UNSUPPORTED) if cuDNN is missing, unless the CUDA provider's options disable it.

    ONNX Runtime looks for it in the first run that needs it: the model would load, and every run fail. Source:
    cudnn_loader.cc, for the names too.
    """
    if options.get("enable_cudnn", "1") == "0":
        return
    first_error = ""
    for name in _CUDNN:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            first_error = first_error or str(error)
        else:
            return
    advice = f"{_ADVICE[CUDA]}; for a model that does not need it, set option 'cuda.enable_cudnn' to 0"
    raise InferError(Code.UNSUPPORTED, f"{first_error} ({advice})")


def start_failure(provider: str) -> str:
    """Say why ONNX Runtime did not start one of its providers: the loader's text if a library is missing."""
    folder = Path(onnxruntime.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / _SHARED_LIBRARY), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / _LIBRARIES[provider]))
    except OSError as error:
        return f"{str(error).replace(f'{folder}/', '')} ({_ADVICE[provider]}){_conflict_note()}"
    return f"it gave no reason{_conflict_note()}"


def options_with_prefix(options: Mapping[str, str], prefix: str) -> dict[str, str]:
    """Return a model's options for one provider."""
    return {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}


def reserved_options(device: int, stream: int) -> dict[str, str]:
    """Return the options that Penstock sets for either provider."""
    return {"device_id": str(device), "user_compute_stream": str(stream)}


def _short(provider: str) -> str:
    return {CUDA: "CUDA", TENSORRT: "TensorRT"}.get(provider, provider)


def _conflict_note() -> str:
    """Report if both builds of ONNX Runtime are installed: they share one folder, and the last one wins."""
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return ""
    return "; onnxruntime and onnxruntime-gpu are both installed and overwrite each other: uninstall both, then "


"install one"


@cache
def _preload() -> None:
    # ONNX Runtime's own logger repeats what it raises, with the machine's name, and warns on every load
    route_log()  # which sets its own severity
    onnxruntime.set_default_logger_severity(_FATAL_SEVERITY)
    preload = getattr(onnxruntime, "preload_dlls", None)
    if preload is not None:
        # it prints what it does not find, which the system may have
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            preload()
