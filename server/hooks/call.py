"""HookCall: one call of a hook, and the client's error if it fails. Made by `runner.py`, run by a replica."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model

from .conversions import BoundHooks, Converter
from .loading import POST, PRE, exception_line, user_frames
from .packing import (
    CALL,
    CALL_HEADER,
    PYTHON_JSON,
    PYTHON_JSON_PARAMETERS,
    read_result,
    write_json,
    write_outputs,
    write_sample,
)  # fmt: skip

EncodedCall = tuple[int, bytes, list[Array | None] | None]
"""What a worker process is sent: kind, body, tensors."""
STATISTICS_NAMES = {PRE: "pre", POST: "post"}
"""The names of the hooks in statistics."""
_TRACEBACK_INTERVAL_NS = 1_000_000_000

logger = logging.getLogger("penstock.hooks")


class ReplicaGoneError(Exception):
    """The replica is gone and the call has not begun: another replica may take it."""


class FutureLike(Protocol):
    """What waits for a call or a HookedRequest, such as a future. Once `done`, it must not be completed."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """One way to answer: how to convert a sample or the outputs `requested_outputs` if there is no hook.

    `method` is the method that returns one such answer; `conversion` is the conversion of a hook's result.
    """

    method: str
    conversion: int
    convert_sample: Converter
    convert_outputs: Converter
    requested_outputs: tuple[int, ...] | None


class HookCall:
    """One call of a hook, or the load of the file.

    `value` is a sample, or a model's outputs. `conversion` is the conversion of the hook's result, done on the
    replica's thread as well (packing.INPUTS and so on). `parameters` are the request's own. `in_hook`: user code is
    running, so exceptions are its own.
    Units: stamps in monotonic nanoseconds; `deadline_ns` applies until the hook begins, 0 means none. `limit_start_ns`
    is the start of what its time limit covers: the call, or a generator's step. `started`: no other replica can take
    it. `is_small`: its value is known to be small. `replica` runs it. For a worker process, `request_number` identifies
    the request.
    """

    __slots__ = (
        "conversion", "cpu_ns", "deadline_ns", "end_ns", "error", "future", "hook", "in_hook", "is_small",
        "limit_start_ns", "parameters", "replica", "request_id", "request_number", "result", "start_ns", "started",
        "value",
    )  # fmt: skip

    def __init__(self, hook: str, value: Any, conversion: int, deadline_ns: int, request_id: str) -> None:
        self.hook = hook
        self.value = value
        self.conversion = conversion
        self.deadline_ns = deadline_ns
        self.request_id = request_id
        self.parameters: dict[str, Any] = {}
        self.started = self.in_hook = self.is_small = False
        self.request_number = 0
        self.replica: Any = None
        self.start_ns = 0
        self.limit_start_ns = 0
        self.end_ns = 0
        self.cpu_ns = 0
        self.result: Any = None
        self.error: InferError | None = None
        self.future: FutureLike

    def try_start(self, now_ns: int) -> bool:
        """Record that its turn has come; False if it must not be run. Threads: called on the replica's."""
        if self.future.done():
            return False
        if self.deadline_ns and now_ns >= self.deadline_ns:
            self.error = InferError(Code.EXPIRED, "Request timeout expired")
            return False
        self.start_ns = self.limit_start_ns = now_ns
        self.cpu_ns = 0
        return True

    def invoke(self, bound: BoundHooks) -> Any:
        """Run the hook; for an `async` one return an awaitable. Threads: called on the replica's."""
        value = self.value if self.hook == PRE else bound.conversions.to_prediction(self.value, self.parameters)
        self.in_hook = True
        return bound.functions[self.hook](value, self.parameters)  # type: ignore[misc]

    def convert_result(self, bound: BoundHooks, result: Any) -> Any:
        """Convert the hook's result for the caller. Threads: called on the replica's."""
        self.in_hook = False
        return bound.converters[self.conversion](result, self.parameters)

    def encode(self, accepts_parameters: Sequence[bool]) -> EncodedCall:
        """Encode the call for a worker process; `accepts_parameters`: whether each hook accepts parameters.

        Raises: TypeError or ValueError for values that cannot be sent.
        """
        hook_index = 0 if self.hook == PRE else 1
        text, encoding, arrays = write_outputs(self.value) if hook_index else write_sample(self.value)
        if not accepts_parameters[hook_index] or not self.parameters:
            return CALL, CALL_HEADER.pack(hook_index, self.conversion, encoding, 0, self.request_number) + text, arrays
        parameters, parameters_encoding = write_json(self.parameters)
        encoding += PYTHON_JSON_PARAMETERS if parameters_encoding == PYTHON_JSON else 0
        return (
            CALL,
            CALL_HEADER.pack(hook_index, self.conversion, encoding, len(parameters), self.request_number)
            + parameters
            + text,
            arrays,
        )

    def decode_answer(self, text: bytes, arrays: list[Array | None], exhausted_ns: int) -> Any:
        """Decode a worker process's answer."""
        return read_result(self.conversion, text, arrays)


