"""HookCall: one call of a hook, and what the client is told when it fails. Made by `runner.py`, run by a replica."""

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

Written = tuple[int, bytes, list[Array | None] | None]
"""What a worker process is sent: kind, body, tensors."""
STATISTICS_NAMES = {PRE: "pre", POST: "post"}
"""How statistics call the hooks."""
_TELL_NS = 1_000_000_000

logger = logging.getLogger("penstock.hooks")


class MovedError(Exception):
    """The replica is gone and the call has not begun: another one may take it."""


class FutureLike(Protocol):
    """Who waits for a call, or for a Trip: a future, say. `done`: nobody does any more, and is to be told nothing."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, error: BaseException, /) -> None: ...


class ReplicaOwner(Protocol):
    """Whoever keeps replicas. Threads: called on the event loop, but for `measures`: each call's processor time counts.

    `several`: other replicas take the same calls. `quiet`: no other call is likely to come in this turn of the loop.
    `few`: so few requests are under way that a thread would be woken for nearly each.
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
        """Hear of a call that took long, or of any while `measures`."""

    def idle(self, replica: Any) -> None:
        """Hear that nothing waits for the replica, where there are `several`."""

    def freed(self, replica: Any) -> None:
        """Hear that the replica was given back, and that no hook of it runs any more."""

    def lost(self, replica: Any) -> None:
        """Hear that the replica hangs, or that its thread has ended."""


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """One way to answer: what is made where there is no hook, of a sample and of the outputs `wanted`.

    `asked_as` is the call that wants one answer in this way; `code` is what to make of a hook's result.
    """

    asked_as: str
    code: int
    of_sample: Maker
    of_outputs: Maker
    wanted: tuple[int, ...] | None


class HookCall:
    """One call of a hook, or the load of the file.

    `value` is a sample, or a model's outputs. `form` says what is to be made of the hook's result, on the replica's
    thread as well (packing.INPUTS and so on). `parameters` are the request's own. `in_hook`: what is raised is the
    user's.
    Units: stamps in monotonic nanoseconds; `deadline_ns` 0 is none, and counts until the hook begins. `since_ns` is
    when what its time limit is for began: the call, or the step of a generator. `begun`: no other replica can take it.
    `small`: its value is known to be. `replica` is who runs it. For a worker process, `number` says which request it is
    of.
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
        """Note that its turn has come; False: it is not to be run any more. Threads: called on the replica's."""
        if self.future.done():
            return False
        if self.deadline_ns and now_ns >= self.deadline_ns:
            self.error = InferError(Code.EXPIRED, "Request timeout expired")
            return False
        self.start_ns = self.since_ns = now_ns
        self.cpu_ns = 0
        return True

    def invoke(self, bound: BoundHooks) -> Any:
        """Run the hook; of an `async` one it gives what is to be awaited. Threads: called on the replica's."""
        value = self.value if self.hook == PRE else bound.rules.prediction(self.value, self.parameters)
        self.in_hook = True
        return bound.functions[self.hook](value, self.parameters)  # type: ignore[misc]

    def made(self, bound: BoundHooks, result: Any) -> Any:
        """Give what the caller wants of what the hook has returned. Threads: called on the replica's."""
        self.in_hook = False
        return bound.makers[self.form](result, self.parameters)

    def written(self, takes: Sequence[bool]) -> Written:
        """Write the call for a worker process; `takes`: whether either hook is given parameters.

        Raises: TypeError or ValueError for what cannot travel.
        """
        position = 0 if self.hook == PRE else 1
        text, how, arrays = write_outputs(self.value) if position else write_sample(self.value)
        if not takes[position] or not self.parameters:
            return CALL, ASKED.pack(position, self.form, how, 0, self.number) + text, arrays
        parameters, full = write_json(self.parameters)
        how += FULL_PARAMETERS if full == FULL_JSON else 0
        return CALL, ASKED.pack(position, self.form, how, len(parameters), self.number) + parameters + text, arrays

    def taken(self, text: bytes, arrays: list[Array | None], ended_ns: int) -> Any:
        """Read what a worker process has answered."""
        return read_made(self.form, text, arrays)


def about_of(model: Model, call: HookCall) -> dict[str, str]:
    """Give what goes with the log lines of a call."""
    return {"model": model.name} | ({"request_id": call.request_id} if call.request_id else {})


def log(message: str, about: Mapping[str, str], error: BaseException | None = None) -> None:
    """Log a warning, with the error's traceback if at all possible.

    Python 3.11 parses source to write a traceback, and raises SystemError when two threads do so at once.
    """
    for raised in (error, error, error, None):
        try:
            logger.warning("%s", message, exc_info=raised, extra=dict(about))
        except SystemError:
            continue
        return


def log_lines(message: str, about: Mapping[str, str], lines: str) -> None:
    """Log a warning with a traceback that another process has written, "" for none."""
    if logger.isEnabledFor(logging.WARNING):
        record = logger.makeRecord(logger.name, logging.WARNING, "", 0, "%s", (message,), None, extra=dict(about))
        record.exc_text = lines.rstrip() or None
        logger.handle(record)


def refusal(call: HookCall, error: BaseException, bound: BoundHooks) -> InferError:
    """Make what the client is told when a hook raised; give the request an id if the rest is in the log only.

    A hook may raise InferError itself, and so choose code and text, where the dialect has no words of its own.
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
    """Make what the client is told when a hook raised `text`; `sample`: the sample may be to blame, if it is read."""
    if call.hook == PRE and sample:
        # mostly a sample that lacks something, so it says what; of the others a client can do nothing about
        return InferError(Code.INVALID, f"{call.hook}: {text}")
    call.request_id = call.request_id or secrets.token_hex(4)
    return InferError(Code.INTERNAL, f"{call.hook} failed; the log has the rest under request id {call.request_id}")


def tell(call: HookCall, error: BaseException, about: Mapping[str, str], told_ns: int) -> int:
    """Log what a hook raised, in full unless it is about the sample and the last such was told just before.

    A traceback takes 0.5 ms to write: a client that sends nothing but bad samples must not slow down the others.
    Returns: when it was last told in full, as `told_ns`.
    """
    if error is call.error:
        if call.error.code is Code.INTERNAL:
            log(f"{call.hook}: {call.error.message}", about)
        return told_ns
    now_ns = time.monotonic_ns()
    in_full = call.hook != PRE or not isinstance(error, Exception) or now_ns - told_ns > _TELL_NS
    log(f"{call.hook} raised {brief(error)}", about, error if in_full else None)
    return now_ns if in_full else told_ns
