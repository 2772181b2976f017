"""CortexService: the Service that answers Cortex's URLs on the fast lane, like the original's Flask application.

Made by dialect.py. Penstock's own paths (`paths.is_ours`) are left to the Service behind it, and to uvicorn. Nothing
here logs, and only requests that are large or compressed, or whose hooks yield, run as tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote_to_bytes

from penstock.backends.errors import Code, InferError, without_traceback
from penstock.server.answering import (
    LARGE_BYTES,
    LargeJsonReader,
    Promise,
    answer_compressed,
    clear_task,
    internal_error,
    read_compressed,
    start_task,
)
from penstock.server.engines import ServingEngine, get_model
from penstock.server.errors import retry_after_line
from penstock.server.http.head import HttpError
from penstock.server.http.target import path_in
from penstock.server.restricted import RestrictedApis
from penstock.server.v2.call_parameters import PLAIN

from . import debugging, pages
from .bodies import MalformedError, sample_of
from .claims import CortexClaim, ServedApi
from .paths import HEALTH, HEALTH_PATH, SIGNATURE, CortexPaths, CortexRoute, is_ours
from .prediction_metrics import PredictionMetrics

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import Terms
    from penstock.server.hooks.runner import Hooks
    from penstock.server.http.connection import Connection
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.limits import Limits
    from penstock.server.http.service import Service

    from .api import Api

_LINES = b"access-control-allow-origin: *\r\naccess-control-allow-headers: *\r\n"
"""The header lines of all answers."""


class Apis(Protocol):
    """What is read from the repository of projects: its APIs by name, in a new mapping whenever they change."""

    @property
    def apis(self) -> Mapping[str, Api]: ...


class CortexService:
    """Answers for the APIs of one server. `ready` is called by the probe; `others` answers Penstock's own paths.

    Threads: the event loop's, except that large bodies are parsed or compressed on others.
    """

    def __init__(
        self, engine: ServingEngine, repository: Apis, hooks_of: Callable[[Model], Hooks], limits: Limits,
        others: Service, ready: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._repository = repository
        self._hooks_of = hooks_of
        self._limits = limits
        self._others = others
        self._ready = ready
        self._texts = LargeJsonReader()
        self._paths = CortexPaths({})
        self._routes: dict[str, ServedApi] = {}
        self.tracked = PredictionMetrics()
        self.restricted = RestrictedApis()

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path except Penstock's own that belong to no API."""
        path = unquote_to_bytes(path_in(head.path)).decode("utf-8", "replace")
        if is_ours(path) and self._current().find(path) is None:
            return self._others.claim(head)
        if path != HEALTH_PATH:
            self.restricted.require("inference", head.header)
        return CortexClaim(head, path)

    def check_admission(self, head: Head) -> Any:
        """Return the error of a prediction that is rejected whatever it contains, so that its body need not be kept."""
        claim = head.route
        if type(claim) is not CortexClaim:
            return self._others.check_admission(head)
        self._resolve(claim)
        route = claim.route
        if route is None or route.generation != self._engine.generation:
            return None  # it would be the queue of another model
        return self._engine.turn_away(route.model)  # type: ignore[arg-type]

    def answer_error(self, connection: FastLane, error: Any) -> None:
        """Answer with an error."""
        claim = connection.head.route if connection.head is not None else None
        if type(claim) is CortexClaim:
            self._refuse(connection, claim.route, error, time.monotonic_ns())
        else:
            self._others.answer_error(connection, error)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer one request, or start to."""
        claim = head.route
        if type(claim) is not CortexClaim:
            self._others.begin(connection, head, body)
            return
        if claim.paths is not self._paths or not self._paths.are_of(self._repository.apis):
            self._resolve(claim)
        if claim.route is None:
            self._answer_page(connection, claim)
        else:
            self._predict(connection, claim, claim.route, body)

    def abandon(self, connection: Connection) -> None:
        """Cancel the request of a client that disconnected."""
        self._others.abandon(connection)

    # -- routing -----------------------------------------------------------------------------------------------

    def _current(self) -> CortexPaths:
        apis = self._repository.apis
        if not self._paths.are_of(apis):
            self._paths = CortexPaths(apis)
            self._routes = {name: route for name, route in self._routes.items() if apis.get(name) == route.api}
        return self._paths

    def _resolve(self, claim: CortexClaim) -> None:
        claim.resolve(self._current(), self._route)

    def _route(self, api: Api) -> ServedApi:
        route = self._routes.get(api.name)
        if route is None:
            route = self._routes[api.name] = ServedApi(api, self.tracked.of(api))
        return route

    def _model(self, api: Api) -> Model:
        """Return the model of an API. Raises: InferError (NOT_READY)."""
        return get_model(self._engine, api.name, f"API '{api.name}'")

    # -- predictions -------------------------------------------------------------------------------------------

    def _predict(self, connection: FastLane, claim: CortexClaim, route: ServedApi, body: bytes) -> None:
        began_ns = time.monotonic_ns()
        try:
            if route.generation != self._engine.generation:
                route.model = self._model(route.api)
                route.generation = self._engine.generation
            model: Model = route.model  # type: ignore[assignment]  # it has been found
            scheduler = model.scheduler
            if scheduler.full() or scheduler.target_ns:
                refusal = self._engine.turn_away(model)
                if refusal is not None:
                    raise refusal
            hooks = self._hooks_of(model)
            if hooks.yields or (claim.json and (claim.coding or len(body) >= LARGE_BYTES)):
                start_task(connection, self._engine, model, self._run(connection, claim, route, model, body, began_ns))
                return
            sample = sample_of(body, self._limits.max_json_depth) if claim.json else None
            promise = Promise(self._answer, self._fail, connection, claim, route, began_ns)
            trip = hooks.start(promise, *_said(claim, route, model, sample), nbytes=len(body))
            if not trip.done():
                connection.task = trip
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            self._fail(connection, claim, route, began_ns, error)

    async def _run(
        self, connection: FastLane, claim: CortexClaim, route: ServedApi, model: Model, body: bytes, began_ns: int
    ) -> None:
        """Answer a request whose body is large or compressed, or whose hooks yield."""
        try:
            sample, depth = None, self._limits.max_json_depth
            if claim.json and claim.coding:
                read = partial(sample_of, max_depth=depth)
                sample = await read_compressed(body, claim.coding, self._limits, read, self._texts)
            elif claim.json and len(body) >= LARGE_BYTES:
                sample = await self._texts.read(len(body), sample_of, body, depth)
            elif claim.json:
                sample = sample_of(body, depth)
            answer = await self._hooks_of(model).predict(*_said(claim, route, model, sample))
            self._answer(connection, claim, route, began_ns, answer)
        except Exception as error:  # noqa: BLE001 - as in _predict
            self._fail(connection, claim, route, began_ns, error)
        finally:
            clear_task(connection)

    @staticmethod
    def _answer(connection: FastLane, claim: CortexClaim, route: ServedApi, began_ns: int, answer: bytes) -> None:
        """Answer with the hooks' result. `route` is that of the start: the claim's may have changed since."""
        if route.parameters:
            line, _, answer = answer.partition(b"\n")
            route.counted.track(line)
        route.counted.count(200, time.monotonic_ns() - began_ns)
        answer_compressed(connection, answer, pages.JSON, _LINES, claim.accept)

    def _fail(
        self, connection: FastLane, claim: CortexClaim, route: ServedApi, began_ns: int, error: BaseException
    ) -> None:
        """Answer with the reason of a failed prediction; the server's own faults are logged under an id."""
        if isinstance(error, MalformedError | HttpError):
            route.counted.count(400, time.monotonic_ns() - began_ns)
            connection.answer(400, pages.MALFORMED[route.api.kind], pages.HTML, _LINES)
            return
        refusal = error if isinstance(error, InferError) else _broken(error, route.api, claim)
        self._refuse(connection, route, refusal, began_ns)

    @staticmethod
    def _refuse(connection: FastLane, route: ServedApi | None, error: InferError, began_ns: int) -> None:
        """Answer with an error, and count it if it is that of a prediction (`route`)."""
        status, body, content_type = pages.refused(without_traceback(error))
        again = retry_after_line(error) if status == 503 else b""
        if route is not None:
            route.counted.count(status, time.monotonic_ns() - began_ns)
        connection.answer(status, body, content_type, _LINES + again)

    # -- everything else ---------------------------------------------------------------------------------------

    def _answer_page(self, connection: FastLane, claim: CortexClaim) -> None:
        place = claim.place
        if place is None:
            connection.answer(500, pages.error_page(pages.NOT_FOUND), pages.JSON, _LINES)
        elif claim.method not in place.methods:
            connection.answer(500, pages.error_page(pages.NOT_ALLOWED), pages.JSON, _LINES)
        elif claim.method == b"OPTIONS":
            connection.answer(200, b"", pages.HTML, b"allow: %b\r\n%b" % (b", ".join(place.methods), _LINES))
        elif place.purpose == HEALTH:
            ready = self._ready()
            connection.answer(200 if ready else 503, pages.READY if ready else pages.NOT_READY, pages.JSON, _LINES)
        else:
            self._answer_signature(connection, claim, place)

    def _answer_signature(self, connection: FastLane, claim: CortexClaim, place: CortexRoute) -> None:
        api: Api = place.api  # type: ignore[assignment]
        write = pages.signature_page if place.purpose == SIGNATURE else pages.summary_page
        try:
            signature = _signature(api, self._model(api))
            connection.answer(200, write(signature), pages.JSON, _LINES)
        except InferError as error:
            self._refuse(connection, None, error, 0)
        except Exception as error:  # noqa: BLE001 - as in _predict
            self._refuse(connection, None, _broken(error, api, claim), 0)


def _said(claim: CortexClaim, route: ServedApi, model: Model, sample: Any) -> tuple[Any, str, Terms, Mapping[str, Any]]:
    """Return the arguments of hooks for a request: its sample, id, terms and parameters."""
    parameters: Mapping[str, Any] = route.parameters
    if claim.parameters:
        debugging.show("sample", sample)
        parameters = {**parameters, **claim.parameters}
    return sample, claim.request_id, PLAIN.terms(time.monotonic_ns(), model.spec.policy), parameters


def _signature(api: Api, model: Model) -> pages.Document:
    return (
        pages.tensorflow_signature(model.described)
        if api.kind == "tensorflow"
        else pages.onnx_signature(model.node_inputs)
    )


def _broken(error: BaseException, api: Api, claim: CortexClaim) -> InferError:
    """Log the server's own fault. Returns: the error for a failure outside the prediction."""
    return InferError(Code.UNKNOWN, internal_error(error, api.name, claim.request_id).message)
