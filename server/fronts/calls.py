"""Calls that a front end passes to the engine: everything except inference and reflection, such as control and health.

The front end's half; `front_calls.py` is the engine's. Wired by `front.py`:

    asking = Asking()
    asking.joined(link)                      # an engine is there: its Link
    asking.take(kind, number, body, arrays)  # a message of PART or END
    asking.lost()                            # that Link is lost: calls in progress fail, new ones are rejected
    asking.drain()                           # the front end stops: not ready, and endless streams are ended
    app = AskingApp(asking, most_body_bytes, restricted)  # uvicorn's application
    methods = asking_methods(asking)         # RPCs by path: all but ModelInfer, ModelStreamInfer and reflection

An ASK has a head (JSON, one line) and then its payload, as an array if it is large. PARTs are the head and then the
body of an HTTP answer, or the messages of an RPC; END says how it ended. The engine sends at most AHEAD PARTs that are
not TAKEN yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import orjson

from penstock.backends.errors import Code, InferError
from penstock.server.errors import HTTP_STATUS, error_body, retry_after_s
from penstock.server.grpc.method import Call, Method, Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.health import EXITING
from penstock.server.restricted import GRPC_CATEGORIES, RestrictedApis, category_of, restriction_text
from penstock.server.v2.routes import gone

from .kinds import ASK, END, LEAVE, PART, TAKEN
from .remote_engine import NO_ENGINE

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from penstock.backends.backend import Array
    from penstock.server.ipc.link import Link

AHEAD = 16
LARGE_BYTES = 32 << 10
_JSON = (b"content-type", b"application/json")
_INFERENCE = frozenset("/inference.GRPCInferenceService/" + name for name in ("ModelInfer", "ModelStreamInfer"))
_LIVE, _READY = "/v2/health/live", "/v2/health/ready"
_NOT_SERVING = b"\x08\x02"
_WITHOUT_ENGINE = {
    "/inference.GRPCInferenceService/ServerLive": b"\x08\x01",
    "/inference.GRPCInferenceService/ServerReady": b"",
    "/grpc.health.v1.Health/Check": _NOT_SERVING,
}
"""Messages that state live, not ready, and NOT_SERVING."""


class Ask(Protocol):
    """Receives the answer of one ASK."""

    def part(self, payload: bytes) -> None:
        """Handle a PART; call `Asking.taken` once it has been passed on."""

    def end(self, how: Mapping[str, Any] | None) -> None:
        """Handle the end of the answer; None: the engine has gone."""


class Asking:
    """The calls of one front end in progress. Threads: the event loop's.

    Invariant: every Ask is ended once, by the engine or because the engine has gone, unless it has left.
    """

    def __init__(self) -> None:
        self._link: Link | None = None
        self._asks: dict[int, Ask] = {}
        self._last, self.draining, self.exiting = 0, False, False
        self.watches: dict[int, Call] = {}
        """Streams that do not end by themselves."""

    def __len__(self) -> int:
        return len(self._asks)

    @property
    def engine(self) -> bool:
        """Whether there is an engine."""
        return self._link is not None and not self._link.closed

    def joined(self, link: Link) -> None:
        """Send calls to the engine at the other end of `link` from now on."""
        self._link = link

    def lost(self) -> None:
        """End the calls in progress: the engine has gone."""
        self._link = None
        asks, self._asks = self._asks, {}
        for ask in asks.values():
            ask.end(None)

    def drain(self, *, last: bool = True) -> None:
        """End the streams that would not end by themselves; `last`: the server ends too, and probes report it."""
        self.draining, self.exiting = True, last
        for call in list(self.watches.values()):
            cancelled, call.on_cancel = call.on_cancel, None
            if last:
                call.send(_NOT_SERVING)
            call.abort(Status.UNAVAILABLE, SHUTTING_DOWN)
            if cancelled is not None:
                cancelled()

    def ask(self, ask: Ask, head: Mapping[str, Any], payload: bytes) -> int:
        """Call the engine. Returns: the call's number. Raises: InferError (NOT_READY: there is no engine)."""
        link = self._link
        if link is None or link.closed:
            raise InferError(Code.NOT_READY, NO_ENGINE)
        self._last += 1
        try:
            link.send(ASK, self._last, *packed(head, payload))
        except ValueError as error:
            raise InferError(Code.INVALID, str(error)) from None
        self._asks[self._last] = ask
        return self._last

    def taken(self, number: int) -> None:
        """Allow the engine to send another PART."""
        if number in self._asks and self._link is not None:
            self._link.send(TAKEN, number)

    def leave(self, number: int) -> None:
        """Abandon a call."""
        if self._asks.pop(number, None) is not None and self._link is not None:
            self._link.send(LEAVE, number)

    def take(self, kind: int, number: int, body: bytes, arrays: Sequence[Array | None] = ()) -> None:
        """Handle a message of the engine: PART or END, for calls that have not left."""
        ask = self._asks.get(number)
        if ask is None:
            return
        if kind == PART:
            ask.part(unpacked(body, arrays)[1])
        elif kind == END:
            del self._asks[number]
            ask.end(orjson.loads(body))


