"""CarryingService: the shared part of the fast lane's Services for dialects whose calls are carried.

A call is sent to its worker unchanged. For a plain call, nothing here reads the body, logs, or starts a task. The
Service is also the sink of its calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from penstock.backends.errors import InferError
from penstock.server.engines import ServingEngine, get_model
from penstock.server.restricted import RestrictedApis

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
    """A Model by its name, looked up again whenever the Engine's versions change."""

    __slots__ = ("_engine", "_generation", "_model", "name")

    def __init__(self, engine: ServingEngine, name: str) -> None:
        self._engine = engine
        self._model: Model | None = None
        self._generation = -1
        self.name = name

    def find(self) -> Model:
        """Return the Model. Raises: InferError (NOT_READY)."""
        model = self._model
        if model is None or self._generation != self._engine.generation:
            generation = self._engine.generation
            self._model = None
            model = self._model = get_model(self._engine, self.name, f"'{self.name}'")
            self._generation = generation
        return model


class Lookup(Protocol):
    """Finds the Model of a call."""

    def find(self) -> Model:
        """Return the Model. Raises: InferError."""


class CarriedClaim(Protocol):
    """What a dialect knows of a request from its head."""

    @property
    def lookup(self) -> Lookup | None:
        """Finds the Model whose worker answers the request; None if no worker does, or it is not known yet."""


ClaimT = TypeVar("ClaimT", bound=CarriedClaim)


class CarryingService(Generic[ClaimT]):
    """The Service of one port; each dialect derives its own from it.

    `fallback` answers Penstock's own paths: its claims have other types.
    """

    claim_type: type[ClaimT]
    """The type of the dialect's own claims."""

    def __init__(self, engine: ServingEngine, fallback: Service) -> None:
        self.engine = engine
        self.fallback = fallback
        self.restricted = RestrictedApis()

    # -- defined by a dialect ------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Return the claim on a request head, or that of `fallback`."""
        raise NotImplementedError

    def answer(self, connection: FastLane, claim: ClaimT, body: bytes) -> None:
        """Answer a request of the dialect, or send it to its worker with `submit_body`."""
        raise NotImplementedError

    def answer_failure(self, connection: FastLane, claim: ClaimT, error: InferError) -> None:
        """Answer with an error of the server's own."""
        raise NotImplementedError

    def answer_call(self, connection: FastLane, claim: ClaimT, call: Any) -> None:
        """Answer with the worker's reply."""
        self.answer_reply(connection, call.reply)

    def discard_answer(self, call: Any) -> None:
        """Handle the end of a call whose client has disconnected."""

    def log_internal_error(self, claim: ClaimT, error: Exception) -> InferError:
        """Log a failure of the server's own, and return the error for the client."""
        raise NotImplementedError

    @staticmethod
    def answer_reply(connection: FastLane, reply: bytes) -> None:
        """Answer with the result of `pack_answer`. Raises: ValueError for an invalid status."""
        status, content_type, lines, body = read_answer(reply)
        connection.answer(status, body, content_type, lines)

    # -- the Service -------------------------------------------------------------------------------------------

    def early_rejection(self, head: Head) -> Any:
        """Return the error of a call that is rejected whatever its body, so the body need not be kept."""
        claim = head.route
        if type(claim) is not self.claim_type:
            return self.fallback.early_rejection(head)
        if claim.lookup is None:
            return None
        try:
            return self.engine.early_rejection(claim.lookup.find())
        except InferError as error:
            return error

    def answer_error(self, connection: FastLane, error: Any) -> None:
        """Answer with an error."""
        claim = connection.head.route if connection.head is not None else None
        if type(claim) is self.claim_type:
            self.answer_failure(connection, claim, error)
        else:
            self.fallback.answer_error(connection, error)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer a request, or send it to its worker."""
        claim = head.route
        if type(claim) is not self.claim_type:
            self.fallback.begin(connection, head, body)
            return
        try:
            self.answer(connection, claim, body)
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever happens
            self.fail(connection, claim, error)

    def fail(self, connection: FastLane, claim: ClaimT, error: Exception) -> None:
        """Answer with the error that a request ran into."""
        failure = error if isinstance(error, InferError) else self.log_internal_error(claim, error)
        self.answer_failure(connection, claim, failure)

    def abandon(self, connection: Connection) -> None:
        """Cancel the work for a disconnected client, and release shared memory held for a request of `fallback`."""
        connection.plan = None
        if connection.request is not None:
            self.engine.cancel(connection.request)
        if connection.task is not None:
            connection.task.cancel()

    # -- calls -------------------------------------------------------------------------------------------------

    def submit_body(self, connection: FastLane, lookup: ModelLookup, body: bytes) -> None:
        """Send a call to its worker. Raises: InferError."""
        self.submit(connection, RawCall(lookup.find(), body, self))

    def submit(self, connection: FastLane, call: RawCall) -> None:
        """Submit a call to the Engine. Raises: InferError."""
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
                self.discard_answer(request)
                continue
            connection.request = None
            claim: ClaimT = connection.head.route  # type: ignore[union-attr]
            try:
                if request.error is not None:
                    self.answer_failure(connection, claim, request.error)
                else:
                    self.answer_call(connection, claim, request)
            except Exception as error:  # noqa: BLE001 - the failure of one answer must not affect the others
                self.fail(connection, claim, error)
