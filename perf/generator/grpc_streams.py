"""gRPC client streams: ModelStreamInfer, with one request in flight on each. Made by `grpc.GrpcOpener`.

A decoupled model's request is timed to its final answer, as perf_analyzer does.
Source: Triton's grpc_service.proto, and its page on decoupled models.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from penstock.server.grpc.method import Status
from penstock.server.protobuf import service_pb2

from .carriers import Slot
from .grpc import Channel, Connector
from .grpc_calls import MessageStream, error_in, notify_lost
from .grpc_status import reset_error
from .http2 import Http2Client
from .http2_sending import Stream

_ERROR_CHARACTERS = 200


class Conversation(MessageStream):
    """A ModelStreamInfer with one request in flight at a time, whose answers end with the final one.

    The parameter `triton_final_response` marks the final answer; if it is absent, each answer is final. `alive`:
    whether the next request may be sent here. Between two requests, it is in `idle`.
    """

    __slots__ = ("_earlier_ns", "_error", "_idle", "_parse", "_responses", "alive", "in_flight", "slot")

    whole = 0

    def __init__(self, request: bytes, slot: Slot, idle: list[Conversation], parse: Callable[[bytes], Any]) -> None:
        super().__init__(request)
        self.slot = slot
        self.in_flight = True
        self.alive = True
        self._idle = idle
        self._error = ""
        self._earlier_ns: list[int] = []
        self._responses = 0
        self._parse = parse

    def next(self, request: bytes, slot: Slot) -> None:
        """Send the next request."""
        self.slot = slot
        self.in_flight = True
        self.connection.resume(self, request)

    def end(self) -> None:
        """End this side of the stream."""
        if self.alive:
            self.alive = False
            self.connection.end(self)

    def message(self, message: bytes) -> None:
        try:
            response = self._parse(message)
        except DecodeError:
            self.broken(f"{Status.INTERNAL.name}: an answer that is no ModelStreamInferResponse")
            return
        if response.error_message and not self._error:
            self._error = response.error_message[:_ERROR_CHARACTERS]
        parameters = response.infer_response.parameters
        self._responses += bool(response.infer_response.outputs)
        if "triton_final_response" not in parameters or parameters["triton_final_response"].bool_param:
            self._answer_slot(self._error)
        else:
            self._earlier_ns.append(time.monotonic_ns())

    def _answer_slot(self, error: str) -> None:
        self._error = ""
        earlier_ns, self._earlier_ns = self._earlier_ns, []
        responses, self._responses = self._responses, 0
        if self.in_flight:
            self.in_flight = False
            if not error:
                self.slot.on_responses(earlier_ns, responses)
            self.connection.answers.append((self.slot, error))
            if self.connection.leaving:
                self.end()
            elif self.alive:
                self._idle.append(self)

    def broken(self, error: str) -> None:
        self.alive = False
        if self.stream_id in self.connection.streams:
            self.connection.forget(self)
        self._answer_slot(error)

    def on_end(self) -> None:
        self.alive = False
        self._answer_slot(
            error_in(self.head) or f"{Status.UNKNOWN.name}: the server ended the stream before its answer"
        )

    def on_reset(self, code: int) -> None:
        self.alive = False
        self._answer_slot(reset_error(code))

    def on_lost(self, reason: str) -> None:
        self.alive = False
        if self.in_flight:
            notify_lost(self.slot, self.connection, reason)


class StreamingChannel(Channel):
    """Carries requests over conversations: one for each concurrent request, reused.

    Invariant: what is in `_idle` is open on `_connection`, or has ended.
    """

    def __init__(
        self, connector: Connector, on_lost: Callable[[str], None], encode: Callable[[bytes], bytes] | None
    ) -> None:
        super().__init__(connector, on_lost, encode)
        self._idle: list[Conversation] = []
        # Imported here, not by the first request: it takes 10 ms, in which no other would be sent.
        self._parse = service_pb2().ModelStreamInferResponse.FromString

    def send(self, request: bytes, slot: Slot) -> None:
        if self._encode is not None:
            request = self._encode(request)
        while self._idle:
            conversation = self._idle.pop()
            if conversation.alive:
                conversation.next(request, slot)
                return
        connection = self._connection
        if connection is not None and len(connection.streams) >= connection.most_streams:
            error = (
                f"{Status.RESOURCE_EXHAUSTED.name}: the server allows {connection.most_streams} streams a connection"
            )
            asyncio.get_running_loop().call_soon(slot.on_answer, time.monotonic_ns(), error)
        else:
            self._begin(Conversation(request, slot, self._idle, self._parse))

    def on_leaving(self, connection: Http2Client, not_begun: Sequence[Stream]) -> None:
        if connection is self._connection:
            for conversation in self._idle:
                conversation.end()
            self._idle.clear()
        super().on_leaving(connection, not_begun)
