"""Calls that a front end passes to the engine: everything except inference and reflection, such as control and health.

The front end's half; `control_service.py` is the engine's. Wired by `front.py`:

    control = ControlCalls()
    control.attach(link)                         # an engine is there: its Link
    control.receive(kind, number, body, arrays)  # a message of PART or END
    control.detach()                             # that Link is lost: calls in progress fail, new ones are rejected
    control.drain()                              # the front end stops: not ready, and endless streams are ended
    app = ControlApp(control, max_body_bytes, restricted)  # uvicorn's application
    methods = control_methods(control)           # RPCs by path: all but ModelInfer, ModelStreamInfer and reflection

A CALL has a head (JSON, one line) and then its payload, as an array if it is large. PARTs are the head and then the
body of an HTTP answer, or the messages of an RPC; END says how it ended. The engine sends at most
MAX_UNCONFIRMED_PARTS PARTs for which it has no PART_CONFIRMED yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson
from starlette.requests import Request

from penstock.backends.errors import Code, InferError
from penstock.server.errors import HTTP_STATUS, error_body, retry_after_s
from penstock.server.grpc.method import Call, Method, Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.health import EXITING
from penstock.server.restricted import GRPC_CATEGORIES, TRITON_SERVICE, RestrictedApis, category_of, restriction_text
from penstock.server.v2.routes import read_body, wait_disconnect

from .message_kinds import ABANDON, CALL, END, PART, PART_CONFIRMED
from .remote_engine import NO_ENGINE

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from penstock.backends.backend import Array
    from penstock.server.ipc.link import Link

MAX_UNCONFIRMED_PARTS = 16
LARGE_BYTES = 32 << 10
_JSON = (b"content-type", b"application/json")
_INFERENCE = frozenset(TRITON_SERVICE + name for name in ("ModelInfer", "ModelStreamInfer"))
_LIVE, _READY = "/v2/health/live", "/v2/health/ready"
_NOT_SERVING = b"\x08\x02"
_ANSWERS_WITHOUT_ENGINE = {
    TRITON_SERVICE + "ServerLive": b"\x08\x01",
    TRITON_SERVICE + "ServerReady": b"",
    "/grpc.health.v1.Health/Check": _NOT_SERVING,
}
"""Messages that state live, not ready, and NOT_SERVING."""


class ControlCall(Protocol):
    """Receives the answer of one CALL."""

    def on_part(self, payload: bytes) -> None:
        """Handle a PART; call `ControlCalls.confirm_part` once it has been passed on."""

    def on_end(self, outcome: Mapping[str, Any] | None) -> None:
        """Handle the end of the answer; None: the engine has gone."""


class ControlCalls:
    """The calls of one front end in progress. Threads: the event loop's.

    Invariant: every ControlCall is ended once, by the engine or because the engine has gone, unless it is abandoned.
    """

    def __init__(self) -> None:
        self._link: Link | None = None
        self._calls: dict[int, ControlCall] = {}
        self._last_number, self.draining, self.exiting = 0, False, False
        self.watches: dict[int, Call] = {}
        """Streams that do not end by themselves."""

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def connected(self) -> bool:
        """Whether there is an engine."""
        return self._link is not None and not self._link.closed

    def attach(self, link: Link) -> None:
        """Send calls to the engine at the other end of `link` from now on."""
        self._link = link

    def detach(self) -> None:
        """End the calls in progress: the engine has gone."""
        self._link = None
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.on_end(None)

    def drain(self, *, server_stopping: bool = True) -> None:
        """End the streams that would not end by themselves; `server_stopping`: probes report it."""
        self.draining, self.exiting = True, server_stopping
        for call in list(self.watches.values()):
            on_cancel, call.on_cancel = call.on_cancel, None
            if server_stopping:
                call.send(_NOT_SERVING)
            call.abort(Status.UNAVAILABLE, SHUTTING_DOWN)
            if on_cancel is not None:
                on_cancel()

    def start(self, call: ControlCall, head: Mapping[str, Any], payload: bytes) -> int:
        """Call the engine. Returns: the call's number. Raises: InferError (NOT_READY: there is no engine)."""
        link = self._link
        if link is None or link.closed:
            raise InferError(Code.NOT_READY, NO_ENGINE)
        self._last_number += 1
        try:
            link.send(CALL, self._last_number, *encode_message(head, payload))
        except ValueError as error:
            raise InferError(Code.INVALID, str(error)) from None
        self._calls[self._last_number] = call
        return self._last_number

    def confirm_part(self, number: int) -> None:
        """Allow the engine to send another PART."""
        if number in self._calls and self._link is not None:
            self._link.send(PART_CONFIRMED, number)

    def abandon(self, number: int) -> None:
        """Abandon a call."""
        if self._calls.pop(number, None) is not None and self._link is not None:
            self._link.send(ABANDON, number)

    def receive(self, kind: int, number: int, body: bytes, arrays: Sequence[Array | None] = ()) -> None:
        """Handle a message of the engine: PART or END, for calls that are not abandoned."""
        call = self._calls.get(number)
        if call is None:
            return
        if kind == PART:
            call.on_part(decode_message(body, arrays)[1])
        elif kind == END:
            del self._calls[number]
            call.on_end(orjson.loads(body))


