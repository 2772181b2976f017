"""The one exception that carries a rejection or failure from any layer to the client."""

from __future__ import annotations

import enum
from typing import TypeVar

E = TypeVar("E", bound=Exception)

RETRY_AFTER_NS = 1_000_000_000
"""A guess at when memory is free again: other runs usually last at most a second."""


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
    UNKNOWN = "unknown"


class InferError(Exception):
    """A rejection or failure that concerns one call, or the load of one model.

    The message is for the client: what was given, what was wanted, and where. Detail that must not leave the server
    belongs to the log, never here. `retry_after_ns` is how long to wait before the call is worth repeating; 0 if
    unknown, negative if never.
    """

    __slots__ = ("code", "message", "retry_after_ns")

    def __init__(self, code: Code, message: str, retry_after_ns: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ns = retry_after_ns


def without_traceback(error: E) -> E:
    """Detach an error that is answered but not logged from where it was raised. Returns: the error.

    If it is kept with the request, those frames keep the request alive in turn, with its body and all memory of its
    batch's tensors, until the garbage collector runs.
    """
    if isinstance(error, InferError):
        error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class PartUnreadable(InferError):  # noqa: N818 - a condition, as ResourceWarning is
    """One of the tensors gathered together no longer exists: `part_index` says which."""

    part_index = 0


class OutOfMemory(InferError):  # noqa: N818 - a condition, as ResourceWarning is
    """A run did not fit in the device's memory: fewer rows may."""


class DeviceLost(InferError):  # noqa: N818
    """A run met a permanent device error: nothing runs on this session any more."""


class ProcessLost(DeviceLost):
    """A device was lost for the whole process: whatever this process loads there again is lost too."""


class DeviceRemoved(DeviceLost):
    """A device was apparently taken away from outside: what ran there need not be the cause."""


class RunStopped(InferError):  # noqa: N818
    """A run was ended from outside because it took too long (`Binding.stop`)."""
