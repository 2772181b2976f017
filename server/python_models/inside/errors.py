"""Errors of Python models: those that model.py creates, and the text of its exceptions for clients.

Source: python_backend, src/pb_error.h and src/pb_stub.cc; pybind11's `error_already_set::what`, which produces Triton's
texts.
"""

from __future__ import annotations

import enum
import traceback
from pathlib import Path
from typing import Any

from penstock.backends.errors import Code

_PACKAGE_DIR = str(Path(__file__).parent)
_IMPORTLIB = "<frozen importlib"


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """Raised by model.py, and in it for an invalid call."""


class InvalidAnswerError(Exception):
    """The result of `execute` cannot be sent; clients receive the text unchanged."""


class ErrorCode(enum.IntEnum):
    """Triton's error codes."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


_CODES = {
    ErrorCode.UNKNOWN: Code.UNKNOWN,
    ErrorCode.INTERNAL: Code.INTERNAL,
    ErrorCode.NOT_FOUND: Code.NOT_FOUND,
    ErrorCode.INVALID_ARG: Code.INVALID,
    ErrorCode.UNAVAILABLE: Code.NOT_READY,
    ErrorCode.UNSUPPORTED: Code.UNSUPPORTED,
    ErrorCode.ALREADY_EXISTS: Code.ALREADY_EXISTS,
    ErrorCode.CANCELLED: Code.CANCELLED,
}
_ERROR_CODES = {code.name: error for error, code in _CODES.items()}
_ERROR_CODES |= {Code.OVERLOADED.name: ErrorCode.UNAVAILABLE, Code.EXPIRED.name: ErrorCode.UNAVAILABLE}


class TritonError:
    """An error that is the answer to one request."""

    __slots__ = ("_code", "_message")

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    def __init__(self, message: str | bytes, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = as_text("the message of a TritonError", message)
        self._code = ErrorCode(code)

    def code(self) -> ErrorCode:
        return self._code

    def message(self) -> str:
        return self._message


def as_text(name: str, value: Any) -> str:
    """Return a text passed by model.py as `str`; it may be `bytes`, like the elements of a string tensor.

    Raises: TypeError. Source: pybind11's caster of std::string, which accepts both.
    """
    if isinstance(value, bytes | bytearray):
        return value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str or bytes, not {type(value)}")
    return value


def replace_surrogates(text: str) -> str:
    """Replace invalid Unicode: JSON cannot encode a lone surrogate."""
    return text.encode("utf-8", "replace").decode()


def encode_error(message: str, code: ErrorCode = ErrorCode.INTERNAL) -> dict[str, str]:
    """Return an error in the format of messages.py."""
    return {"code": _CODES[code].name, "message": replace_surrogates(message)}


def decode_error(encoded: dict[str, str]) -> TritonError:
    """Create the error that a message contains."""
    return TritonError(encoded["message"], _ERROR_CODES[encoded["code"]])


def failure_text(error: BaseException) -> str:
    """Format an exception of user code as Triton does: its type and text, and its frames, innermost first."""
    if isinstance(error, InvalidAnswerError):
        return replace_surrogates(str(error))
    lines = [
        f"  {frame.f_code.co_filename}({line}): {frame.f_code.co_name}\n"
        for frame, line in reversed(list(traceback.walk_tb(error.__traceback__)))
        if not frame.f_code.co_filename.startswith((_PACKAGE_DIR, _IMPORTLIB))
    ]
    where = f"\n\nAt:\n{''.join(lines)}" if lines else ""
    return replace_surrogates(f"{type(error).__name__}: {_error_text(error)}{where}")


def traceback_text(error: BaseException) -> str:
    """Format an exception for the log: its type and text, and its traceback, from the first frame of user code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith((_PACKAGE_DIR, _IMPORTLIB)):
        frames = frames.tb_next
    lines = "".join(traceback.format_exception(type(error), error, frames))
    return f"{type(error).__name__}: {_error_text(error)}" + (f"\n{lines}" if frames is not None else "")


def line_of_error(file: str, error: BaseException) -> int:
    """Return the line of a file that raised an exception, 0 if none."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno or 0
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return lines[-1] if lines else 0


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a user's own __str__
        return "<MESSAGE UNAVAILABLE>"
