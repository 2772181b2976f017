"""The one exception that carries a refusal from any layer to the client."""

from __future__ import annotations

import enum


class Code(enum.Enum):
    """Why a call was not served. `server/` maps it to HTTP and gRPC in one table."""

    INVALID = "invalid"
    NOT_FOUND = "not found"
    ALREADY_EXISTS = "already exists"
    NOT_READY = "not ready"
    OVERLOADED = "overloaded"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


class InferError(Exception):
    """A refusal or failure that concerns one call, or the load of one model.

    The message is for the client: what was given, what was wanted, and where. Detail that must not leave the
    server belongs to the log, never here.
    """

    __slots__ = ("code", "message")

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
