"""Trip: passes one request through pre_inference, its model and post_inference, without a task of its own.

Begun by `runner.py`. The end of each step begins the next: for a replica a Trip is the future of its call, for the
Engine the context of its request. So a request takes no extra turn of the event loop, and little Python.
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
from penstock.batching.scheduling.admission import request_for
from penstock.batching.statistics import OTHER

from .bound_hooks import Maker
from .call import AnswerForm, FutureLike, HookCall, MovedError
from .loading import PRE
from .packing import INPUTS
from .turns import SequenceTurn
from .visit import Visit

if TYPE_CHECKING:
    from .runner import Hooks

_BIG = 4096
"""From this many values conversion is done on a thread, if no hook's thread does it: about 100 us to and from JSON."""

Work = Callable[[], Coroutine[Any, Any, Any]]
"""A step done on a task, which may be cancelled before it begins."""


class Trip:
    """The state of one request from its sample to its answer.

    Invariant: its promise, a future or an object that answers at once, is completed once, unless it was `done` before
    or the Trip is cancelled, which takes effect a turn later if a task is waiting. If it is `whole`, its visit has
    ended by then; otherwise it ends with the model's outputs, and the caller must end its visit.
    Units: `start_ns` is monotonic. Threads: the event loop's.
    """

    __slots__ = (
        "_call", "_ended", "_form", "_hooks", "_past_model", "_promise", "_request", "_since_ns", "_terms",
        "_turn", "_waits", "_whole", "parameters", "request_id", "start_ns", "visit",
    )  # fmt: skip

    def __init__(self, hooks: Hooks, form: AnswerForm, promise: FutureLike, *, whole: bool = True) -> None:
        """Admit a request. Raises: InferError (OVERLOADED, NOT_READY)."""
        self.visit = hooks.admit()
        self._hooks = hooks
        self._form = form
        self._promise = promise
        self._whole = whole
        self._ended = self._past_model = False
        self._call: HookCall | None = None
        self._request: InferRequest | None = None
        self._waits: asyncio.Future[Any] | None = None
        self._turn: SequenceTurn | None = None

    @property
    def held(self) -> Visit:
        """The Visit of a request whose model has hooks."""
        if self.visit is None:
            raise InferError(Code.INTERNAL, "hooks without replicas")
        return self.visit

    def begin(
        self,
        sample: Any,
        request_id: str,
        terms: RequestOptions,
        parameters: Mapping[str, Any] | None,
        *,
        small: bool = False,
    ) -> None:
        """Begin; any error completes the promise. `small`: the sample is known to be small."""
        hooks = self._hooks
        self.request_id, self._terms = request_id, terms
        # copied, because requests remembered as alike share them
        self.parameters = dict(parameters or {})
        self.start_ns = self._since_ns = time.monotonic_ns()
        try:
            if terms.sequence is not None and hooks.model.spec.sequence is not None:
                self._turn = hooks.turns.take(terms.sequence.id)
            if self.visit is not None and hooks.has_pre:
                call = HookCall(PRE, sample, INPUTS, terms.deadline_ns, self.request_id)
                call.small = small
                self._have_run(call)
            else:
                self._convert(self._form.of_sample, sample)
        except Exception as error:  # noqa: BLE001 - any error becomes the request's
            self._fail(error)

    def cancel(self) -> None:
        """End the Trip, because nobody waits for it. A running hook continues; a waiting call is skipped."""
        if self._ended:
            return
        request, self._request = self._request, None
        self._leave()
        if self._waits is not None:
            self._waits.cancel()
            self._waits = None
        if request is not None:
            self._hooks.engine.cancel(request)

    # -- future of the call ------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether nobody waits for the call any more."""
        return self._ended

    def set_result(self, result: Any) -> None:
        """Handle a hook's converted result."""
        self.visit.returned(self._call)  # type: ignore[arg-type, union-attr]
        self._call = None
        self._go_on(result)

    def set_exception(self, error: BaseException) -> None:
        """Handle a hook's error, which ends the Trip unless another replica can take the call."""
        if isinstance(error, MovedError) and self._call is not None:
            try:
                self.held.moved(self._call)
            except InferError as gone:
                error = gone
            else:
                self._put(self._call)
                return
        if isinstance(error, InferError):
            self._hooks.model.statistics.record_failure(OTHER, self._since_ns, time.monotonic_ns())
        self._fail(error)

    # -- context of the request --------------------------------------------------------------------------------

    def ran(self, request: InferRequest) -> None:
        """Handle the model's outputs."""
        self._request = None
        if self._ended:
            return
        outputs = request.outputs or []
        failure = request.error or (missing_output_error(outputs) if self._hooks.has_post else None)
        if failure is not None:
            self._fail(failure)
            return
        if not self._whole:
            self._end(outputs)
            return
        self._past_model = True
        try:
            if self.visit is not None and self._hooks.has_post:
                self._have_run(self.visit.post(outputs, self._form, self.request_id))
            else:
                self._convert(self._form.of_outputs, outputs)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    # -- steps -------------------------------------------------------------------------------------------------

    def _have_run(self, call: HookCall) -> None:
        """Run a hook, as soon as a replica is free."""
        call.parameters = self.parameters
        call.future = self
        self._call = call
        self._since_ns = time.monotonic_ns()
        self._put(call)

    def _put(self, call: HookCall) -> None:
        try:
            if not self.visit.put(call):  # type: ignore[union-attr]
                self._waits = self.held.line_up(call.deadline_ns)
                self._waits.add_done_callback(self._granted)
        except InferError as error:
            self.set_exception(error)

    def _granted(self, granted: asyncio.Future[Any]) -> None:
        """Use a replica that was waited for."""
        self._waits = None
        if granted.cancelled():
            return
        error = granted.exception()
        if self._call is None:  # cancelled in the turn in which it was handed over
            if error is None:
                self.held.give_back(granted.result())
        elif error is not None:
            self.set_exception(error)
        else:
            self.held.take(granted.result())
            self._put(self._call)

    def _convert(self, convert: Maker, value: Any) -> None:
        """Convert what no hook's thread converts, on a thread if it is large."""
        if _is_big(value):
            self._later(partial(asyncio.to_thread, convert, value, self.parameters))
        else:
            self._go_on(convert(value, self.parameters))

    def _go_on(self, made: Any) -> None:
        """Continue with a converted value: inputs, or the answer."""
        if self._past_model:
            self._end(made)
        elif self._turn is not None:
            self._later(self._turn.come, lambda _: self._enter(made))
        else:
            self._enter(made)

    def _enter(self, inputs: list[Any]) -> None:
        hooks = self._hooks
        wanted = hooks.every if hooks.has_post or self._form.wanted is None else self._form.wanted
        try:
            request = request_for(
                hooks.model, inputs, wanted, self._terms, self.parameters if hooks.takes_parameters else None
            )
            request.id = self.request_id
            request.sink, request.context = TRIPS, self
            self._request = request
            hooks.engine.submit_soon(request)
        except Exception as error:  # noqa: BLE001 - as above
            self._request = None
            self._fail(error)
            return
        if self._turn is not None:
            # the next request wakes only after this one is in the queue
            self._turn.pass_on()
            self._turn = None

    def _later(self, work: Work, then: Callable[[Any], None] | None = None) -> None:
        self._waits = asyncio.ensure_future(self._wait(work, then or self._go_on))

    async def _wait(self, work: Work, then: Callable[[Any], None]) -> None:
        try:
            made = await work()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)
            return
        self._waits = None
        then(made)

    # -- end ---------------------------------------------------------------------------------------------------

    def _end(self, result: Any) -> None:
        if not self._ended:
            promise = self._leave()
            if not promise.done():
                promise.set_result(result)

    def _fail(self, error: BaseException) -> None:
        if not self._ended:
            promise = self._leave()
            if not promise.done():
                promise.set_exception(error)

    def _leave(self) -> FutureLike:
        # an error's traceback holds this Trip, and a promise the error: break the cycle
        promise, self._promise = self._promise, _NOBODY
        turn, self._turn = self._turn, None
        self._ended, self._call = True, None
        if turn is not None:
            turn.pass_on()
        if self._whole:
            self._hooks.leave(self.visit)
        return promise


class _Trips:
    """The sink of all requests of Trips."""

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        for request in requests:
            request.context.ran(request)


TRIPS = _Trips()
_NOBODY: Any = None


def _is_big(value: Any) -> bool:
    """Estimate, from the first element at each depth, whether nested lists and dicts have many values."""
    if isinstance(value, dict):
        return any(map(_is_big, value.values()))
    count = 1
    while isinstance(value, list | np.ndarray):
        if isinstance(value, np.ndarray):
            return count * value.size > _BIG
        if not value:
            return False
        count *= len(value)
        if count > _BIG or any(isinstance(item, np.ndarray) and item.size > _BIG for item in value):
            return True
        value = value[0]
    return False
