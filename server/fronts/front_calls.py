"""FrontCalls: the calls of front ends other than inference, answered by the engine's own application and RPCs.

The engine's half of `calls.py`. Wired by `engine_server.py`, one for each front end's Link:

    answers = FrontCalls(link, app, methods, state)  # app: v2/plane.make_app; methods: v2/rpc/services.methods
    answers.take(kind, number, body, arrays)      # a message of ASK, TAKEN or LEAVE
    answers.lost()                                # that Link is lost: the calls in progress are cancelled
    len(answers)                                  # the number of calls in progress

A change that a call makes to `state` (`shared_state.py`) is in place in every front end before the answer leaves, or
the answer says why not. While `loading` returns True, a 404 is replaced with a 503 (gRPC: UNAVAILABLE), since the model
may be there in a moment; front ends reject inference the same way.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from penstock.backends.errors import Code, InferError
from penstock.batching.loaded import COMING
from penstock.server.errors import GRPC_STATUS, HTTP_STATUS, error_body, pushback_ms, retry_after_s
from penstock.server.grpc.method import Method, Status, Unary
from penstock.server.v2.rpc.calls import as_refusal

from .calls import AHEAD, packed, unpacked
from .kinds import ASK, END, LEAVE, PART, TAKEN
from .remote_engine import RETRY_NS

if TYPE_CHECKING:
    from starlette.types import Message, Scope

    from penstock.backends.backend import Array
    from penstock.server.ipc.link import Link
    from penstock.server.listening.mapped_buffer import Body

    from .shared_state import SharedState, StateChange

logger = logging.getLogger("penstock.fronts")

Application = Callable[[Any, Any, Any], Awaitable[None]]


class FrontCalls:
    """The calls of one front end in progress. Threads: the event loop's.

    Invariant: every ASK is ended once, unless its front end has left or gone.
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
        self._under_way: dict[int, _HttpAnswer | _RpcAnswer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, kind: int, number: int, body: bytes, arrays: Sequence[Array | None] = ()) -> None:
        """Handle a message of the front end: ASK, TAKEN or LEAVE."""
        if kind == ASK:
            self._begin(number, *unpacked(body, arrays))
            return
        answer = self._under_way.get(number)
        if answer is None:
            return
        if kind == TAKEN:
            answer.pace.taken()
        elif kind == LEAVE:
            del self._under_way[number]
            answer.left()

    def lost(self) -> None:
        """Handle the loss of the front end."""
        answers, self._under_way = self._under_way, {}
        for answer in answers.values():
            answer.left()

    def _begin(self, number: int, head: dict[str, Any], payload: bytes) -> None:
        if "http" in head:
            answer = self._under_way[number] = _HttpAnswer(self, number, head["http"], payload)
            self.start(answer.run(self._app))
            return
        call = self._under_way[number] = _RpcAnswer(self, number, head)
        method = self._methods.get(head["rpc"])
        if method is None or method.unary is None:
            call.abort(Status.UNIMPLEMENTED, f"unknown method {head['rpc']}")
            return
        self.start(call.run(method.unary, payload))

    def start(self, work: Any) -> None:
        """Run a coroutine as a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def part(self, number: int, payload: Body) -> None:
        """Send a PART, unless the call has been left."""
        if number in self._under_way:
            self.link.send(PART, number, *packed({}, payload))

    def end(self, number: int, how: Mapping[str, Any]) -> None:
        """Send END, unless the call has been left."""
        if self._under_way.pop(number, None) is not None:
            self.link.send(END, number, orjson.dumps(how))

    async def settled(self, changes: Sequence[StateChange]) -> None:
        """Wait until a call's changes are in place everywhere. Raises: InferError (why they are not)."""
        if changes:
            await self.state.settled(changes)


class _Pace:
    """Backpressure: counts PARTs that are not TAKEN yet; the producer waits while there are too many."""

    def __init__(self) -> None:
        self._ahead = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._open = False

    @property
    def free(self) -> bool:
        return self._open or self._ahead < AHEAD

    def sent(self) -> None:
        self._ahead += 1

    def taken(self) -> None:
        self._ahead -= 1
        self._wake()

    def open(self) -> None:
        """Stop waiting: PARTs are no longer taken."""
        self._open = True
        self._wake()

    async def wait(self) -> None:
        while not self.free:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def _wake(self) -> None:
        if self.free:
            while self._waiting:
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(None)


