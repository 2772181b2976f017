"""Answers: turns a model's results and exceptions into answers. Source: deepaas 2.6.0 on aiohttp, api/v2/predict.py.

Each answer has the form of carrying/messages.py. JSON is encoded as by json.dumps, including NaN. numpy's values, which
the original could not encode, become their item() or tolist().
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.server.carrying.messages import pack_answer
from penstock.server.deepaas.messages import JSON, TEXT, TROUBLE

from .forms import CONTROL, parameters_of

_PLAIN_JSON = b"application/json"
_MIN_STATUS = 200
_OWN_HEADERS = ("content-type", "content-length", "transfer-encoding", "connection", "date", "server")


class Refusal(Exception):  # noqa: N818 - no error of ours: the client's
    """A call must not be made, or its result not be sent: the client receives `answer` instead."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self.answer = answer


def _numpy_value(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.generic):
            return value.item()
        if isinstance(value, numpy.ndarray):
            return value.tolist()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


write_json = json.JSONEncoder(default=_numpy_value).encode
"""Encode a value as the original does. Raises: TypeError, ValueError, RecursionError for what is not JSON."""


def json_answer(value: Any) -> bytes:
    """Answer with JSON. Raises: as write_json."""
    return pack_answer(200, JSON, write_json(value).encode())


def json_error(status: int, messages: Any) -> bytes:
    """Answer with error messages, by argument."""
    return pack_answer(status, _PLAIN_JSON, json.dumps(messages).encode())


def text_error(status: int, text: str) -> bytes:
    """Answer with an error text."""
    return pack_answer(status, TEXT, text.encode("utf-8", "replace"))


def text_answer(status: int, reason: str) -> bytes:
    """Answer with a status and its reason."""
    return text_error(status, f"{status}: {reason}")


def error_answer(error: BaseException, *, shown: bool = False) -> bytes:
    """Answer with a model's exception, and log it. `shown`: include its message."""
    answer = _http_answer(error)
    if answer is not None:
        return answer
    log(error)
    details = f"\n\n{type(error).__name__}: {_text_of(error)}" if shown else ""
    return text_error(500, TROUBLE.decode() + details)


def log(error: BaseException) -> None:
    """Log an error, unless user code has closed the log."""
    with contextlib.suppress(Exception):
        traceback.print_exception(error)


def _text_of(error: Any) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - user code's own
        return ""


def _http_answer(error: BaseException) -> bytes | None:
    """Answer with an HTTPException of aiohttp as it specifies; None for another error."""
    if (failed := failed_http_exception(error)) is not None:
        return text_answer(*failed)
    web = sys.modules.get("aiohttp.web_exceptions")
    if web is None or not isinstance(error, web.HTTPException):
        return None
    if error.status < _MIN_STATUS:  # HTTPException itself has none
        return text_answer(500, str(error.reason))
    body = error.body
    content = bytes(body) if isinstance(body, bytes | bytearray) else (error.text or "").encode()
    kind = error.headers.get("Content-Type", "application/octet-stream" if content else "")
    lines = [f"{name}: {value}" for name, value in error.headers.items() if name.lower() not in _OWN_HEADERS]
    if any(map(CONTROL.search, (kind, *lines))):
        return None  # the rest of a line end would be a header line of its own: aiohttp rejects such a header too
    return _pack(error.status, kind, lines, content)


def failed_http_exception(error: BaseException) -> tuple[int, str] | None:
    """Return the HTTPException that aiohttp failed to construct only because of its reason; None for another error.

    Before 3.9, a reason could be an exception, or have several lines: `raise HTTPBadRequest(reason=error)` is in the
    template of DEEPaaS modules, and in most of them. Returns: its status, and its reason.
    """
    web, at = sys.modules.get("aiohttp.web_exceptions"), error.__traceback__
    if web is None or at is None or not isinstance(error, TypeError | ValueError):
        return None
    while at.tb_next is not None:
        at = at.tb_next
    names = at.tb_frame.f_locals
    made, reason = names.get("self"), names.get("reason")
    if not isinstance(made, web.HTTPException) or reason is None:
        return None
    return made.status_code if made.status_code >= _MIN_STATUS else 500, _text_of(reason)


def content_answer(value: Any, content_type: str) -> bytes:
    """Answer with a value as the body.

    Raises: TypeError for a value without content; OSError for a missing file; ValueError for an invalid content type.
    """
    if not content_type.isprintable():
        raise ValueError(f"{content_type!r} is not a content type")
    lines = []
    if isinstance(value, io.BufferedReader):
        # reopened by name, as in the original: earlier reads, or that it is closed, do not matter
        path = Path(os.fsdecode(value.name))
        lines = _attachment(str(path))
        content = path.read_bytes()
    elif isinstance(value, str):
        content = value.encode(parameters_of(content_type).get("charset", "utf-8"))
    elif isinstance(value, io.BytesIO):
        lines = _attachment(getattr(value, "name", None))
        content = value.read()
    elif isinstance(value, io.StringIO):
        lines = _attachment(getattr(value, "name", None))
        content = value.read().encode()
    elif value is None or isinstance(value, bytes | bytearray | memoryview):
        content = bytes(value or b"")
    else:
        raise TypeError(f"{type(value).__name__} cannot be sent as {content_type}")
    return _pack(200, content_type, lines, content)


def _attachment(name: Any) -> list[str]:
    """Return the header with which aiohttp names a file that has a name, such as `buffer.name = "output.pdf"`."""
    if not isinstance(name, str) or not name or name[0] == "<" or name[-1] == ">":
        return []
    return [f'Content-Disposition: attachment; filename="{quote(os.fsencode(Path(name).name))}"']


def _pack(status: int, content_type: str, more_lines: list[str], content: bytes) -> bytes:
    """Encode an answer with further header lines, each with its line end."""
    lines = "".join(f"{line}\r\n" for line in [content_type, *more_lines]) if more_lines else content_type
    return pack_answer(status, lines.encode("utf-8", "surrogateescape"), content)