def packed(head: Mapping[str, Any], payload: bytes | memoryview) -> tuple[bytes, list[Array | None] | None]:
    """Return a message's body and tensors: a large payload is sent as a tensor, in shared memory."""
    line = orjson.dumps(head)
    if len(payload) < LARGE_BYTES:
        return b"\n".join((line, payload)), None
    return line + b"\n", [np.frombuffer(payload, np.uint8)]


def unpacked(body: bytes, arrays: Sequence[Array | None]) -> tuple[dict[str, Any], bytes]:
    """Decode the result of `packed`."""
    line, _, payload = body.partition(b"\n")
    array = arrays[0] if arrays else None
    return orjson.loads(line), payload if array is None else array.tobytes()


class _HttpAsk:
    """One HTTP request: a queue of what has arrived of its answer, for the task that passes it on."""

    def __init__(self) -> None:
        self._come: asyncio.Queue[bytes | Mapping[str, Any] | None] = asyncio.Queue()

    def part(self, payload: bytes) -> None:
        self._come.put_nowait(payload)

    def end(self, how: Mapping[str, Any] | None) -> None:
        self._come.put_nowait(how)

    async def next(self) -> bytes | Mapping[str, Any] | None:
        """Wait for a PART, or for the end."""
        return await self._come.get()


