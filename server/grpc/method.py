"""Method: what a service registers under one RPC path, and Call, what the gRPC lane hands to it.

The lane (`connection.py`) implements Call; services (`server/v2/rpc`, health, reflection) see no more than this.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from penstock.server.listening.mapped import Body


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
    """One RPC under way. Threads: the event loop's, like everything here.

    Units: `deadline_ns` is monotonic, from `grpc-timeout`; 0 for none. The lane itself answers DEADLINE_EXCEEDED when
    it passes. `metadata` holds the request's header fields, names in lower case, several values of one name joined
    with a comma, `-bin` values still in base64. It is shared by all calls with the same header block: read only.
    `context` is the service's own. `cancelled`, when the service sets it, is called once if the call ends before the
    service has ended it: reset, deadline, connection lost. Whatever is sent on a call that has ended is dropped.
    """

    deadline_ns: int
    context: Any
    cancelled: Callable[[], None] | None

    @property
    def metadata(self) -> Mapping[str, str]:
        """Give the request's header fields."""

    @property
    def ended(self) -> bool:
        """Whether nothing can be sent any more."""

    def answer(self, message: Body) -> None:
        """Send the one message of a unary answer, and OK. All answers of a loop turn leave in one write."""

    def refuse(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        """End the call with a status other than OK; before any message it is a trailers-only answer.

        Units: `pushback_ms` is when the client may try again, 0: as it likes, -1: never.
        """

    def erred(self, status: Status) -> None:
        """Count an error that a message of a stream tells; `refuse` does so itself."""

    def send(self, message: Body) -> None:
        """Send one message of a stream. It is kept until flow control lets it go; see `writable`."""

    def finish(self) -> None:
        """End a stream with OK."""

    @property
    def writable(self) -> bool:
        """Whether what was sent has left or nearly so. A service that makes messages on its own should wait."""

    async def drained(self) -> None:
        """Wait until `writable`, or until the call has ended."""


class Reader(Protocol):
    """Where the messages of a client's stream go."""

    def message(self, message: bytes) -> None:
        """Take one whole message, decompressed."""

    def half_closed(self) -> None:
        """Learn that no more messages will come."""


class Unary(Protocol):
    """Takes a call's one message; answers now or later. The lane makes sure that there is exactly one."""

    def __call__(self, call: Call, message: bytes) -> None: ...


class Streaming(Protocol):
    """Opens a call whose client may send any number of messages."""

    def __call__(self, call: Call) -> Reader: ...


class Method:
    """One RPC: exactly one of `unary` (one message in, answered once or by a stream) and `streaming`.

    Raised InferErrors become their status; anything else is logged under an id and answered INTERNAL.
    """

    __slots__ = ("path", "streaming", "unary")

    def __init__(self, path: str, unary: Unary | None = None, streaming: Streaming | None = None) -> None:
        if (unary is None) == (streaming is None):
            raise ValueError(f"{path}: unary or streaming, one of them")
        self.path = path
        self.unary = unary
        self.streaming = streaming