def log_context(model: Model, call: HookCall) -> dict[str, str]:
    """Return the context of a call's log lines."""
    return {"model": model.name} | ({"request_id": call.request_id} if call.request_id else {})


def log_warning(message: str, context: Mapping[str, str], error: BaseException | None = None) -> None:
    """Log a warning, with the error's traceback if possible.

    Python 3.11 parses source to format a traceback, and raises SystemError if two threads do so at once.
    """
    trimmed = None if error is None else (type(error), error, user_frames(error))
    for exc_info in (trimmed, trimmed, trimmed, None):
        try:
            logger.warning("%s", message, exc_info=exc_info, extra=dict(context))
        except SystemError:
            continue
        return


def log_traceback(message: str, context: Mapping[str, str], traceback_text: str) -> None:
    """Log a warning with a traceback formatted by another process, "" for none."""
    if logger.isEnabledFor(logging.WARNING):
        record = logger.makeRecord(logger.name, logging.WARNING, "", 0, "%s", (message,), None, extra=dict(context))
        record.exc_text = traceback_text.rstrip() or None
        logger.handle(record)


def error_for_client(call: HookCall, error: BaseException, bound: BoundHooks) -> InferError:
    """Return the client's error for an exception in a hook; set a request id if only the log has the details.

    A hook may raise InferError itself to choose code and text, unless the dialect has its own text.
    """
    dialect_error = bound.dialect_error(call.hook, error) if call.in_hook else None
    if dialect_error is not None:
        dialect_error.__cause__ = error
        return dialect_error
    if isinstance(error, InferError):
        return error
    failure = error_for_message(call, exception_line(error), sample_at_fault=isinstance(error, Exception))
    failure.__cause__ = error
    return failure


def error_for_message(call: HookCall, text: str, *, sample_at_fault: bool) -> InferError:
    """Return the client's error for a hook that raised `text`; `sample_at_fault`: a bad sample may be the cause."""
    if call.hook == PRE and sample_at_fault:
        # usually a bad sample, so the client gets the text; it can do nothing about other errors
        return InferError(Code.INVALID, f"{call.hook}: {text}")
    call.request_id = call.request_id or secrets.token_hex(4)
    return InferError(Code.INTERNAL, f"{call.hook} failed; see the server log, request id {call.request_id}")


def log_exception(call: HookCall, error: BaseException, context: Mapping[str, str], last_traceback_ns: int) -> int:
    """Log what a hook raised, with a traceback unless the sample may be the cause and the last one was just logged.

    A traceback takes 0.5 ms to format: a client that sends only bad samples must not slow down others.
    Returns: when a traceback was last logged, as `last_traceback_ns`.
    """
    if error is call.error:
        if call.error.code is Code.INTERNAL:
            log_warning(f"{call.hook}: {call.error.message}", context)
        return last_traceback_ns
    now_ns = time.monotonic_ns()
    with_traceback = (
        call.hook != PRE or not isinstance(error, Exception) or now_ns - last_traceback_ns > _TRACEBACK_INTERVAL_NS
    )
    log_warning(f"{call.hook} raised {exception_line(error)}", context, error if with_traceback else None)
    return now_ns if with_traceback else last_traceback_ns
