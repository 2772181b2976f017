"""HookedRequest: passes one request through pre_inference, its model and post_inference, without a task of its own.

Begun by `runner.py`. The end of each step begins the next: for a replica a HookedRequest is the future of its call, for
the Engine the context of its request. So a request takes no extra turn of the event loop, and little Python.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, RequestOptions
from penstock.batching.running.custom_outputs import missing_output_error
from penstock.batching.scheduling.request_checks import make_request
from penstock.batching.statistics import OTHER

from .call import AnswerFormat, FutureLike, HookCall, ReplicaGoneError
from .conversions import Converter
from .loading import POST, PRE
from .packing import INPUTS
from .replica_lease import ReplicaLease
from .sequence_turns import SequenceTurn

if TYPE_CHECKING:
    from .runner import Hooks

_MAX_INLINE_VALUES = 4096
"""From this many values conversion is done on a thread, if no hook's thread does it: about 100 us to and from JSON."""

AsyncStep = Callable[[], Coroutine[Any, Any, Any]]
"""A step done on a task, which may be cancelled before it begins."""


class HookedRequest:
    """The state of one request from its sample to its answer.

    Invariant: its promise, a future or an object that answers at once, is completed once, unless it was `done` before
    or the HookedRequest is cancelled, which takes effect a turn later if a task is waiting. If it is `includes_post`,
    its lease has ended by then; otherwise it ends with the model's outputs, and the caller must end its lease.
    Units: `start_ns` is monotonic. Threads: the event loop's.
    """

    __slots__ = (
        "_call", "_ended", "_format", "_hooks", "_includes_post", "_model_ran", "_pending", "_promise", "_request",
        "_sequence_turn", "_step_start_ns", "_terms", "lease", "parameters", "request_id", "start_ns",
    )  # fmt: skip

    def __init__(
        self, hooks: Hooks, answer_format: AnswerFormat, promise: FutureLike, *, includes_post: bool = True
    ) -> None:
        """Admit a request. Raises: InferError (OVERLOADED, NOT_READY)."""
        self.lease = hooks.admit()
        self._hooks = hooks
        self._format = answer_format
        self._promise = promise
        self._includes_post = includes_post
        self._ended = self._model_ran = False
        self._call: HookCall | None = None
        self._request: InferRequest | None = None
        self._pending: asyncio.Future[Any] | None = None
        self._sequence_turn: SequenceTurn | None = None

    @property
    def active_lease(self) -> ReplicaLease:
        """The ReplicaLease of a request whose model has hooks."""
        if self.lease is None:
            raise InferError(Code.INTERNAL, "hooks without replicas")
        return self.lease

    def begin(
        self,
        sample: Any,
        request_id: str,
        terms: RequestOptions,
        parameters: Mapping[str, Any] | None,
        *,
        is_small: bool = False,
    ) -> None:
        """Begin; any error completes the promise. `is_small`: the sample is known to be small."""
        hooks = self._hooks
        self.request_id, self._terms = request_id, terms
        # copied, because requests remembered as alike share them
        self.parameters = dict(parameters or {})
        self.start_ns = self._step_start_ns = time.monotonic_ns()
        try:
            if terms.sequence is not None and hooks.model.spec.sequence is not None:
                self._sequence_turn = hooks.sequence_turns.take(terms.sequence.id)
            if self.lease is not None and hooks.has_pre:
                call = HookCall(PRE, sample, INPUTS, terms.deadline_ns, self.request_id)
                call.is_small = is_small
                self._run_hook(call)
            else:
                self._convert(self._format.convert_sample, sample)
        except Exception as error:  # noqa: BLE001 - any error becomes the request's
            self._fail(error)

    def cancel(self) -> None:
        """End the HookedRequest, because nobody waits for it. A running hook continues; a waiting call is skipped."""
        if self._ended:
            return
        request, self._request = self._request, None
        self._detach()
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        if request is not None:
            self._hooks.engine.cancel(request)

    # -- future of the call ------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether nobody waits for the call any more."""
        return self._ended

    def set_result(self, result: Any) -> None:
        """Handle a hook's converted result."""
        self.lease.on_hook_returned(self._call)  # type: ignore[arg-type, union-attr]
        self._call = None
        self._resume(result)

    def set_exception(self, error: BaseException) -> None:
        """Handle a hook's error, which ends the HookedRequest unless another replica can take the call."""
        if isinstance(error, ReplicaGoneError) and self._call is not None:
            try:
                self.active_lease.on_replica_gone(self._call)
            except InferError as unavailable:
                error = unavailable
            else:
                self._dispatch(self._call)
                return
        if isinstance(error, InferError):
            self._hooks.model.statistics.record_failure(OTHER, self._step_start_ns, time.monotonic_ns())
        self._fail(error)

    # -- context of the request --------------------------------------------------------------------------------

    def on_outputs(self, request: InferRequest) -> None:
        """Handle the model's outputs."""
        self._request = None
        if self._ended:
            return
        outputs = request.outputs or []
        failure = request.error or (missing_output_error(outputs) if self._hooks.has_post else None)
        if failure is not None:
            self._fail(failure)
            return
        if not self._includes_post:
            self._complete(outputs)
            return
        self._model_ran = True
        try:
            if self.lease is not None and self._hooks.has_post:
                # a deadline is for waiting: once the model has run, a request is finished
                self._run_hook(HookCall(POST, outputs, self._format.conversion, 0, self.request_id))
            else:
                self._convert(self._format.convert_outputs, outputs)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    # -- steps -------------------------------------------------------------------------------------------------

    def _run_hook(self, call: HookCall) -> None:
        """Run a hook, as soon as a replica is free."""
        call.parameters = self.parameters
        call.future = self
        self._call = call
        self._step_start_ns = time.monotonic_ns()
        self._dispatch(call)

    def _dispatch(self, call: HookCall) -> None:
        try:
            if not self.lease.dispatch(call):  # type: ignore[union-attr]
                self._pending = self.active_lease.request_replica(call.deadline_ns)
                self._pending.add_done_callback(self._on_replica)
        except InferError as error:
            self.set_exception(error)

    def _on_replica(self, granted: asyncio.Future[Any]) -> None:
        """Use a replica that was waited for."""
        self._pending = None
        if granted.cancelled():
            return
        error = granted.exception()
        if self._call is None:  # cancelled in the turn in which it was handed over
            if error is None:
                self.active_lease.return_unused(granted.result())
        elif error is not None:
            self.set_exception(error)
        else:
            self.active_lease.hold(granted.result())
            self._dispatch(self._call)

    def _convert(self, convert: Converter, value: Any) -> None:
        """Convert what no hook's thread converts, on a thread if it is large."""
        if _has_many_values(value):
            self._start_task(partial(asyncio.to_thread, convert, value, self.parameters))
        else:
            self._resume(convert(value, self.parameters))

    def _resume(self, converted: Any) -> None:
        """Continue with a converted value: inputs, or the answer."""
        if self._model_ran:
            self._complete(converted)
        elif self._sequence_turn is not None:
            self._start_task(self._sequence_turn.wait_turn, lambda _: self._submit(converted))
        else:
            self._submit(converted)

    def _submit(self, inputs: list[Any]) -> None:
        hooks = self._hooks
        output_indices = (
            hooks.all_output_indices
            if hooks.has_post or self._format.requested_outputs is None
            else self._format.requested_outputs
        )
        try:
            request = make_request(
                hooks.model, inputs, output_indices, self._terms, self.parameters if hooks.takes_parameters else None
            )
            request.id = self.request_id
            request.sink, request.context = SINK, self
            self._request = request
            hooks.engine.submit_soon(request)
        except Exception as error:  # noqa: BLE001 - as above
            self._request = None
            self._fail(error)
            return
        if self._sequence_turn is not None:
            # the next request wakes only after this one is in the queue
            self._sequence_turn.release_turn()
            self._sequence_turn = None

    def _start_task(self, step: AsyncStep, on_done: Callable[[Any], None] | None = None) -> None:
        self._pending = asyncio.ensure_future(self._await_step(step, on_done or self._resume))

    async def _await_step(self, step: AsyncStep, on_done: Callable[[Any], None]) -> None:
        try:
            converted = await step()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return
        self._pending = None
        on_done(converted)

    # -- end ---------------------------------------------------------------------------------------------------

    def _complete(self, result: Any) -> None:
        if not self._ended:
            promise = self._detach()
            if not promise.done():
                promise.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self._ended:
            promise = self._detach()
            if not promise.done():
                promise.set_exception(error)

    def _detach(self) -> FutureLike:
        # an error's traceback holds this HookedRequest, and a promise the error: break the cycle
        promise, self._promise = self._promise, _NO_PROMISE
        turn, self._sequence_turn = self._sequence_turn, None
        self._ended, self._call = True, None
        if turn is not None:
            turn.release_turn()
        if self._includes_post:
            self._hooks.release(self.lease)
        return promise


class _HookedRequestSink:
    """The sink of all HookedRequests."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            request.context.on_outputs(request)


SINK = _HookedRequestSink()
_NO_PROMISE: Any = None


def _has_many_values(value: Any) -> bool:
    """Estimate, from the first element at each depth, whether nested lists and dicts have many values."""
    if isinstance(value, dict):
        return any(map(_has_many_values, value.values()))
    count = 1
    while isinstance(value, list | np.ndarray):
        if isinstance(value, np.ndarray):
            return count * value.size > _MAX_INLINE_VALUES
        if not value:
            return False
        count *= len(value)
        if count > _MAX_INLINE_VALUES or any(
            isinstance(item, np.ndarray) and item.size > _MAX_INLINE_VALUES for item in value
        ):
            return True
        value = value[0]
    return False
