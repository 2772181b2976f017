"""The service of a handler's worker: it imports the handler, and calls it, one request at a time.

Its settings: {"handler": "module:name", "strict": bool}. A call is a line of JSON, {"method", "type", "headers"} as
the handler is to see them, and the body after it; the answer is that of carrying/messages.py.
Source: abejaruntime 1.1.1, what a handler is given and what becomes of what it returns.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.carrying.messages import pack_answer
from penstock.server.ipc.channel import Channel

Reply = tuple[bytes, Sequence[Array | None] | None]


def open_service(settings: dict[str, Any], channel: Channel) -> AbejaInside:
    """Import the handler. Raises: InferError (INVALID)."""
    sys.path.insert(0, "")
    module, _, name = settings["handler"].partition(":")
    try:
        return AbejaInside(getattr(importlib.import_module(module), name))
    except BaseException as error:  # noqa: BLE001 - whatever it is, there is no handler
        traceback.print_exception(error)
        raise InferError(Code.INVALID, f"handler '{settings['handler']}': {type(error).__name__}: {error}") from None


class AbejaInside:
    """One handler. Threads: the main one."""

    listens = False

    def __init__(self, handler: Callable[[Any, Any], Any]) -> None:
        self._handler = handler

    def opened(self) -> Reply:
        """Say nothing."""
        return b"", None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Call the handler."""
        head, _, content = body.partition(b"\n")
        json.loads(head)
        answer = self._handler({}, {})
        return pack_answer(200, b"text/plain", str(answer).encode() + content), None

    def told(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Nothing is told."""

    def close(self) -> None:
        """Nothing is left."""
