"""RemoteEngine: a front end's substitute for the Engine, which is in another process.

Dialects, hooks and RPCs use it like the Engine. Requests leave as SUBMIT, and return as DONE or FAILED.
`model_table.py` provides the Models. The engine's half is `engine_service.py`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, NoReturn

from penstock.backends.errors import Code, InferError, without_traceback
from penstock.batching.registry import LOADING_MESSAGE, STOPPING_MESSAGE, CompletionWaiters, ModelRegistry
from penstock.batching.statistics import REJECTED
from penstock.server.ipc.errors import read_error

from .message_kinds import ANSWER, CANCEL, DONE, FAILED, SUBMIT, TEMPLATE
from .request_codec import RequestTemplate, extra_properties, read_answer, unpack_outputs, write_submit, write_template

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backends.backend import Array
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest, Key
    from penstock.server.ipc.link import Link
    from penstock.server.ipc.wire import Message

logger = logging.getLogger("penstock.fronts")

NO_ENGINE = "the engine is not running, try again soon"
ENGINE_LOST = "the engine ended while it had this request, try again soon"
UNREADABLE_ANSWER = "the engine sent an answer that cannot be read"
RETRY_NS = 1_000_000_000
"""When to retry after the engine has ended: it is restarted at once."""
MAX_UNSENT_BYTES = 64 << 20
"""An engine that has left this much unread is sent no more requests. Tensors count only if the arena, of 1 GiB, has no
room for them."""
_MAX_TEMPLATES = 4096


class RemoteEngine:
    """The engine as seen by a front end, with Models that have neither Instances nor a queue of their own.

    Invariants: a request accepted by `submit` is delivered to its sink exactly once, unless it is cancelled; if the
    engine is lost, with an error. Nothing waits here: submitted requests leave at the end of the loop turn. `numbers`
    are the Models that the engine knows, with its numbers; `forwards_trace`: the trace contexts of clients are
    sent with their requests. `generation` changes whenever the results of `model` may change.
    Threads: the event loop's.
    """

    def __init__(self) -> None:
        self._link: Link | None = None
        self._loaded = ModelRegistry()
        self._templates: dict[tuple[Model, int, Key, tuple[int, ...]], tuple[int, bool]] = {}
        self._last_template = 0
        self._inflight: dict[int, InferRequest] = {}
        self._last_number = 0
        self._hold_waiters = CompletionWaiters(lambda model: not model.hold_count)
        self._finish_waiters = CompletionWaiters(lambda model: not model.inflight)
        self.numbers: dict[Model, int] = {}
        self.forwards_trace = False
        self.generation = 0
        self.load_complete = False
        self.stopping = False

    # -- the engine comes and goes -----------------------------------------------------------------------------

    def attach(self, link: Link) -> None:
        """Submit to the engine at the other end of `link` from now on."""
        self._link = link

    def detach(self) -> None:
        """Fail the requests in flight at once: the engine has gone."""
        self._link = None
        self.load_complete = False
        self._templates.clear()
        self.numbers.clear()
        self._loaded.clear()
        self.generation += 1
        requests = list(self._inflight.values())
        self._inflight.clear()
        for request in requests:
            request.error = InferError(Code.NOT_READY, ENGINE_LOST, RETRY_NS)
        self._deliver(requests)

    # -- models ------------------------------------------------------------------------------------------------

    def publish(self, name: str, models: Iterable[Model], absent: Iterable[str]) -> None:
        """Replace all versions of a name; `absent` are versions that should be there, or were."""
        self._loaded.replace(name, models, absent)
        self.generation += 1

    def model(self, name: str, version: str = "") -> Model:
        """Find a published version; "" means the highest. Raises: InferError (NOT_FOUND; NOT_READY: no engine)."""
        if self._link is None:
            raise InferError(Code.NOT_READY, NO_ENGINE, RETRY_NS)
        try:
            return self._loaded.find(name, version)
        except InferError:
            if self.load_complete:
                raise
            raise InferError(Code.NOT_READY, LOADING_MESSAGE, RETRY_NS) from None

    def models(self) -> list[Model]:
        """List every published version, by name and version."""
        return self._loaded.all()

    def hold(self, model: Model) -> None:
        """Prevent a Model from being retired while a request for it is being decoded. Must be followed by `release`."""
        model.hold_count += 1

    def release(self, model: Model) -> None:
        """End a `hold`."""
        model.hold_count -= 1
        self._hold_waiters.check(model)

    async def wait_released(self, model: Model) -> None:
        """Wait until nothing holds a Model."""
        await self._hold_waiters.wait(model)

    async def retire(self, model: Model) -> None:
        """Wait until no request of a Model is in flight, and forget it."""
        await self._finish_waiters.wait(model)
        self.numbers.pop(model, None)
        for key in [key for key in self._templates if key[0] is model]:
            del self._templates[key]

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def inflight(self) -> int:
        """The number of requests accepted and not yet delivered."""
        return len(self._inflight)

    def submit(self, request: InferRequest) -> None:
        """Send a request to the engine.

        Raises: InferError (NOT_READY: there is no engine; OVERLOADED: it does not keep up).
        """
        model = request.model
        template, takes_parameters = self._templates.get(
            (model, request.rows, request.key, request.output_positions)
        ) or self._send_template(request)
        link = self._link
        if link is None or link.unsent_bytes > MAX_UNSENT_BYTES:
            self._reject(request, InferError(Code.OVERLOADED, "Exceeds maximum queue size"))
        if not request.start_ns:
            request.start_ns = time.monotonic_ns()
        self._last_number = number = self._last_number + 1
        extra = None
        if takes_parameters or request.sequence is not None or self.forwards_trace:
            extra = extra_properties(request, takes_parameters=takes_parameters, forwards_trace=self.forwards_trace)
        try:
            link.send(SUBMIT, number, write_submit(request, template, extra), request.inputs)
        except (TypeError, ValueError) as error:
            self._reject(request, InferError(Code.INVALID, str(error)))
        request.remote_id = number
        self._inflight[number] = request
        model.inflight += 1

    submit_soon = submit  # the link sends all of a turn together

    def _send_template(self, request: InferRequest) -> tuple[int, bool]:
        """Send the engine the properties that this request shares with others.

        Returns: the form's number, and whether its model takes parameters.
        """
        number = self.numbers.get(request.model)
        if self._link is None or number is None or self.stopping:
            text = STOPPING_MESSAGE if self.stopping else NO_ENGINE
            self._reject(request, InferError(Code.NOT_READY, text, 0 if self.stopping else RETRY_NS))
        if self._last_template >= _MAX_TEMPLATES:
            self._templates.clear()  # numbers start over, and replace those that the engine knows
            self._last_template = 0
        self._last_template += 1
        template = self._last_template, request.model.spec.reads_parameters
        self._templates[request.model, request.rows, request.key, request.output_positions] = template
        self._link.send(
            TEMPLATE,
            template[0],
            write_template(RequestTemplate(number, request.rows, request.key, request.output_positions)),
        )
        return template

    @staticmethod
    def _reject(request: InferRequest, error: InferError) -> NoReturn:
        now_ns = time.monotonic_ns()
        request.model.statistics.record_failure(REJECTED, request.start_ns or now_ns, now_ns)
        raise error

    def early_rejection(self, model: Model) -> InferError | None:
        """Return the error of a request that would be rejected whatever it contains, before it is decoded, or None."""
        if model in self.numbers:
            return None
        return InferError(Code.NOT_READY, NO_ENGINE, RETRY_NS)

    def cancel(self, request: InferRequest) -> None:
        """Cancel a request: its sink is no longer called, unless its answer is being delivered."""
        number = getattr(request, "remote_id", 0)
        if self._inflight.get(number) is request:
            del self._inflight[number]
            self._end_request(request.model)
            if self._link is not None:
                self._link.send(CANCEL, number)

    def _end_request(self, model: Model) -> None:
        model.inflight -= 1
        if not model.inflight and self._finish_waiters:
            self._finish_waiters.check(model)

    # -- answers -----------------------------------------------------------------------------------------------

    def receive(self, messages: list[Message]) -> list[Message]:
        """Handle the engine's messages, and deliver all answers among them. Returns: the messages for others."""
        others: list[Message] = []
        done: list[InferRequest] = []
        inflight = self._inflight
        for message in messages:
            kind, number, body, arrays, _ = message
            if kind in {DONE, FAILED}:
                request = inflight.pop(number, None)
                if request is None:
                    continue  # it was cancelled
                try:
                    if kind == FAILED:
                        request.error = read_error(body)
                    else:
                        request.outputs = unpack_outputs(body, arrays) if body else arrays
                except Exception as error:  # noqa: BLE001 - its client is answered, whatever the engine has sent
                    request.error = _unreadable_answer(request, error)
            elif kind == ANSWER:
                failed = self._receive_answer(number, body, arrays)
                if failed is None:
                    continue
                request = failed
            else:
                others.append(message)
                continue
            done.append(request)
        if done:
            self._deliver(done)
        return others

    def _receive_answer(self, number: int, body: bytes, arrays: list[Array | None]) -> InferRequest | None:
        """Pass on one answer of several. Returns: its request, if that has failed because its client does not read."""
        request = self._inflight.get(number)
        if request is None:
            return None
        try:
            request.answer_sink.send(read_answer(body, arrays))
        except InferError as error:
            request.error = without_traceback(error)
        except Exception as error:  # noqa: BLE001 - as in `receive`
            request.error = _unreadable_answer(request, error)
        else:
            return None
        del self._inflight[number]
        if self._link is not None:
            self._link.send(CANCEL, number)
        return request

    def _deliver(self, requests: list[InferRequest]) -> None:
        """Deliver requests to their sinks, in order, with adjacent ones of a sink together."""
        for request in requests:
            self._end_request(request.model)
        group: list[InferRequest] = []
        for request in requests:
            if group and request.sink is not group[0].sink:
                group[0].sink.deliver(group)
                group = []
            group.append(request)
        if group:
            group[0].sink.deliver(group)

    # -- the end -----------------------------------------------------------------------------------------------

    def stop(self) -> int:
        """Reject new requests, and cancel those in flight. Returns: how many that were."""
        self.stopping = True
        requests = list(self._inflight.values())
        for request in requests:
            self.cancel(request)
            request.error = InferError(Code.NOT_READY, STOPPING_MESSAGE)
        for request in requests:
            request.sink.deliver([request])
        return len(requests)


def _unreadable_answer(request: InferRequest, error: Exception) -> InferError:
    """Log an exception in reading an answer, and return the error for the client."""
    logger.error(UNREADABLE_ANSWER, exc_info=error, extra={"model": request.model.name})
    return InferError(Code.INTERNAL, UNREADABLE_ANSWER)
