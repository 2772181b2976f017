"""Method: what a service registers under an RPC path, and Call, the interface it gets from the gRPC lane.

The lane (`connection.py`) implements Call; services (`server/v2/rpc`, health, reflection) use nothing else of it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.server.listening.mapped_buffer import Body


class Status(enum.IntEnum):
    """gRPC's status codes. Source: grpc/doc/statuscodes.md."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Call(Protocol):
    """One RPC in progress. Threads: the event loop's, like everything here.

    Units: `deadline_ns` is monotonic, from `grpc-timeout`; 0 if there is none. The lane itself answers
    DEADLINE_EXCEEDED when it passes. `metadata` holds the request's header fields, with lower-case names, values of a
    repeated name joined by commas, and `-bin` values still in base64. It is shared by all calls with the same header
    block: read only. `context` is the service's own. `on_cancel`, if set by the service, is called once if the call
    ends before the service has ended it: reset, deadline, connection lost. Whatever is sent on a call that has ended is
    dropped.
    """

    deadline_ns: int
    context: Any
    on_cancel: Callable[[], None] | None

    @property
    def metadata(self) -> Mapping[str, str]:
        """The request's header fields."""

    @property
    def ended(self) -> bool:
        """Whether nothing more can be sent."""

    def answer(self, message: Body) -> None:
        """Send the single message of a unary answer, and OK. All answers of a loop turn leave in one write."""

    def abort(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        """End the call with a status other than OK; before any message it is a trailers-only answer.

        Units: `pushback_ms` is when the client may retry, 0: at its discretion, -1: never.
        """

    def count_error(self, status: Status) -> None:
        """Count an error that is sent in a stream message; `abort` does so itself."""

    def send(self, message: Body) -> None:
        """Send one message of a stream. It is buffered until flow control permits; see `writable`."""

    def finish(self) -> None:
        """End a stream with OK."""

    @property
    def writable(self) -> bool:
        """Whether nearly all that was sent has left. A service that produces messages by itself should wait for it."""

    async def drain(self) -> None:
        """Wait until `writable`, or until the call has ended."""


class Reader(Protocol):
    """Receives the messages of a client's stream."""

    def on_message(self, message: bytes) -> None:
        """Process one complete message, decompressed."""

    def on_half_close(self) -> None:
        """Handle the end of the client's messages."""


class Unary(Protocol):
    """Takes a call's single message and answers now or later. The lane ensures that there is exactly one."""

    def __call__(self, call: Call, message: bytes) -> None: ...


class Streaming(Protocol):
    """Opens a call whose client may send any number of messages."""

    def __call__(self, call: Call) -> Reader: ...


class Method:
    """One RPC: exactly one of `unary` (one message in, answered once or by a stream) and `streaming`.

    A raised InferError becomes its status; anything else is logged under an id and answered INTERNAL.
    """

    __slots__ = ("path", "streaming", "unary")

    def __init__(self, path: str, unary: Unary | None = None, streaming: Streaming | None = None) -> None:
        if (unary is None) == (streaming is None):
            raise ValueError(f"{path}: exactly one of unary and streaming must be given")
        self.path = path
        self.unary = unary
        self.streaming = streaming