def encode_message(head: Mapping[str, Any], payload: bytes | memoryview) -> tuple[bytes, list[Array | None] | None]:
    """Return a message's body and tensors: a large payload is sent as a tensor, in shared memory."""
    line = orjson.dumps(head)
    if len(payload) < LARGE_BYTES:
        return b"\n".join((line, payload)), None
    return line + b"\n", [np.frombuffer(payload, np.uint8)]


def decode_message(body: bytes, arrays: Sequence[Array | None]) -> tuple[dict[str, Any], bytes]:
    """Decode the result of `encode_message`."""
    line, _, payload = body.partition(b"\n")
    array = arrays[0] if arrays else None
    return orjson.loads(line), payload if array is None else array.tobytes()


class _HttpCall:
    """One HTTP request: a queue of what has arrived of its answer, for the task that passes it on."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes | Mapping[str, Any] | None] = asyncio.Queue()

    def on_part(self, payload: bytes) -> None:
        self._events.put_nowait(payload)

    def on_end(self, outcome: Mapping[str, Any] | None) -> None:
        self._events.put_nowait(outcome)

    async def next(self) -> bytes | Mapping[str, Any] | None:
        """Wait for a PART, or for the end."""
        return await self._events.get()


class ControlApp:
    """The ASGI application of a front end. `restricted` guards the paths that are answered without the engine."""

    def __init__(self, calls: ControlCalls, max_body_bytes: int, restricted: RestrictedApis | None = None) -> None:
        self._calls = calls
        self._max_body_bytes = max_body_bytes
        self._restricted = restricted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by uvicorn)."""
        try:
            if not await self._answer_locally(scope, send):
                await self._forward(scope, receive, send)
        except InferError as error:
            if error.code is not Code.CANCELLED:  # otherwise nobody reads it
                await _send_error(send, error)

    async def _answer_locally(self, scope: Scope, send: Send) -> bool:
        """Answer a probe that does not need the engine, or for which there is none. Raises: InferError."""
        path = scope["path"]
        if path not in (_LIVE, _READY) or scope["method"] not in {"GET", "HEAD"}:
            return False
        if self._calls.connected and not self._calls.exiting:
            return False
        if self._restricted:
            headers = dict(scope["headers"])
            header = self._restricted.check(category_of(path) or "", lambda name: _latin1(headers.get(name.encode())))
            if header is not None:
                await _send_response(send, 403, [_JSON], error_body(restriction_text(header)))
                return True
        if self._calls.exiting:
            raise InferError(Code.NOT_READY, EXITING)
        await _send_response(send, 200 if path == _LIVE else 400, [], b"")
        return True

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._calls.connected:
            raise InferError(Code.NOT_READY, NO_ENGINE)  # before the body is read
        body = await read_body(Request(scope, receive), self._max_body_bytes)
        call = _HttpCall()
        number = self._calls.start(call, {"http": _encode_head(scope)}, body)
        del body
        disconnected = asyncio.ensure_future(wait_disconnect(receive))
        disconnected.add_done_callback(lambda _: call.on_end({"disconnected": True}))
        try:
            await self._relay_answer(call, number, send)
        finally:
            self._calls.abandon(number)
            disconnected.cancel()
            await asyncio.wait((disconnected,))

    async def _relay_answer(self, call: _HttpCall, number: int, send: Send) -> None:
        """Pass an answer on. Raises: InferError, unless part of it has been sent."""
        first = await call.next()
        if not isinstance(first, bytes):
            if first is not None and "disconnected" in first:
                return
            raise InferError(Code.NOT_READY, NO_ENGINE if first is None else "the engine has not answered")
        head = orjson.loads(first)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
        await send({"type": "http.response.start", "status": head["status"], "headers": headers})
        self._calls.confirm_part(number)
        while isinstance(part := await call.next(), bytes):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self._calls.confirm_part(number)
        if part is not None and part.get("complete"):
            await send({"type": "http.response.body", "body": b""})
        # uvicorn closes the connection of an incomplete answer, so the client does not take it as complete


