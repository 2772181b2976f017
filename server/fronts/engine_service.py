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
from penstock.server.ipc.errors import write_error

from .message_kinds import ANSWER, CANCEL, DONE, FAILED, STATISTICS, SUBMIT, TEMPLATE
from .pending_statistics import add_statistics
from .request_codec import (
    RequestTemplate,
    pack_outputs,
    read_submit,
    read_template,
    template_of,
    write_answer,
    write_custom_outputs,
)

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.batching.engine import Engine
    from penstock.batching.model import Model
    from penstock.batching.stream import Backpressure, StreamedAnswer
    from penstock.server.ipc.link import Link
    from penstock.server.ipc.wire import Message

logger = logging.getLogger("penstock.fronts")

_UNKNOWN_TEMPLATE = "a request of an unknown kind"
MAX_UNSENT_BYTES = 256 << 20
"""The limit of unsent data for a front end that does not read; above it, a request with several answers fails."""
PAUSE_UNSENT_BYTES = 1 << 20
"""With this much unsent data, requests with several answers are paused, since all other answers queue behind theirs."""


class RemoteAnswers:
    """Sends the answers, except the end, of a request that may have several. Once `cancelled`, they are dropped."""

    def __init__(self, link: Link, number: int) -> None:
        self.cancelled = False
        self._link = link
        self._number = number

    def send(self, answer: StreamedAnswer) -> Backpressure | None:
        """Send an answer. Returns: how to wait until more may be sent. Raises: InferError (OVERLOADED)."""
        if self.cancelled:
            return None
        unsent_bytes = self._link.unsent_bytes
        if unsent_bytes > MAX_UNSENT_BYTES:
            raise InferError(Code.OVERLOADED, "the answers of a request wait for a front end that does not read them")
        self._link.send(ANSWER, self._number, *write_answer(answer))
        return self._link.when_drained if unsent_bytes > PAUSE_UNSENT_BYTES else None


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
        self._templates: dict[int, tuple[Model, RequestTemplate]] = {}
        self._inflight: dict[int, InferRequest] = {}
        self._receivers: dict[int, Callable[[int, bytes], None]] = {
            CANCEL: self._cancel, TEMPLATE: self._set_template, STATISTICS: self._add_statistics,
        }  # fmt: skip

    @property
    def inflight(self) -> int:
        """The number of its requests in flight."""
        return len(self._inflight)

    def receive(self, messages: list[Message]) -> list[Message]:
        """Handle the front end's messages. Returns: those for others."""
        others: list[Message] = []
        for message in messages:
            kind, number, body, arrays, _ = message
            if kind == SUBMIT:
                self._submit(number, body, arrays)
                continue
            receiver = self._receivers.get(kind)
            if receiver is None:
                others.append(message)
                continue
            try:
                receiver(number, body)
            except Exception:
                logger.exception("a front end sent an invalid message (kind %d)", kind)
        return others

    def _submit(self, number: int, body: bytes, arrays: list[Array | None]) -> None:
        engine = self._engine
        try:
            entry = self._templates.get(template_of(body))
            if entry is None:
                raise InferError(Code.NOT_READY, _UNKNOWN_TEMPLATE)
            model, template = entry
            scheduler = model.scheduler
            if scheduler.is_full() or scheduler.target_ns:
                refusal = engine.early_rejection(model)
                if refusal is not None:
                    raise refusal
            request = InferRequest(model, arrays, template.rows, template.key, template.wanted, self)
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

    def _set_template(self, number: int, body: bytes) -> None:
        template = read_template(body)
        model = self._models.get(template.model)
        if model is None:
            self._templates.pop(number, None)
        else:
            self._templates[number] = model, template

    def _cancel(self, number: int, _body: bytes) -> None:
        request = self._inflight.pop(number, None)
        if request is not None:
            answers: RemoteAnswers | None = getattr(request, "answer_sink", None)
            if answers is not None:
                answers.cancelled = True
            self._engine.cancel(request)

    def _add_statistics(self, number: int, body: bytes) -> None:
        model = self._models.get(number)
        if model is not None:
            add_statistics(model, body, self)

    def discard_templates(self, model: Model) -> None:
        """Remove the templates of a Model that is retired."""
        for number in [number for number, (known, _) in self._templates.items() if known is model]:
            del self._templates[number]

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
                link.send(
                    DONE, number, write_custom_outputs(outputs) if type(outputs) is CustomOutputs else b"", outputs
                )
            except Exception:  # noqa: BLE001 - an output that is not a tensor has no datatype or shape
                self._send_packed(number, request)

    def _send_packed(self, number: int, request: InferRequest) -> None:
        """Send outputs that are not tensors, or an error if they cannot be sent."""
        try:
            self._link.send(DONE, number, *pack_outputs(request.outputs or []))
        except Exception as error:
            logger.exception("outputs of model %s cannot be sent to a front end", request.model.name)
            self._link.send(FAILED, number, write_error(InferError(Code.INTERNAL, str(error))))

    def close(self) -> None:
        """Cancel the requests in flight: their front end has disconnected."""
        requests = list(self._inflight.values())
        self._inflight.clear()
        self._templates.clear()
        self._receivers.clear()  # they refer to this object, and the garbage collector runs seldom
        for model in self._models.values():
            model.set_blocked(self, blocked=False)
        for request in requests:
            self._engine.cancel(request)
