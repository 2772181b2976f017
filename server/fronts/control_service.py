"""ControlService: the calls of front ends other than inference, answered by the engine's own application and RPCs.

The engine's half of `control_calls.py`. Wired by `engine_server.py`, one for each front end's Link:

    control = ControlService(link, app, methods, state)  # app: v2/plane.make_app; methods: v2/rpc/services.methods
    control.receive(kind, number, body, arrays)   # a message of CALL, PART_CONFIRMED or ABANDON
    control.close()                               # that Link is lost: the calls in progress are cancelled
    len(control)                                  # the number of calls in progress

A change that a call makes to `state` (`shared_state.py`) is in place in every front end before the answer leaves, or
the answer says why not. While `loading` returns True, a 404 is replaced with a 503 (gRPC: UNAVAILABLE), since the model
may be there in a moment; front ends reject inference the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.errors import Code, InferError
from penstock.batching.registry import LOADING_MESSAGE
from penstock.server.errors import GRPC_STATUS, HTTP_STATUS, error_body, pushback_ms, retry_after_s
from penstock.server.grpc.method import Method, Status, Unary
from penstock.server.v2.rpc.calls import client_error

from .control_calls import MAX_UNCONFIRMED_PARTS, decode_message, encode_message
from .message_kinds import ABANDON, CALL, END, PART, PART_CONFIRMED
from .remote_engine import RETRY_NS

if TYPE_CHECKING:
    from starlette.types import Message, Scope

    from penstock.backends.backend import Array
    from penstock.server.ipc.link import Link
    from penstock.server.listening.mapped_buffer import Body

    from .shared_state import SharedState, StateChange

logger = logging.getLogger("penstock.fronts")

Application = Callable[[Any, Any, Any], Awaitable[None]]


class ControlService:
    """The calls of one front end in progress. Threads: the event loop's.

    Invariant: every CALL is ended once, unless its front end has abandoned it or gone.
    """

    def __init__(
        self, link: Link, app: Application, methods: Mapping[str, Method], state: SharedState,
        loading: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.link = link
        self.state = state
        self.loading = loading
        self._app = app
        self._methods = methods
        self._calls: dict[int, _HttpCall | _RpcCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def receive(self, kind: int, number: int, body: bytes, arrays: Sequence[Array | None] = ()) -> None:
        """Handle a message of the front end: CALL, PART_CONFIRMED or ABANDON."""
        if kind == CALL:
            self._start_call(number, *decode_message(body, arrays))
            return
        call = self._calls.get(number)
        if call is None:
            return
        if kind == PART_CONFIRMED:
            call.flow.count_confirmed()
        elif kind == ABANDON:
            del self._calls[number]
            call.cancel()

    def close(self) -> None:
        """Handle the loss of the front end."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()

    def _start_call(self, number: int, head: dict[str, Any], payload: bytes) -> None:
        if "http" in head:
            answer = self._calls[number] = _HttpCall(self, number, head["http"], payload)
            self.start_task(answer.run(self._app))
            return
        call = self._calls[number] = _RpcCall(self, number, head)
        method = self._methods.get(head["rpc"])
        if method is None or method.unary is None:
            call.abort(Status.UNIMPLEMENTED, f"unknown method {head['rpc']}")
            return
        self.start_task(call.run(method.unary, payload))

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def send_part(self, number: int, payload: Body) -> None:
        """Send a PART, unless the call has been abandoned."""
        if number in self._calls:
            self.link.send(PART, number, *encode_message({}, payload))

    def send_end(self, number: int, outcome: Mapping[str, Any]) -> None:
        """Send END, unless the call has been abandoned."""
        if self._calls.pop(number, None) is not None:
            self.link.send(END, number, orjson.dumps(outcome))

    async def wait_applied(self, changes: Sequence[StateChange]) -> None:
        """Wait until a call's changes are in place everywhere. Raises: InferError (why they are not)."""
        if changes:
            await self.state.wait_applied(changes)


class _FlowControl:
    """Backpressure: counts PARTs that are not confirmed yet; the producer waits while there are too many."""

    def __init__(self) -> None:
        self._unconfirmed = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._disabled = False

    @property
    def has_room(self) -> bool:
        return self._disabled or self._unconfirmed < MAX_UNCONFIRMED_PARTS

    def count_sent(self) -> None:
        self._unconfirmed += 1

    def count_confirmed(self) -> None:
        self._unconfirmed -= 1
        self._wake()

    def disable(self) -> None:
        """Stop waiting: PARTs are no longer confirmed."""
        self._disabled = True
        self._wake()

    async def wait(self) -> None:
        while not self.has_room:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append(future)
            await future

    def _wake(self) -> None:
        if self.has_room:
            while self._waiters:
                future = self._waiters.popleft()
                if not future.done():
                    future.set_result(None)


