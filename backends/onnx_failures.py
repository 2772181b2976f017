"""Failures of ONNX Runtime: what an exception means, told from its type and words. Called by onnx.py and its Binding.

ONNX Runtime has no code for "out of memory", "stopped" or "the device is gone": all are FAIL or a bare RuntimeError.
"""

from __future__ import annotations

import re
from pathlib import Path

from .cuda import ABSENT, LOST
from .errors import RETRY_AFTER_NS, Code, DeviceLost, InferError, OutOfMemory, RunStopped

_SOURCE_PLACE = re.compile(r"\S*/([\w.-]+\.(?:cc|cpp|cu|cuh|h|hpp)\b)")
# "cuda_call.cc:154 <signature> cuda_call.cc:146 <signature> CUDA failure 46: ...": who throws it is always the same
_CUDA_CALL = re.compile(r"cuda_call\.cc:\d+ .*?(?=\b[A-Z_]+ failure -?\d+: )", re.DOTALL)
# the machine's name is no client's business
_HOSTNAME = re.compile(r" ; hostname=[^;]*(?=;|$)")
_PLAN = " with the cudnn frontend json:"
"""A page of JSON follows."""
_STATUS = re.compile(r"^(?:\[ONNXRuntimeError\] : (\d+) : \w+ : )")
_BOUND = "Error in execution: "
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
_ABSENT = re.compile(
    r"CUDA (?:failure|error) (?:" + "|".join(map(str, sorted(ABSENT))) + r"):"
    r"|CUDA_PATH is set but CUDA"
    r"|Please install TensorRT libraries"
)
_UNREGISTERED = "is not a registered function/op"
_LOST = re.compile(
    r"CUDA (?:failure|error) (?:" + "|".join(map(str, sorted(LOST))) + r")\b"
    r"|an illegal memory access was encountered|unspecified launch failure|device-side assert triggered"
    r"|uncorrectable (?:ECC|NVLink) error|no CUDA-capable device is detected|misaligned address"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|an illegal instruction was encountered"
    r"|[Dd]evice (?:has been |was )?removed"
)


def run_error(error: Exception, *, on_gpu: bool = False) -> InferError:
    """Make the refusal of a run that failed: INVALID where ONNX Runtime blames an argument, else INTERNAL.

    Returns: OutOfMemory, RunStopped or DeviceLost where the words say so. OVERLOADED for the first: the same request
    may fit when others have ended. `on_gpu`: whether there is a device that can be lost: on the CPU such words could
    only come out of a request.
    """
    text = words(error)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        return OutOfMemory(Code.OVERLOADED, text, RETRY_AFTER_NS)
    if _STOPPED in text:
        return RunStopped(Code.EXPIRED, text)
    name = type(error).__name__
    if on_gpu and (name == "DeviceReset" or _LOST.search(text)):
        return DeviceLost(Code.NOT_READY, text)
    return InferError(Code.INVALID if name == "InvalidArgument" else Code.INTERNAL, text)


def is_absent(error: Exception) -> bool:
    """Tell whether a session could not be made because the GPU, its driver or a library cannot be had."""
    return _ABSENT.search(str(error)) is not None


def kind(error: InferError) -> str:
    """Give what failures of one kind have in common: their words without numbers and without a status."""
    return _NUMBER.sub("#", without_status(error))


def without_status(error: InferError) -> str:
    """Give the words of a failure as a run with all bound tells them: without a status."""
    return re.sub(r"^onnx runtime error \d+: ", "", error.message)


def advice(text: str) -> str:
    """Say behind ONNX Runtime's words what to do about them, where they do not; else ""."""
    if _UNREGISTERED in text:
        setting = "runtime.custom_op_libraries in penstock.toml"
        return f"; if it is no operator of ONNX Runtime's, name the library that has it: {setting}"
    return ""


def words(error: Exception, model: Path | None = None) -> str:
    """Give ONNX Runtime's words, its source folders, the model's folder and the machine's name left out.

    Source: the beginning is that of Triton's onnxruntime_backend ("onnx runtime error 2: ...").
    """
    text = _SOURCE_PLACE.sub(r"\1", str(error).partition(_PLAN)[0]).removeprefix(_BOUND)
    if " failure " in text:
        text = _HOSTNAME.sub(" ", _CUDA_CALL.sub("", text)).rstrip(" ;\n")
    if model is not None:
        for folder in (model.parent, model.parent.resolve()):
            text = text.replace(f"{folder}/", "")
    return _STATUS.sub(r"onnx runtime error \1: ", text).rstrip()