def _encode_head(scope: Scope) -> dict[str, Any]:
    head = {name: scope.get(name) for name in ("method", "path", "scheme", "http_version", "root_path")}
    head |= {name: _latin1(scope.get(name)) for name in ("raw_path", "query_string")}
    head |= {name: list(scope.get(name) or ()) or None for name in ("client", "server")}
    return head | {"headers": [(_latin1(name), _latin1(value)) for name, value in scope["headers"]]}


def _latin1(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("latin-1")


async def _send_error(send: Send, error: InferError) -> None:
    seconds = retry_after_s(error)
    headers = [_JSON, (b"retry-after", b"%d" % seconds)] if seconds else [_JSON]
    await _send_response(send, HTTP_STATUS[error.code], headers, error_body(error.message))


async def _send_response(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def control_methods(calls: ControlCalls) -> dict[str, Method]:
    """Return the RPCs that the engine answers, by path. The engine also rejects restricted ones."""
    paths = [path for path in GRPC_CATEGORIES if path not in _INFERENCE]
    return {path: Method(path, partial(_start_rpc, calls, path)) for path in paths}


def _start_rpc(calls: ControlCalls, path: str, call: Call, message: bytes) -> None:
    local_answer = None if calls.connected and not calls.exiting else _ANSWERS_WITHOUT_ENGINE.get(path)
    if calls.draining and path.endswith("/Watch"):
        call.abort(Status.UNAVAILABLE, SHUTTING_DOWN)
    elif local_answer is not None:
        call.answer(b"" if calls.exiting and path.endswith("/ServerLive") else local_answer)
    else:
        _RpcCall(calls, path, call, message)


class _RpcCall:
    """One RPC. Raises: InferError if there is no engine."""

    def __init__(self, calls: ControlCalls, path: str, call: Call, message: bytes) -> None:
        self._calls = calls
        self._call = call
        head = {"rpc": path, "metadata": dict(call.metadata), "deadline_ns": call.deadline_ns}
        self._number = calls.start(self, head, message)
        self._draining: asyncio.Task[None] | None = None
        call.on_cancel = self._abandon
        if path.endswith("/Watch"):
            calls.watches[self._number] = call

    def on_part(self, payload: bytes) -> None:
        self._call.send(payload)
        if self._call.writable:
            self._calls.confirm_part(self._number)
        else:
            self._draining = asyncio.ensure_future(self._confirm_when_drained(self._draining))

    async def _confirm_when_drained(self, previous: asyncio.Task[None] | None) -> None:
        if previous is not None:
            await previous
        await self._call.drain()
        self._calls.confirm_part(self._number)

    def on_end(self, outcome: Mapping[str, Any] | None) -> None:
        self._calls.watches.pop(self._number, None)
        self._call.on_cancel = None
        if outcome is None:
            self._call.abort(Status.UNAVAILABLE, NO_ENGINE)
        elif outcome["status"] == Status.OK:
            self._call.finish()
        else:
            self._call.abort(Status(outcome["status"]), outcome["text"], outcome["pushback_ms"])

    def _abandon(self) -> None:
        self._calls.watches.pop(self._number, None)
        self._calls.abandon(self._number)
