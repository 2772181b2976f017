"""CarryingService: what the Services of the fast lane share whose dialect's calls are carried.

A call goes to its worker as it came; nothing here reads a body, logs, or starts a task for a plain one. It is also the
sink of what it has asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.server.answering import internal
from penstock.server.engines import Serves, served
from penstock.server.restricted import Restricted

from .calls import RawCall
from .messages import read_answer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.server.http.connection import Connection
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.service import Service


class ModelLookup:
    """A Model by its name, found again whenever the Engine has other versions."""

    __slots__ = ("_engine", "_generation", "_model", "name")

    def __init__(self, engine: Serves, name: str) -> None:
        self._engine = engine
        self._model: Model | None = None
        self._generation = -1
        self.name = name

    def find(self) -> Model:
        """Give the Model. Raises: InferError (NOT_READY)."""
        model = self._model
        if model is None or self._generation != self._engine.generation:
            generation = self._engine.generation
            self._model = None
            model = self._model = served(self._engine, self.name, f"'{self.name}'")
            self._generation = generation
        return model


class CarryingService:
    """The Service of one port; a dialect's own descends from it, and says what is otherwise.

    What `claim` gives for a request that a worker answers has `found`, its ModelLookup; what it gives for another one
    has None there. `others` answers what is Penstock's own: its claims are of other types.
    """

    claims: type[Any]
    """The type of the dialect's own claims."""

    def __init__(self, engine: Serves, others: Service) -> None:
        self.engine = engine
        self.others = others
        self.restricted = Restricted()

    # -- what a dialect says -----------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Give what a head says, or what `others` do."""
        raise NotImplementedError

    def answer(self, connection: FastLane, claim: Any, body: bytes) -> None:
        """Answer one request that is the dialect's, or `ask` its worker."""
        raise NotImplementedError

    def answer_failure(self, connection: FastLane, claim: Any, error: InferError) -> None:
        """Answer with an error of the server's own."""
        raise NotImplementedError

    def answer_call(self, connection: FastLane, claim: Any, call: Any) -> None:
        """Answer with what the worker has answered."""
        self.answer_reply(connection, call.reply)

    def unread(self, call: Any) -> None:
        """Learn that a call has ended whose client has gone."""

    def trouble(self, claim: Any, error: Exception) -> InferError:
        """Log a failure of the server's own, and make of it what the client is told."""
        return internal(error, claim.found.name if claim.found is not None else "", "")

    @staticmethod
    def answer_reply(connection: FastLane, reply: bytes) -> None:
        """Answer with what `pack_answer` has written. Raises: ValueError for a status that is none."""
        status, content_type, lines, body = read_answer(reply)
        connection.answer(status, body, content_type, lines)

    # -- the Service -------------------------------------------------------------------------------------------

    def turn_away(self, head: Head) -> Any:
        """Give the error of a call that is refused whatever it brings: its body need not be kept."""
        claim = head.route
        if type(claim) is not self.claims:
            return self.others.turn_away(head)
        if claim.found is None:
            return None
        try:
            return self.engine.turn_away(claim.found.find())
        except InferError as error:
            return error

    def refuse(self, connection: FastLane, error: Any) -> None:
        """Answer with an error."""
        claim = connection.head.route if connection.head is not None else None
        if type(claim) is self.claims:
            self.answer_failure(connection, claim, error)
        else:
            self.others.refuse(connection, error)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer one request, or send it on."""
        claim = head.route
        if type(claim) is not self.claims:
            self.others.begin(connection, head, body)
            return
        try:
            self.answer(connection, claim, body)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            self.fail(connection, claim, error)

    def fail(self, connection: FastLane, claim: Any, error: Exception) -> None:
        """Answer with what has kept a request from its answer."""
        self.answer_failure(connection, claim, error if isinstance(error, InferError) else self.trouble(claim, error))

    def abandon(self, connection: Connection) -> None:
        """Cancel what a gone client asked for, and let go of shared memory that a request of the others had."""
        connection.plan = None
        if connection.request is not None:
            self.engine.cancel(connection.request)
        if connection.task is not None:
            connection.task.cancel()

    # -- calls -------------------------------------------------------------------------------------------------

    def ask(self, connection: FastLane, found: ModelLookup, body: bytes) -> None:
        """Send a call to its worker. Raises: InferError."""
        self.submit(connection, RawCall(found.find(), body, self))

    def submit(self, connection: FastLane, call: RawCall) -> None:
        """Give a call to the Engine. Raises: InferError."""
        call.context = connection
        connection.request = call
        try:
            self.engine.submit(call)
        except BaseException:
            connection.request = None
            raise

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Write the answers of one delivery."""
        for request in requests:
            connection: FastLane = request.context
            if connection.request is not request:
                self.unread(request)
                continue
            connection.request = None
            claim: Any = connection.head.route  # type: ignore[union-attr]
            try:
                if request.error is not None:
                    self.answer_failure(connection, claim, request.error)
                else:
                    self.answer_call(connection, claim, request)
            except Exception as error:  # noqa: BLE001 - one answer's failure must not take the others'
                self.fail(connection, claim, error)
