"""The service of a handler's worker: imports the handler, and calls it for one request at a time.

Its settings: {"handler": "module:name", "strict": bool, "fallback_folders": [folders]}; the folders are searched last
for modules. A call and its answer are described in ../messages.py.
Source: abejaruntime 1.1.1, for a handler's arguments and the handling of its result.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.abeja.messages import UNEXPECTED, CallRefusedError, pack_refusal, read_head, split_call
from penstock.server.ipc.channel import Channel

from .answers import ResponseWriter
from .request import RequestHead

if TYPE_CHECKING:
    import asyncio

Reply = tuple[bytes, Sequence[Array | None] | None]
Handler = Callable[[Any, Any], Any]
_MAX_CACHED_HEADS = 256
_MAX_CACHED_HEAD_BYTES = 4096


def open_service(settings: dict[str, Any], channel: Channel) -> AbejaInside:
    """Import the handler. Raises: InferError (INVALID)."""
    sys.path += settings["fallback_folders"]
    if "" not in sys.path:
        sys.path.insert(0, "")
    label = f"handler '{settings['handler']}'"
    try:
        context = json.loads(os.environ.get("CONTEXT", "{}"))
    except ValueError as error:
        raise InferError(Code.INVALID, f"{label}: CONTEXT in the environment is not JSON: {error}") from None
    return AbejaInside(_import_handler(settings["handler"], label), context, strict=settings["strict"])


def _import_handler(handler: str, label: str) -> Handler:
    if handler.count(":") != 1:
        raise InferError(Code.INVALID, f"{label}: it must be module:name, with one colon")
    module, _, name = handler.partition(":")
    try:
        function: Handler = getattr(importlib.import_module(module), name)
    except BaseException as error:  # noqa: BLE001 - whatever it is, there is no handler
        traceback.print_exception(error)
        raise InferError(Code.INVALID, f"{label} cannot be imported: {type(error).__name__}: {error}") from None
    return function


class AbejaInside:
    """One handler. `context` is passed to every call. Threads: the main one."""

    concurrent_messages = False

    def __init__(self, handler: Handler, context: Any, *, strict: bool) -> None:
        self._handler = handler
        self._context = context
        self._strict = strict
        self._answers = ResponseWriter(os.environ, strict=strict)
        self._heads: dict[bytes, RequestHead] = {}
        self._runner: asyncio.Runner | None = None

    def on_open(self) -> Reply:
        """Return an empty description."""
        return b"", None

    def call(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> Reply:
        """Call the handler. A BaseException that is not an Exception, such as SystemExit, ends only this call."""
        try:
            head, content = split_call(body)
            request = (self._heads.get(head) or self._parse_head(head)).request(content)
            result = self._handler(request, self._context)
            if inspect.iscoroutine(result):
                result = self._run_coroutine(result)
            return self._answers.pack(result), None
        except CallRefusedError as refused:
            _log(refused)
            return pack_refusal(refused.status, refused.text), None
        except Exception as error:  # noqa: BLE001 - user code may raise anything
            _log(error)
            return pack_refusal(500, UNEXPECTED), None

    def _parse_head(self, head: bytes) -> RequestHead:
        request_head = RequestHead(read_head(head))
        if len(head) <= _MAX_CACHED_HEAD_BYTES:
            if len(self._heads) >= _MAX_CACHED_HEADS:
                self._heads.clear()
            self._heads[head] = request_head
        return request_head

    def _run_coroutine(self, result: Any) -> Any:
        """Run the coroutine of an async handler, on an event loop that lives as long as the worker."""
        if self._strict:
            result.close()
            return result
        if self._runner is None:
            import asyncio  # most handlers do not need it

            self._runner = asyncio.Runner()
        return self._runner.run(result)

    def on_message(self, kind: int, number: int, body: bytes, arrays: list[Array | None]) -> None:
        """Ignore it: the server sends no notifications."""

    def close(self) -> None:
        """Close the event loop."""
        if self._runner is not None:
            self._runner.close()


def _log(error: Exception) -> None:
    """Log why the answer is not the handler's. User code may have closed stderr, and its errors may themselves fail."""
    with contextlib.suppress(Exception):
        if isinstance(error, CallRefusedError):
            sys.stderr.write(f"{error.text}\n")
        else:
            traceback.print_exception(error)