class AskingApp:
    """The ASGI application of a front end. `restricted` guards the paths that are answered without the engine."""

    def __init__(self, asking: Asking, most_body_bytes: int, restricted: RestrictedApis | None = None) -> None:
        self._asking = asking
        self._most_bytes = most_body_bytes
        self._restricted = restricted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (called by uvicorn)."""
        try:
            if not await self._alone(scope, send):
                await self._asked(scope, receive, send)
        except InferError as error:
            await _refuse(send, error)

    async def _alone(self, scope: Scope, send: Send) -> bool:
        """Answer a probe that does not need the engine, or for which there is none. Raises: InferError."""
        path = scope["path"]
        if path not in (_LIVE, _READY) or scope["method"] not in {"GET", "HEAD"}:
            return False
        if self._asking.engine and not self._asking.exiting:
            return False
        if self._restricted:
            headers = dict(scope["headers"])
            header = self._restricted.check(category_of(path) or "", lambda name: _text(headers.get(name.encode())))
            if header is not None:
                await _answer(send, 403, [_JSON], error_body(restriction_text(header)))
                return True
        if self._asking.exiting:
            raise InferError(Code.NOT_READY, EXITING)
        await _answer(send, 200 if path == _LIVE else 400, [], b"")
        return True

    async def _asked(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._asking.engine:
            raise InferError(Code.NOT_READY, NO_ENGINE)  # before the body is read
        body = await self._body(scope["path"], receive)
        if body is None:
            return
        ask = _HttpAsk()
        number = self._asking.ask(ask, {"http": _head_of(scope)}, body)
        del body
        left = asyncio.ensure_future(gone(receive))
        left.add_done_callback(lambda _: ask.end({"left": True}))
        try:
            await self._passed_on(ask, number, send)
        finally:
            self._asking.leave(number)
            left.cancel()
            await asyncio.wait((left,))

    async def _passed_on(self, ask: _HttpAsk, number: int, send: Send) -> None:
        """Pass an answer on. Raises: InferError, unless part of it has been sent."""
        first = await ask.next()
        if not isinstance(first, bytes):
            if first is not None and "left" in first:
                return
            raise InferError(Code.NOT_READY, NO_ENGINE if first is None else "the engine has not answered")
        head = orjson.loads(first)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
        await send({"type": "http.response.start", "status": head["status"], "headers": headers})
        self._asking.taken(number)
        while isinstance(part := await ask.next(), bytes):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            self._asking.taken(number)
        if part is not None and part.get("whole"):
            await send({"type": "http.response.body", "body": b""})
        # uvicorn closes the connection of an incomplete answer, so the client does not take it as complete

    async def _body(self, path: str, receive: Receive) -> bytes | None:
        """Read a body; None if the client has disconnected. Raises: InferError (INVALID)."""
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            if size > self._most_bytes:
                text = f"request body exceeds the maximum of {self._most_bytes} bytes for '{path}'"
                raise InferError(Code.INVALID, text)
            parts.append(part)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _head_of(scope: Scope) -> dict[str, Any]:
    head = {name: scope.get(name) for name in ("method", "path", "scheme", "http_version", "root_path")}
    head |= {name: _text(scope.get(name)) for name in ("raw_path", "query_string")}
    head |= {name: list(scope.get(name) or ()) or None for name in ("client", "server")}
    return head | {"headers": [(_text(name), _text(value)) for name, value in scope["headers"]]}


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode("latin-1")


async def _refuse(send: Send, error: InferError) -> None:
    seconds = retry_after_s(error)
    headers = [_JSON, (b"retry-after", b"%d" % seconds)] if seconds else [_JSON]
    await _answer(send, HTTP_STATUS[error.code], headers, error_body(error.message))


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def asking_methods(asking: Asking) -> dict[str, Method]:
    """Return the RPCs that the engine answers, by path. The engine also rejects restricted ones."""
    paths = [path for path in GRPC_CATEGORIES if path not in _INFERENCE]
    return {path: Method(path, partial(_begin, asking, path)) for path in paths}


def _begin(asking: Asking, path: str, call: Call, message: bytes) -> None:
    alone = None if asking.engine and not asking.exiting else _WITHOUT_ENGINE.get(path)
    if asking.draining and path.endswith("/Watch"):
        call.abort(Status.UNAVAILABLE, SHUTTING_DOWN)
    elif alone is not None:
        call.answer(b"" if asking.exiting and path.endswith("/ServerLive") else alone)
    else:
        _RpcAsk(asking, path, call, message)


class _RpcAsk:
    """One RPC. Raises: InferError if there is no engine."""

    def __init__(self, asking: Asking, path: str, call: Call, message: bytes) -> None:
        self._asking = asking
        self._call = call
        head = {"rpc": path, "metadata": dict(call.metadata), "deadline_ns": call.deadline_ns}
        self._number = asking.ask(self, head, message)
        self._waits: asyncio.Task[None] | None = None
        call.on_cancel = self._left
        if path.endswith("/Watch"):
            asking.watches[self._number] = call

    def part(self, payload: bytes) -> None:
        self._call.send(payload)
        if self._call.writable:
            self._asking.taken(self._number)
        else:
            self._waits = asyncio.ensure_future(self._drained(self._waits))

    async def _drained(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await self._call.drain()
        self._asking.taken(self._number)

    def end(self, how: Mapping[str, Any] | None) -> None:
        self._asking.watches.pop(self._number, None)
        self._call.on_cancel = None
        if how is None:
            self._call.abort(Status.UNAVAILABLE, NO_ENGINE)
        elif how["status"] == Status.OK:
            self._call.finish()
        else:
            self._call.abort(Status(how["status"]), how["text"], how["pushback_ms"])

    def _left(self) -> None:
        self._asking.watches.pop(self._number, None)
        self._asking.leave(self._number)
