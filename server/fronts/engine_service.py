"""EngineService: the engine's half of `remote_engine.py`: one front end's requests, and their sink.

Created by `engine_server.py`, one for each Link.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.server.ipc.refusals import write_error

from .kinds import ANSWER, CANCEL, COUNTED, DONE, FAILED, FORM, SUBMIT
from .pending_statistics import count
from .submission import RequestTemplate, form_of, own_said, packed_outputs, read_form, read_submit, write_answer

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.engine import Engine
    from penstock.batching.model import Model
    from penstock.batching.stream import Backpressure, StreamedAnswer
    from penstock.server.ipc.link import Link
    from penstock.server.ipc.wire import Message

logger = logging.getLogger("penstock.fronts")

_NO_FORM = "a request of an unknown kind"
MOST_UNSENT_BYTES = 256 << 20
"""The limit of unsent data for a front end that does not read; above it, a request with several answers fails."""
ENOUGH_BYTES = 1 << 20
"""With this much unsent data, requests with several answers are paused, since all other answers queue behind theirs."""


class RemoteAnswers:
    """Sends the answers, except the end, of a request that may have several. Once it is `left`, they are dropped."""

    def __init__(self, link: Link, number: int) -> None:
        self.left = False
        self._link = link
        self._number = number

    def send(self, told: StreamedAnswer) -> Backpressure | None:
        """Send an answer. Returns and raises as Tells defines (OVERLOADED if too much is unsent)."""
        if self.left:
            return None
        unsent_bytes = self._link.unsent_bytes
        if unsent_bytes > MOST_UNSENT_BYTES:
            raise InferError(Code.OVERLOADED, "the answers of a request wait for a front end that does not read them")
        self._link.send(ANSWER, self._number, *write_answer(told))
        return self._link.behind if unsent_bytes > ENOUGH_BYTES else None


class EngineService:
    """One front end's requests.

    Invariants: each SUBMIT is answered once, unless it is cancelled or its front end has gone; requests in progress are
    then cancelled. `models` are those that it may name, by number.
    Ownership: inputs are views of the front end's arena until they are gathered; outputs are copied into the engine's.
    Threads: the event loop's.
    """

    def __init__(self, engine: Engine, link: Link, models: Mapping[int, Model]) -> None:
        self._engine = engine
        self._link = link
        self._models = models
        self._forms: dict[int, tuple[Model, RequestTemplate]] = {}
        self._inflight: dict[int, InferRequest] = {}
        self._takes: dict[int, Callable[[int, bytes], None]] = {
            CANCEL: self._cancel, FORM: self._form, COUNTED: self._counted,
        }  # fmt: skip

    @property
    def inflight(self) -> int:
        """The number of its requests in flight."""
        return len(self._inflight)

    def take(self, messages: list[Message]) -> list[Message]:
        """Handle the front end's messages. Returns: those for others."""
        others: list[Message] = []
        for message in messages:
            kind, number, body, arrays, _ = message
            if kind == SUBMIT:
                self._submit(number, body, arrays)
                continue
            take = self._takes.get(kind)
            if take is None:
                others.append(message)
                continue
            try:
                take(number, body)
            except Exception:
                logger.exception("a front end sent an invalid message (kind %d)", kind)
        return others

    def _submit(self, number: int, body: bytes, arrays: list[Array | None]) -> None:
        engine = self._engine
        try:
            known = self._forms.get(form_of(body))
            if known is None:
                raise InferError(Code.NOT_READY, _NO_FORM)
            model, form = known
            scheduler = model.scheduler
            if scheduler.full() or scheduler.target_ns:
                refusal = engine.early_rejection(model)
                if refusal is not None:
                    raise refusal
            request = InferRequest(model, arrays, form.rows, form.key, form.wanted, self)
            if read_submit(request, body):
                request.answer_sink = RemoteAnswers(self._link, number)
            request.remote_id = number
            # before submitting, since a cached answer may be delivered at once
            self._inflight[number] = request
            engine.submit_soon(request)
        except InferError as error:
            self._inflight.pop(number, None)
            self._link.send(FAILED, number, write_error(error))
        except Exception:
            logger.exception("a request of a front end failed")
            self._inflight.pop(number, None)
            self._link.send(FAILED, number, write_error(InferError(Code.INTERNAL, "internal error")))

    def _form(self, number: int, body: bytes) -> None:
        form = read_form(body)
        model = self._models.get(form.model)
        if model is None:
            self._forms.pop(number, None)
        else:
            self._forms[number] = model, form

    def _cancel(self, number: int, _body: bytes) -> None:
        request = self._inflight.pop(number, None)
        if request is not None:
            answers = getattr(request, "answer_sink", None)
            if answers is not None:
                answers.left = True
            self._engine.cancel(request)

    def _counted(self, number: int, body: bytes) -> None:
        model = self._models.get(number)
        if model is not None:
            count(model, body, self)

    def forget(self, model: Model) -> None:
        """Forget a Model that is retired."""
        for number in [number for number, (known, _) in self._forms.items() if known is model]:
            del self._forms[number]

    # -- the sink ----------------------------------------------------------------------------------------------

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Send the answers of one batch."""
        link, inflight = self._link, self._inflight
        for request in requests:
            number = request.remote_id
            if inflight.pop(number, None) is None:
                continue  # it was cancelled
            if request.error is not None:
                link.send(FAILED, number, write_error(request.error))
                continue
            outputs = request.outputs or []
            try:
                link.send(DONE, number, own_said(outputs) if type(outputs) is CustomOutputs else b"", outputs)
            except Exception:  # noqa: BLE001 - an output that is not a tensor has no datatype or shape
                self._send_others(number, request)

    def _send_others(self, number: int, request: InferRequest) -> None:
        """Send outputs that are not tensors, or an error if they cannot be sent."""
        try:
            self._link.send(DONE, number, *packed_outputs(request.outputs or []))
        except Exception as error:
            logger.exception("outputs of model %s cannot be sent to a front end", request.model.name)
            self._link.send(FAILED, number, write_error(InferError(Code.INTERNAL, str(error))))

    def lost(self) -> None:
        """Cancel the requests in flight: their front end has gone."""
        requests = list(self._inflight.values())
        self._inflight.clear()
        self._forms.clear()
        self._takes.clear()  # they refer to this object, and the garbage collector runs seldom
        for model in self._models.values():
            model.set_blocked(self, blocked=False)
        for request in requests:
            self._engine.cancel(request)
