"""Failures of ONNX Runtime: classifies exceptions by type and text. Used by onnx.py and its Binding.

ONNX Runtime has no code for "out of memory", "stopped" or "the device is gone": all are FAIL or a bare RuntimeError.
"""

from __future__ import annotations

import re
from pathlib import Path

from .cuda import LOST_STATUSES, UNAVAILABLE_STATUSES
from .errors import RETRY_AFTER_NS, Code, DeviceLost, InferError, OutOfMemory, RunStopped
from .libraries import ADVICE

_SOURCE_PATH = re.compile(r"\S*/([\w.-]+\.(?:cc|cpp|cu|cuh|h|hpp)\b)")
# "cuda_call.cc:154 <signature> cuda_call.cc:146 <signature> CUDA failure 46: ...": the throwing place is always the
# same
_CUDA_CALL = re.compile(r"cuda_call\.cc:\d+ .*?(?=\b[A-Z_]+ failure -?\d+: )", re.DOTALL)
# clients must not see the machine's name
_HOSTNAME = re.compile(r" ; hostname=[^;]*(?=;|$)")
_CUDNN_PLAN = " with the cudnn frontend json:"
"""A page of JSON follows."""
_STATUS = re.compile(r"^(?:\[ONNXRuntimeError\] : (\d+) : \w+ : )")
_BOUND_RUN_PREFIX = "Error in execution: "
_NUMBER = re.compile(r"\d+")
_STOPPED = "Exiting due to terminate flag being set to true"
_OUT_OF_MEMORY = re.compile(
    r"Failed to allocate memory for requested buffer"
    r"|std::bad_alloc"
    r"|Available memory of \d+ is smaller than requested"
    r"|CUDA (?:failure|error) 2:"
    r"|cudaErrorMemoryAllocation|CUDA(?: error:)? out of memory"
    r"|CU(?:DNN|BLAS)_STATUS_\w*ALLOC\w*FAILED|CUBLAS failure 3:"
)
_UNAVAILABLE = re.compile(
    r"CUDA (?:failure|error) (?:" + "|".join(map(str, sorted(UNAVAILABLE_STATUSES))) + r"):"
    r"|CUDA_PATH is set but CUDA"
    r"|Please install TensorRT libraries"
)
_UNREGISTERED = "is not a registered function/op"
_DEVICE_LOST = re.compile(
    r"CUDA (?:failure|error) (?:" + "|".join(map(str, sorted(LOST_STATUSES))) + r")\b"
    r"|an illegal memory access was encountered|unspecified launch failure|device-side assert triggered"
    r"|uncorrectable (?:ECC|NVLink) error|no CUDA-capable device is detected|misaligned address"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|an illegal instruction was encountered"
    r"|[Dd]evice (?:has been |was )?removed"
)


def run_error(error: Exception, *, on_gpu: bool = False) -> InferError:
    """Make the InferError of a failed run: INVALID if ONNX Runtime blames an argument, else INTERNAL.

    Returns: OutOfMemory, RunStopped or DeviceLost if the text says so. The first is OVERLOADED: the same request may
    fit when others have ended. `on_gpu`: whether there is a device that can be lost; on the CPU such texts could only
    come from a request.
    """
    text = error_text(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return OutOfMemory(Code.OVERLOADED, text, RETRY_AFTER_NS)
    if _STOPPED in text:
        return RunStopped(Code.EXPIRED, text)
    name = type(error).__name__
    if on_gpu and (name == "DeviceReset" or _DEVICE_LOST.search(text)):
        return DeviceLost(Code.NOT_READY, text)
    return InferError(Code.INVALID if name == "InvalidArgument" else Code.INTERNAL, text)


def is_unavailable(error: Exception) -> bool:
    """Whether a session could not be made because the GPU, its driver or a library is unavailable."""
    return _UNAVAILABLE.search(str(error)) is not None


def failure_kind(error: InferError) -> str:
    """Return what failures of one kind have in common: their text without numbers and without a status."""
    return _NUMBER.sub("#", without_status(error))


def without_status(error: InferError) -> str:
    """Return the text of a failure as a fully bound run reports it: without a status."""
    return re.sub(r"^onnx runtime error \d+: ", "", error.message)


def advice(text: str) -> str:
    """Return advice to append to ONNX Runtime's text, if it has none of its own; else ""."""
    return f"; {ADVICE}" if _UNREGISTERED in text else ""


def error_text(error: Exception, model: Path | None = None) -> str:
    """Return ONNX Runtime's text without its source folders, the model's folder and the machine's name.

    Source: the beginning is that of Triton's onnxruntime_backend ("onnx runtime error 2: ...").
    """
    text = _SOURCE_PATH.sub(r"\1", str(error).partition(_CUDNN_PLAN)[0]).removeprefix(_BOUND_RUN_PREFIX)
    if " failure " in text:
        text = _HOSTNAME.sub(" ", _CUDA_CALL.sub("", text)).rstrip(" ;\n")
    if model is not None:
        for folder in (model.parent, model.parent.resolve()):
            text = text.replace(f"{folder}/", "")
    return _STATUS.sub(r"onnx runtime error \1: ", text).rstrip()
