"""The access log of the gRPC lane, for --access-log: one line per answered call."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from uvicorn.protocols.utils import get_remote_addr

from penstock.backends.protobuf_fields import fields
from penstock.server.listening.access_log import log_answer
from penstock.server.restricted import TRITON_SERVICE

from .call import GrpcCall
from .compressing import CompressingCall
from .method import Call, Method, Status, Unary

if TYPE_CHECKING:
    from penstock.server.http2.frames import ErrorCode
    from penstock.server.listening.mapped_buffer import Body

    from .connection import GrpcConnection
    from .request import GrpcRequest

_NAME_FIELDS = ((f"{TRITON_SERVICE}RepositoryModel", 2), (f"{TRITON_SERVICE}Model", 1))
"""The field number of the model name in a message, by the prefix of the path."""
_ID_FIELDS = {f"{TRITON_SERVICE}ModelInfer": 3}


class LoggedCall(GrpcCall):
    """A call that is logged. `_status` is its status, `_sent_bytes` the size of its messages before compression."""

    def __init__(self, connection: GrpcConnection, stream_id: int, request: GrpcRequest) -> None:
        super().__init__(connection, stream_id, request)
        self._started_s = time.perf_counter()
        self._client = get_remote_addr(connection.transport)
        self._model, self._request_id = "", request.metadata.get("x-request-id", "")
        self._status, self._sent_bytes = Status.OK, 0

    def record_names(self, message: bytes, name: int, request_id: int) -> None:
        """Record the model name and the request id of a message, from these fields."""
        with suppress(IndexError, KeyError):  # not a valid protobuf message
            for head, start, stop in fields(message, 0, len(message)):
                if head == name << 3 | 2:
                    self._model = message[start:stop].decode("utf-8", "replace")
                elif head == request_id << 3 | 2:
                    self._request_id = message[start:stop].decode("utf-8", "replace")

    def begin(self) -> None:
        """Begin, and log a call that is rejected by its header."""
        super().begin()
        if self.request.rejection is not None:
            self._status = self.request.rejection.status
            self._log()

    def answer(self, message: Body) -> None:
        """Send the single message of a unary answer, and OK."""
        self.send(message)
        self.finish()

    def send(self, message: Body, flag: int = 0, coding: bytes = b"") -> None:
        """Send one message of a stream."""
        if not self.ended:
            self._sent_bytes += len(message)
        super().send(message, flag, coding)

    def abort(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        """End the call with a status other than OK."""
        if not self.ended:
            self._status = status
        super().abort(status, text, pushback_ms)

    def send_held(self) -> None:
        """Send the held rejection, if the call is still open."""
        is_open = self.connection.streams.get(self.stream_id) is self
        super().send_held()
        if is_open:
            self._log()

    def on_reset(self, code: ErrorCode) -> None:
        """Handle the loss of the call; what was sent before is logged."""
        if self.headers_sent and not self.ended:
            self._status = Status.CANCELLED
            self._log()
        super().on_reset(code)

    def _send_last(self, last_frame: bytes) -> None:
        super()._send_last(last_frame)
        self._log()

    def _log(self) -> None:
        request_line = f"POST {self.request.path} HTTP/2"
        names = {"model": self._model, "request_id": self._request_id}
        log_answer(self._client, request_line, self._status.name, self._started_s, self._sent_bytes, names)


class LoggedCompressingCall(LoggedCall, CompressingCall):
    """A logged call on a port that compresses its answers."""


def logged_methods(methods: Mapping[str, Method]) -> dict[str, Method]:
    """Wrap methods so that calls record the model that their messages name."""
    return {path: _logged_method(method) for path, method in methods.items()}


def _logged_method(method: Method) -> Method:
    unary, name = method.unary, next((field for begin, field in _NAME_FIELDS if method.path.startswith(begin)), 0)
    if unary is None or not name:
        return method
    return Method(method.path, _recording_names(unary, name, _ID_FIELDS.get(method.path, 0)))


def _recording_names(unary: Unary, name: int, request_id: int) -> Unary:
    def begin(call: Call, message: bytes) -> None:
        if isinstance(call, LoggedCall):
            call.record_names(message, name, request_id)
        unary(call, message)

    return begin
