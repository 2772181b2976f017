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

from .bound_hooks import BoundHooks, Maker
from .loading import POST, PRE, brief
from .packing import (
    ASKED,
    CALL,
    FULL_JSON,
    FULL_PARAMETERS,
    read_made,
    write_json,
    write_outputs,
    write_sample,
)  # fmt: skip
from .user_frames import user_frames

Written = tuple[int, bytes, list[Array | None] | None]
"""What a worker process is sent: kind, body, tensors."""
STATISTICS_NAMES = {PRE: "pre", POST: "post"}
"""The names of the hooks in statistics."""
_TELL_NS = 1_000_000_000

logger = logging.getLogger("penstock.hooks")


class MovedError(Exception):
    """The replica is gone and the call has not begun: another replica may take it."""


class FutureLike(Protocol):
    """What waits for a call or a Trip, such as a future. If `done`, it no longer waits and must not be completed."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...


class ReplicaOwner(Protocol):
    """The owner of replicas. Threads: called on the event loop, except for `measures`: CPU times are required.

    `several`: other replicas take the same calls. `quiet`: no other call is likely to come in this turn of the loop.
    `few`: there are so few requests that a thread would be woken for almost each of them.
    """

    @property
    def measures(self) -> bool: ...

    @property
    def quiet(self) -> bool: ...

    @property
    def few(self) -> bool: ...

    @property
    def several(self) -> bool: ...

    def took(self, call: HookCall, took_ns: int) -> None:
        """Handle the duration of a slow call, or of any call while `measures`."""

    def idle(self, replica: Any) -> None:
        """Handle that nothing waits for the replica, if there are `several`."""

    def freed(self, replica: Any) -> None:
        """Handle that the replica was given back, and that none of its hooks is running."""

    def lost(self, replica: Any) -> None:
        """Handle that the replica hangs, or that its thread has ended."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """One way to answer: how to convert a sample or the outputs `wanted` if there is no hook.

    `asked_as` is the method that returns one such answer; `code` is the conversion of a hook's result.
    """

    asked_as: str
    code: int
    of_sample: Maker
    of_outputs: Maker
    wanted: tuple[int, ...] | None


class HookCall:
    """One call of a hook, or the load of the file.

    `value` is a sample, or a model's outputs. `form` is the conversion of the hook's result, done on the replica's
    thread as well (packing.INPUTS and so on). `parameters` are the request's own. `in_hook`: user code is running, so
    exceptions are its own.
    Units: stamps in monotonic nanoseconds; `deadline_ns` applies until the hook begins, 0 means none. `since_ns` is the
    start of what its time limit covers: the call, or a generator's step. `begun`: no other replica can take it.
    `small`: its value is known to be small. `replica` runs it. For a worker process, `number` identifies the request.
    """

    __slots__ = (
        "begun", "cpu_ns", "deadline_ns", "end_ns", "error", "form", "future", "hook", "in_hook", "number",
        "parameters", "replica", "request_id", "result", "since_ns", "small", "start_ns", "value",
    )  # fmt: skip

    def __init__(self, hook: str, value: Any, form: int, deadline_ns: int, request_id: str) -> None:
        self.hook = hook
        self.value = value
        self.form = form
        self.deadline_ns = deadline_ns
        self.request_id = request_id
        self.parameters: dict[str, Any] = {}
        self.begun = self.in_hook = self.small = False
        self.number = 0
        self.replica: Any = None
        self.start_ns = 0
        self.since_ns = 0
        self.end_ns = 0
        self.cpu_ns = 0
        self.result: Any = None
        self.error: InferError | None = None
        self.future: FutureLike

    def begins(self, now_ns: int) -> bool:
        """Record that its turn has come; False if it must not be run. Threads: called on the replica's."""
        if self.future.done():
            return False
        if self.deadline_ns and now_ns >= self.deadline_ns:
            self.error = InferError(Code.EXPIRED, "Request timeout expired")
            return False
        self.start_ns = self.since_ns = now_ns
        self.cpu_ns = 0
        return True

    def invoke(self, bound: BoundHooks) -> Any:
        """Run the hook; for an `async` one return an awaitable. Threads: called on the replica's."""
        value = self.value if self.hook == PRE else bound.rules.prediction(self.value, self.parameters)
        self.in_hook = True
        return bound.functions[self.hook](value, self.parameters)  # type: ignore[misc]

    def made(self, bound: BoundHooks, result: Any) -> Any:
        """Convert the hook's result for the caller. Threads: called on the replica's."""
        self.in_hook = False
        return bound.makers[self.form](result, self.parameters)

    def written(self, takes: Sequence[bool]) -> Written:
        """Encode the call for a worker process; `takes`: whether each hook accepts parameters.

        Raises: TypeError or ValueError for values that cannot be sent.
        """
        position = 0 if self.hook == PRE else 1
        text, how, arrays = write_outputs(self.value) if position else write_sample(self.value)
        if not takes[position] or not self.parameters:
            return CALL, ASKED.pack(position, self.form, how, 0, self.number) + text, arrays
        parameters, full = write_json(self.parameters)
        how += FULL_PARAMETERS if full == FULL_JSON else 0
        return CALL, ASKED.pack(position, self.form, how, len(parameters), self.number) + parameters + text, arrays

    def taken(self, text: bytes, arrays: list[Array | None], ended_ns: int) -> Any:
        """Decode a worker process's answer."""
        return read_made(self.form, text, arrays)


