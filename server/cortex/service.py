"""CortexService: the Service that answers Cortex's URLs on the fast lane, like the original's Flask application.

Made by dialect.py. Penstock's own paths (`paths.is_penstock_path`) are left to the Service behind it, and to uvicorn.
Nothing here logs, and only requests that are large or compressed, or whose hooks yield, run as tasks.
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
from penstock.server.v2.call_parameters import DEFAULT_OPTIONS

from . import debugging, pages
from .bodies import MalformedError, parse_sample
from .claims import CortexClaim, ServedApi
from .paths import HEALTH, HEALTH_PATH, SIGNATURE, CortexPaths, CortexRoute, is_penstock_path
from .prediction_metrics import PredictionMetrics

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.request import RequestOptions
    from penstock.server.hooks.runner import Hooks
    from penstock.server.http.connection import Connection
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.limits import Limits
    from penstock.server.http.service import Service

    from .api import Api

_HEADER_LINES = b"access-control-allow-origin: *\r\naccess-control-allow-headers: *\r\n"
"""The header lines of all answers."""


class ApiSource(Protocol):
    """What is read from the repository of projects: its APIs by name, in a new mapping whenever they change."""

    @property
    def apis(self) -> Mapping[str, Api]: ...


class CortexService:
    """Answers for the APIs of one server. `ready` is called by the probe; `others` answers Penstock's own paths.

    Threads: the event loop's, except that large bodies are parsed or compressed on others.
    """

    def __init__(
        self, engine: ServingEngine, repository: ApiSource, hooks_of: Callable[[Model], Hooks], limits: Limits,
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
        self._served_apis: dict[str, ServedApi] = {}
        self.prediction_metrics = PredictionMetrics()
        self.restricted = RestrictedApis()

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path except Penstock's own that belong to no API."""
        path = unquote_to_bytes(path_in(head.path)).decode("utf-8", "replace")
        if is_penstock_path(path) and self._current_paths().find(path) is None:
            return self._others.claim(head)
        if path != HEALTH_PATH:
            self.restricted.require("inference", head.header)
        return CortexClaim(head, path)

    def early_rejection(self, head: Head) -> Any:
        """Return the error of a prediction that is rejected whatever it contains, so that its body need not be kept."""
        claim = head.route
        if type(claim) is not CortexClaim:
            return self._others.early_rejection(head)
        self._resolve(claim)
        served_api = claim.served_api
        if served_api is None or served_api.generation != self._engine.generation:
            return None  # it would be the queue of another model
        return self._engine.early_rejection(served_api.model)  # type: ignore[arg-type]

    def answer_error(self, connection: FastLane, error: Any) -> None:
        """Answer with an error."""
        claim = connection.head.route if connection.head is not None else None
        if type(claim) is CortexClaim:
            self._refuse(connection, claim.served_api, error, time.monotonic_ns())
        else:
            self._others.answer_error(connection, error)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer one request, or start to."""
        claim = head.route
        if type(claim) is not CortexClaim:
            self._others.begin(connection, head, body)
            return
        if claim.paths is not self._paths or not self._paths.is_current(self._repository.apis):
            self._resolve(claim)
        if claim.served_api is None:
            self._answer_page(connection, claim)
        else:
            self._predict(connection, claim, claim.served_api, body)

    def abandon(self, connection: Connection) -> None:
        """Cancel the request of a client that disconnected."""
        self._others.abandon(connection)

    # -- routing -----------------------------------------------------------------------------------------------

    def _current_paths(self) -> CortexPaths:
        apis = self._repository.apis
        if not self._paths.is_current(apis):
            self._paths = CortexPaths(apis)
            self._served_apis = {
                name: served_api for name, served_api in self._served_apis.items() if apis.get(name) == served_api.api
            }
        return self._paths

    def _resolve(self, claim: CortexClaim) -> None:
        claim.resolve(self._current_paths(), self._served_api)

    def _served_api(self, api: Api) -> ServedApi:
        served_api = self._served_apis.get(api.name)
        if served_api is None:
            served_api = self._served_apis[api.name] = ServedApi(api, self.prediction_metrics.for_api(api))
        return served_api

    def _find_model(self, api: Api) -> Model:
        """Return the model of an API. Raises: InferError (NOT_READY)."""
        return get_model(self._engine, api.name, f"API '{api.name}'")

    # -- predictions -------------------------------------------------------------------------------------------

    def _predict(self, connection: FastLane, claim: CortexClaim, served_api: ServedApi, body: bytes) -> None:
        start_ns = time.monotonic_ns()
        try:
            if served_api.generation != self._engine.generation:
                served_api.model = self._find_model(served_api.api)
                served_api.generation = self._engine.generation
            model: Model = served_api.model  # type: ignore[assignment]  # it has been found
            scheduler = model.scheduler
            if scheduler.is_full() or scheduler.target_ns:
                refusal = self._engine.early_rejection(model)
                if refusal is not None:
                    raise refusal
            hooks = self._hooks_of(model)
            if hooks.yields or (claim.json and (claim.coding or len(body) >= LARGE_BYTES)):
                start_task(
                    connection, self._engine, model, self._run(connection, claim, served_api, model, body, start_ns)
                )
                return
            sample = parse_sample(body, self._limits.max_json_depth) if claim.json else None
            promise = Promise(self._answer, self._fail, connection, claim, served_api, start_ns)
            trip = hooks.start(promise, *_hook_arguments(claim, served_api, model, sample), nbytes=len(body))
            if not trip.done():
                connection.task = trip
        except Exception as error:  # noqa: BLE001 - whatever it is, the client gets an answer
            self._fail(connection, claim, served_api, start_ns, error)

    async def _run(
        self, connection: FastLane, claim: CortexClaim, served_api: ServedApi, model: Model, body: bytes, start_ns: int
    ) -> None:
        """Answer a request whose body is large or compressed, or whose hooks yield."""
        try:
            sample, depth = None, self._limits.max_json_depth
            if claim.json and claim.coding:
                read = partial(parse_sample, max_depth=depth)
                sample = await read_compressed(body, claim.coding, self._limits, read, self._texts)
            elif claim.json and len(body) >= LARGE_BYTES:
                sample = await self._texts.read(len(body), parse_sample, body, depth)
            elif claim.json:
                sample = parse_sample(body, depth)
            answer = await self._hooks_of(model).predict(*_hook_arguments(claim, served_api, model, sample))
            self._answer(connection, claim, served_api, start_ns, answer)
        except Exception as error:  # noqa: BLE001 - as in _predict
            self._fail(connection, claim, served_api, start_ns, error)
        finally:
            clear_task(connection)

    @staticmethod
    def _answer(connection: FastLane, claim: CortexClaim, served_api: ServedApi, start_ns: int, answer: bytes) -> None:
        """Answer with the hooks' result. `served_api` is that of the start: the claim's may have changed since."""
        if served_api.parameters:
            line, _, answer = answer.partition(b"\n")
            served_api.metrics.record_prediction(line)
        served_api.metrics.record(200, time.monotonic_ns() - start_ns)
        answer_compressed(connection, answer, pages.JSON, _HEADER_LINES, claim.accept)

    def _fail(
        self, connection: FastLane, claim: CortexClaim, served_api: ServedApi, start_ns: int, error: BaseException
    ) -> None:
        """Answer with the reason of a failed prediction; the server's own faults are logged under an id."""
        if isinstance(error, MalformedError | HttpError):
            served_api.metrics.record(400, time.monotonic_ns() - start_ns)
            connection.answer(400, pages.MALFORMED[served_api.api.kind], pages.HTML, _HEADER_LINES)
            return
        refusal = error if isinstance(error, InferError) else _internal_error(error, served_api.api, claim)
        self._refuse(connection, served_api, refusal, start_ns)

    @staticmethod
    def _refuse(connection: FastLane, served_api: ServedApi | None, error: InferError, start_ns: int) -> None:
        """Answer with an error, and count it if it is that of a prediction (`served_api`)."""
        status, body, content_type = pages.error_response(without_traceback(error))
        retry_after = retry_after_line(error) if status == 503 else b""
        if served_api is not None:
            served_api.metrics.record(status, time.monotonic_ns() - start_ns)
        connection.answer(status, body, content_type, _HEADER_LINES + retry_after)

    # -- everything else ---------------------------------------------------------------------------------------

    def _answer_page(self, connection: FastLane, claim: CortexClaim) -> None:
        route = claim.route
        if route is None:
            connection.answer(500, pages.error_page(pages.NOT_FOUND), pages.JSON, _HEADER_LINES)
        elif claim.method not in route.methods:
            connection.answer(500, pages.error_page(pages.NOT_ALLOWED), pages.JSON, _HEADER_LINES)
        elif claim.method == b"OPTIONS":
            connection.answer(200, b"", pages.HTML, b"allow: %b\r\n%b" % (b", ".join(route.methods), _HEADER_LINES))
        elif route.purpose == HEALTH:
            ready = self._ready()
            connection.answer(
                200 if ready else 503, pages.READY if ready else pages.NOT_READY, pages.JSON, _HEADER_LINES
            )
        else:
            self._answer_signature(connection, claim, route)

    def _answer_signature(self, connection: FastLane, claim: CortexClaim, route: CortexRoute) -> None:
        api: Api = route.api  # type: ignore[assignment]
        write = pages.signature_page if route.purpose == SIGNATURE else pages.summary_page
        try:
            signature = _signature(api, self._find_model(api))
            connection.answer(200, write(signature), pages.JSON, _HEADER_LINES)
        except InferError as error:
            self._refuse(connection, None, error, 0)
        except Exception as error:  # noqa: BLE001 - as in _predict
            self._refuse(connection, None, _internal_error(error, api, claim), 0)


def _hook_arguments(
    claim: CortexClaim, served_api: ServedApi, model: Model, sample: Any
) -> tuple[Any, str, RequestOptions, Mapping[str, Any]]:
    """Return the arguments of hooks for a request: its sample, id, terms and parameters."""
    parameters: Mapping[str, Any] = served_api.parameters
    if claim.parameters:
        debugging.log_value("sample", sample)
        parameters = {**parameters, **claim.parameters}
    return sample, claim.request_id, DEFAULT_OPTIONS.terms(time.monotonic_ns(), model.spec.policy), parameters


def _signature(api: Api, model: Model) -> pages.Document:
    return (
        pages.tensorflow_signature(model.runtime_description)
        if api.kind == "tensorflow"
        else pages.onnx_signature(model.node_inputs)
    )


def _internal_error(error: BaseException, api: Api, claim: CortexClaim) -> InferError:
    """Log the server's own fault. Returns: the error for a failure outside the prediction."""
    return InferError(Code.UNKNOWN, internal_error(error, api.name, claim.request_id).message)