class _HttpCall:
    """One HTTP request to the application: an ASGI call whose client is behind the Link."""

    def __init__(self, service: ControlService, number: int, head: dict[str, Any], body: bytes) -> None:
        self._service = service
        self._number = number
        self._head = head
        self._body: bytes | None = body
        self._disconnected = asyncio.Event()
        self._complete = self._rejected = False
        self._changes: Sequence[StateChange] = ()
        self.flow = _FlowControl()

    def cancel(self) -> None:
        """Handle an ABANDON, as the disconnect of a client."""
        self._disconnected.set()
        self.flow.disable()

    async def run(self, app: Application) -> None:
        self._changes = self._service.state.collect_changes()
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception:
            logger.exception("%s %s failed", self._head["method"], self._head["path"])
        self._service.send_end(self._number, {"complete": self._complete})

    def _scope(self) -> Scope:
        head = self._head
        scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "state": {}}
        scope |= {name: head[name] for name in ("method", "path", "scheme", "http_version", "root_path")}
        scope |= {name: (head[name] or "").encode("latin-1") for name in ("raw_path", "query_string")}
        scope |= {name: tuple(head[name]) if head[name] else None for name in ("client", "server")}
        scope["headers"] = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head["headers"]]
        return scope

    async def _receive(self) -> Message:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._rejected:
            return
        if message["type"] == "http.response.start":
            await self._send_start(message["status"], message.get("headers", ()))
            return
        if message.get("body"):
            self._send_part(message["body"])
            await self.flow.wait()
        self._complete = self._complete or not message.get("more_body", False)

    async def _send_start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            await self._service.wait_applied(self._changes)
            if status == HTTP_STATUS[Code.NOT_FOUND] and self._service.loading():
                raise InferError(Code.NOT_READY, LOADING_MESSAGE, RETRY_NS)
        except InferError as error:
            self._rejected = self._complete = True
            body = error_body(error.message)
            lines = [("content-type", "application/json"), ("content-length", str(len(body)))]
            if seconds := retry_after_s(error):
                lines.append(("retry-after", str(seconds)))
            self._send_head(HTTP_STATUS[error.code], lines)
            self._send_part(body)
            return
        self._send_head(status, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])

    def _send_head(self, status: int, headers: list[tuple[str, str]]) -> None:
        self._send_part(orjson.dumps({"status": status, "headers": headers}))

    def _send_part(self, payload: bytes) -> None:
        self.flow.count_sent()
        self._service.send_part(self._number, bytes(payload))


class _RpcCall:
    """One RPC to its method: implements `grpc.method.Call` for a client behind the Link."""

    def __init__(self, service: ControlService, number: int, head: dict[str, Any]) -> None:
        self._service = service
        self._number = number
        self._path = head["rpc"]
        self.metadata: Mapping[str, str] = head["metadata"]
        self.deadline_ns: int = head["deadline_ns"]
        self.context: Any = None
        self.on_cancel: Callable[[], None] | None = None
        self.ended = False
        self._changes: Sequence[StateChange] = ()
        self.flow = _FlowControl()

    @property
    def writable(self) -> bool:
        return self.flow.has_room

    async def drain(self) -> None:
        await self.flow.wait()

    async def run(self, begin: Unary, message: bytes) -> None:
        self._changes = self._service.state.collect_changes()
        try:
            begin(self, message)
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client gets an answer whatever it is
            self._send_error(client_error(error, self._path))

    def cancel(self) -> None:
        """Handle an ABANDON."""
        self.ended = True
        self.flow.disable()
        on_cancel, self.on_cancel = self.on_cancel, None
        if on_cancel is not None:
            on_cancel()

    def answer(self, message: Body) -> None:
        if self._changes and not self.ended:
            self._service.start_task(self._answer_when_applied(message))
        else:
            self.send(message)
            self.finish()

    async def _answer_when_applied(self, message: Body) -> None:
        try:
            await self._service.wait_applied(self._changes)
        except InferError as error:
            self._send_error(error)
            return
        self.send(message)
        self.finish()

    def send(self, message: Body) -> None:
        if not self.ended:
            self.flow.count_sent()
            self._service.send_part(self._number, message)

    def finish(self) -> None:
        self._send_end(Status.OK, "", 0)

    def count_error(self, status: Status) -> None:
        """Do nothing: the front end counts."""

    def abort(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        if status == Status.NOT_FOUND and self._service.loading():
            self._send_error(InferError(Code.NOT_READY, LOADING_MESSAGE, RETRY_NS))
        else:
            self._send_end(status, text, pushback_ms)

    def _send_error(self, error: InferError) -> None:
        self.abort(GRPC_STATUS[error.code], error.message, pushback_ms(error))

    def _send_end(self, status: Status, text: str, pushback: int) -> None:
        if not self.ended:
            self.ended = True
            text = text.encode("utf-8", "replace").decode()
            self._service.send_end(self._number, {"status": int(status), "text": text, "pushback_ms": pushback})
