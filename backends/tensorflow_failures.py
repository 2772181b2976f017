"""Failures of TensorFlow: classifies exceptions by code and text.

Used by tensorflow.py and its Binding. It needs no TensorFlow: an OpError is identified by its `error_code`.
"""

from __future__ import annotations

import re
from pathlib import Path

from .errors import RETRY_AFTER_NS, Code, DeviceLost, InferError, OutOfMemory
from .libraries import ADVICE

MAX_TEXT_CHARS = 2000
"""Characters of a message that are passed on: an assertion can be told to print whole tensors."""

INVALID_ARGUMENT, EXHAUSTED, OUT_OF_RANGE = 3, 8, 11
"""Codes of tf.errors. Source: absl's StatusCode."""

_STACK = re.compile(
    r"\s*\n\s*(?:Original stack trace for|Errors may have originated|Stack trace for|Traceback \(most recent call ).*",
    re.DOTALL,
)
_PYTHON_PREFIX = re.compile(
    # the prefix before the operation's own text: where Python created it
    r"^.*?Graph execution error:\s*(?:Detected at node .*?\n(?:Node: '[^']*'|<stack traces [^>]*>)\n)?",
    re.DOTALL,
)
_ROOT_ERRORS = re.compile(
    r"^\d+ root error\(s\) found\.\s*\(0\)\s*(?:[A-Za-z_ ]+: )?(.*?)\s*(?:\n\s*\(1\).*)?$", re.DOTALL
)
_NODE_NAMES = re.compile(
    r"\n\s*\[\[[^\n]*\]\]|\s*\[\[\{\{[^\n]*\]\]|\{\{(?:function_)?node [^}]*\}\}\s*|\s*\[Op:\w+\][^\n]*"
)
_HINT = re.compile(
    r"\s*Hint: If you want to see a list of allocated tensors.*|\s*To inspect available tag-sets.*", re.DOTALL
)
_DEVICE = re.compile(r"/job:\w+/replica:\d+/task:\d+/device:(\w+:\d+)")
_DEVICE_LOST = re.compile(
    r"CUDA_ERROR_(?:ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|LAUNCH_FAILED|LAUNCH_TIMEOUT|MISALIGNED_ADDRESS|HARDWARE_STACK_ERROR"
    r"|INVALID_PC|INVALID_ADDRESS_SPACE|ASSERT|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|CONTEXT_IS_DESTROYED|NO_DEVICE"
    r"|DEVICE_UNAVAILABLE|UNKNOWN)\b"
    r"|an illegal memory access was encountered|unspecified launch failure|misaligned address"
    r"|device-side assert triggered|uncorrectable (?:ECC|NVLink) error|no CUDA-capable device is detected"
)
"""CUDA's errors after which every call of the process's context fails, in TensorFlow's wording."""
_MISSING_PYTHON = "Missing py trampoline"
"""The error of a model that was saved with a Python function in it: only the program that saved it can run it."""
_UNREGISTERED = re.compile(r"Op type not registered '[^']*'")
"""The error of a graph with a custom operation; what follows names the machine, and suggests tf.contrib."""
_OUT_OF_MEMORY = re.compile(
    r"CUDA_ERROR_OUT_OF_MEMORY|CUDNN_STATUS_ALLOC_FAILED|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc"
)


def run_error(error: Exception, *, on_gpu: bool = False) -> InferError:
    """Make the InferError of a failed run: INVALID if TensorFlow blames its input, else INTERNAL.

    Returns: OutOfMemory or DeviceLost if that is what happened. The first is OVERLOADED: the same request may fit when
    others have ended. `on_gpu`: whether there is a device that can be lost.
    """
    text, code = error_text(error), getattr(error, "error_code", None)
    if isinstance(error, UnicodeDecodeError):
        code = INVALID_ARGUMENT  # raised for the text of an OpError that quotes its input, which is not UTF-8
    if isinstance(error, MemoryError) or code == EXHAUSTED or _OUT_OF_MEMORY.search(text):
        return OutOfMemory(Code.OVERLOADED, text or "out of memory", RETRY_AFTER_NS)
    if on_gpu and _DEVICE_LOST.search(text):
        return DeviceLost(Code.NOT_READY, text)
    if _MISSING_PYTHON in text:
        text = "the model calls a Python function (tf.py_function, tf.numpy_function)"
        return InferError(Code.INTERNAL, f"{text}, which a SavedModel does not contain")
    return InferError(Code.INVALID if code in {INVALID_ARGUMENT, OUT_OF_RANGE} else Code.INTERNAL, text)


def load_error(error: Exception, model: Path) -> InferError:
    """Make the InferError of a model that cannot be loaded: INVALID, or OutOfMemory."""
    text = error_text(error, model)
    if isinstance(error, MemoryError) or getattr(error, "error_code", None) == EXHAUSTED:
        return OutOfMemory(Code.OVERLOADED, text or "out of memory", RETRY_AFTER_NS)
    unregistered = _UNREGISTERED.match(text)
    return InferError(Code.INVALID, f"{unregistered[0]}; {ADVICE}" if unregistered else text)


def error_text(error: Exception, model: Path | None = None) -> str:
    """Return TensorFlow's text without its graph's nodes and stacks, its device names and the model's folder."""
    text = str(getattr(error, "message", None) or error)
    if isinstance(error, UnicodeDecodeError):
        text = error.object.decode("utf-8", "backslashreplace")
    text = _HINT.sub("", _STACK.sub("", _PYTHON_PREFIX.sub("", text)))
    text = _ROOT_ERRORS.sub(r"\1", _NODE_NAMES.sub("", text).strip()).strip()
    if model is not None:
        for folder in (model, model.resolve()):
            text = text.replace(f"{folder}/", "").replace(str(folder), "the model's folder")
    text = _DEVICE.sub(r"\1", text).replace("file b'", "file '")
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}..."
