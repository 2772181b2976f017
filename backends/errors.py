"""The one exception that carries a refusal from any layer to the client."""

from __future__ import annotations

import enum
from typing import TypeVar

E = TypeVar("E", bound=Exception)

RETRY_AFTER_NS = 1_000_000_000
"""When memory may be free again: nobody knows, other runs last a second at most as a rule."""


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
    """A refusal or failure that concerns one call, or the load of one model.

    The message is for the client: what was given, what was wanted, and where. Detail that must not leave the
    server belongs to the log, never here. `retry_after_ns` is how long to wait before the call is worth repeating, 0
    when nobody knows, negative: never.
    """

    __slots__ = ("code", "message", "retry_after_ns")

    def __init__(self, code: Code, message: str, retry_after_ns: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ns = retry_after_ns


def bare(error: E) -> E:
    """Part an error that is only answered, and not logged, from where it was raised. Returns: the error.

    Where it is kept with the request, those frames hold it in turn, and the body and all that the tensors of its batch
    lie in, until the collector comes.
    """
    if isinstance(error, InferError):
        error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


class PartUnreadable(InferError):  # noqa: N818 - a condition, as ResourceWarning is
    """One of the tensors that were gathered together is not there any more: `part` says which."""

    part = 0


class OutOfMemory(InferError):  # noqa: N818 - a condition, as ResourceWarning is
    """A run did not fit the device's memory: fewer rows may."""


class DeviceLost(InferError):  # noqa: N818
    """A run met an error of the device that stays: nothing runs on this session any more."""


class ProcessLost(DeviceLost):
    """A device was lost for the whole process: whatever is loaded there again is lost too, in this process."""


class DeviceTaken(DeviceLost):
    """A device that somebody took away from outside, by all that is known: what ran there need not be why."""


class RunStopped(InferError):  # noqa: N818
    """A run was ended from outside because it took too long (`Binding.stop`)."""