def about_of(model: Model, call: HookCall) -> dict[str, str]:
    """Return the context of a call's log lines."""
    return {"model": model.name} | ({"request_id": call.request_id} if call.request_id else {})


def log(message: str, about: Mapping[str, str], error: BaseException | None = None) -> None:
    """Log a warning, with the error's traceback if possible.

    Python 3.11 parses source to format a traceback, and raises SystemError if two threads do so at once.
    """
    trimmed = None if error is None else (type(error), error, user_frames(error))
    for raised in (trimmed, trimmed, trimmed, None):
        try:
            logger.warning("%s", message, exc_info=raised, extra=dict(about))
        except SystemError:
            continue
        return


def log_lines(message: str, about: Mapping[str, str], lines: str) -> None:
    """Log a warning with a traceback formatted by another process, "" for none."""
    if logger.isEnabledFor(logging.WARNING):
        record = logger.makeRecord(logger.name, logging.WARNING, "", 0, "%s", (message,), None, extra=dict(about))
        record.exc_text = lines.rstrip() or None
        logger.handle(record)


def refusal(call: HookCall, error: BaseException, bound: BoundHooks) -> InferError:
    """Return the client's error for an exception in a hook; set a request id if only the log has the details.

    A hook may raise InferError itself to choose code and text, unless the dialect has its own text.
    """
    worded = bound.words(call.hook, error) if call.in_hook else None
    if worded is not None:
        worded.__cause__ = error
        return worded
    if isinstance(error, InferError):
        return error
    refused = blame(call, brief(error), sample=isinstance(error, Exception))
    refused.__cause__ = error
    return refused


def blame(call: HookCall, text: str, *, sample: bool) -> InferError:
    """Return the client's error for a hook that raised `text`; `sample`: a bad sample may be the cause."""
    if call.hook == PRE and sample:
        # usually a bad sample, so the client gets the text; it can do nothing about other errors
        return InferError(Code.INVALID, f"{call.hook}: {text}")
    call.request_id = call.request_id or secrets.token_hex(4)
    return InferError(Code.INTERNAL, f"{call.hook} failed; the log has the rest under request id {call.request_id}")


def tell(call: HookCall, error: BaseException, about: Mapping[str, str], told_ns: int) -> int:
    """Log what a hook raised, with a traceback unless the sample may be the cause and the last one was just logged.

    A traceback takes 0.5 ms to format: a client that sends only bad samples must not slow down others.
    Returns: when a traceback was last logged, as `told_ns`.
    """
    if error is call.error:
        if call.error.code is Code.INTERNAL:
            log(f"{call.hook}: {call.error.message}", about)
        return told_ns
    now_ns = time.monotonic_ns()
    in_full = call.hook != PRE or not isinstance(error, Exception) or now_ns - told_ns > _TELL_NS
    log(f"{call.hook} raised {brief(error)}", about, error if in_full else None)
    return now_ns if in_full else told_ns