class _HttpAnswer:
    """One HTTP request to the application: an ASGI call whose client is behind the Link."""

    def __init__(self, answers: FrontCalls, number: int, head: dict[str, Any], body: bytes) -> None:
        self._answers = answers
        self._number = number
        self._head = head
        self._body: bytes | None = body
        self._gone = asyncio.Event()
        self._whole = self._refused = False
        self._changes: Sequence[StateChange] = ()
        self.pace = _Pace()

    def left(self) -> None:
        """Handle a LEAVE, as the disconnect of a client."""
        self._gone.set()
        self.pace.open()

    async def run(self, app: Application) -> None:
        self._changes = self._answers.state.watch()
        try:
            await app(self._scope(), self._receive, self._send)
        except Exception:
            logger.exception("%s %s failed", self._head["method"], self._head["path"])
        self._answers.end(self._number, {"whole": self._whole})

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
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._refused:
            return
        if message["type"] == "http.response.start":
            await self._start(message["status"], message.get("headers", ()))
            return
        if message.get("body"):
            self._part(message["body"])
            await self.pace.wait()
        self._whole = self._whole or not message.get("more_body", False)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        try:
            await self._answers.settled(self._changes)
            if status == HTTP_STATUS[Code.NOT_FOUND] and self._answers.loading():
                raise InferError(Code.NOT_READY, COMING, RETRY_NS)
        except InferError as error:
            self._refused = self._whole = True
            body = error_body(error.message)
            lines = [("content-type", "application/json"), ("content-length", str(len(body)))]
            if seconds := retry_after_s(error):
                lines.append(("retry-after", str(seconds)))
            self._begin(HTTP_STATUS[error.code], lines)
            self._part(body)
            return
        self._begin(status, [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])

    def _begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        self._part(orjson.dumps({"status": status, "headers": headers}))

    def _part(self, payload: bytes) -> None:
        self.pace.sent()
        self._answers.part(self._number, bytes(payload))


class _RpcAnswer:
    """One RPC to its method: implements `grpc.method.Call` for a client behind the Link."""

    def __init__(self, answers: FrontCalls, number: int, head: dict[str, Any]) -> None:
        self._answers = answers
        self._number = number
        self._path = head["rpc"]
        self.metadata: Mapping[str, str] = head["metadata"]
        self.deadline_ns: int = head["deadline_ns"]
        self.context: Any = None
        self.on_cancel: Callable[[], None] | None = None
        self.ended = False
        self._changes: Sequence[StateChange] = ()
        self.pace = _Pace()

    @property
    def writable(self) -> bool:
        return self.pace.free

    async def drain(self) -> None:
        await self.pace.wait()

    async def run(self, begin: Unary, message: bytes) -> None:
        self._changes = self._answers.state.watch()
        try:
            begin(self, message)
        except Exception as error:  # noqa: BLE001 - logged under an id, and the client gets an answer whatever it is
            self._refused(as_refusal(error, self._path))

    def left(self) -> None:
        """Handle a LEAVE."""
        self.ended = True
        self.pace.open()
        cancelled, self.on_cancel = self.on_cancel, None
        if cancelled is not None:
            cancelled()

    def answer(self, message: Body) -> None:
        if self._changes and not self.ended:
            self._answers.start(self._settled(message))
        else:
            self.send(message)
            self.finish()

    async def _settled(self, message: Body) -> None:
        try:
            await self._answers.settled(self._changes)
        except InferError as error:
            self._refused(error)
            return
        self.send(message)
        self.finish()

    def send(self, message: Body) -> None:
        if not self.ended:
            self.pace.sent()
            self._answers.part(self._number, message)

    def finish(self) -> None:
        self._end(Status.OK, "", 0)

    def count_error(self, status: Status) -> None:
        """Do nothing: the front end counts."""

    def abort(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        if status == Status.NOT_FOUND and self._answers.loading():
            self._refused(InferError(Code.NOT_READY, COMING, RETRY_NS))
        else:
            self._end(status, text, pushback_ms)

    def _refused(self, error: InferError) -> None:
        self.abort(GRPC_STATUS[error.code], error.message, pushback_ms(error))

    def _end(self, status: Status, text: str, pushback: int) -> None:
        if not self.ended:
            self.ended = True
            text = text.encode("utf-8", "replace").decode()
            self._answers.end(self._number, {"status": int(status), "text": text, "pushback_ms": pushback})
