"""Control plane endpoints: all of KServe v2's and Triton's except inference, and metrics.

Their Routes are wired by the composition root and served by plane.py.
Source: Triton server, http_server.cc (paths, codes, texts and the members of answers).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Mapping
from typing import Any, Protocol

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.running.external_models import check_ready
from penstock.server.engines import FindsModels
from penstock.server.health import EXITING, Health
from penstock.server.telemetry.metrics import CONTENT_TYPE as METRICS_TYPE
from penstock.server.telemetry.metrics import Metrics
from penstock.server.telemetry.page import encode_page

from . import openapi
from .metadata import model_metadata, model_statistics, requested_models, run_times
from .routes import JSON, Route, json_answer, model_and_version

GPU_LOST = "A GPU is lost for this process, which must be restarted"
# The supported extensions, in Triton's order; a client may rely on each of them.
EXTENSIONS = (
    "classification", "sequence", "model_repository", "model_repository(unload_dependents)",
    "schedule_policy", "model_configuration", "system_shared_memory", "cuda_shared_memory",
    "binary_tensor_data", "parameters", "statistics",
    "trace", "logging",
)  # fmt: skip


class ReadsRepository(Protocol):
    """The part of the Repository used here."""

    @property
    def startup_finished(self) -> bool: ...
    def config_json(self, model: Model) -> Mapping[str, Any]: ...
    def index(self, ready: bool) -> list[dict[str, Any]]: ...


class ControlEndpoints:
    """The endpoints. `name` is the server's."""

    def __init__(
        self, engine: FindsModels, repository: ReadsRepository, metrics: Metrics, health: Health, *,
        name: str = "triton",
    ) -> None:  # fmt: skip
        self._engine = engine
        self._repository = repository
        self._metrics = metrics
        self._health = health
        version = importlib.metadata.version("penstock")
        self._server = orjson.dumps({"name": name, "version": version, "extensions": EXTENSIONS})

    def routes(self) -> tuple[Route, ...]:
        """Return the endpoints."""
        return (*self._server_routes(), *self._model_routes())

    def _server_routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", ("/v2",), self.metadata, "Server metadata", openapi.SERVER),
            Route("GET", ("/v2/health/live",), self.live, "Whether the server runs", errors=(503,)),
            Route("GET", ("/v2/health/ready",), self.ready, "Whether every model is ready", errors=(400, 503)),
            Route("GET", ("/v2/models/stats",), self.all_statistics, "Statistics of all models", openapi.STATISTICS),
            Route("GET", ("/metrics",), self.metrics, "Metrics", {"type": "string"}, content_type=METRICS_TYPE),
        )  # fmt: skip

    def _model_routes(self) -> tuple[Route, ...]:
        model = "/v2/models/{model}"
        version = model + "/versions/{version}"
        return (
            Route("GET", (model, version), self.model_metadata, "Model metadata", openapi.MODEL, errors=(400, 404)),
            Route(
                "GET", (model + "/ready", version + "/ready"), self.model_ready, "Whether a model is ready",
                errors=(400, 404),
            ),
            Route(
                "GET", (model + "/config", version + "/config"), self.model_config, "Model configuration",
                openapi.CONFIG, errors=(400, 404),
            ),
            Route(
                "GET", (model + "/stats", version + "/stats"), self.model_statistics, "Statistics of a model",
                openapi.STATISTICS, errors=(400,),
            ),
            Route(
                "POST", (model + "/infer", version + "/infer"), self.inference, "Inference: tensors in, tensors out",
                openapi.INFER_RESPONSE, openapi.INFER_REQUEST, (400, 404, 501, 503),
            ),
            Route(
                "POST", (model + "/predict", version + "/predict"), self.inference,
                "Prediction: any JSON through the model's hooks", openapi.ANYTHING, openapi.ANYTHING,
                (400, 404, 501, 503),
            ),
        )  # fmt: skip

    async def metadata(self, request: Request) -> Response:
        return Response(self._server, media_type=JSON)

    async def live(self, request: Request) -> Response:
        self._reject_when_draining()
        if not self._health.live():
            raise InferError(Code.NOT_READY, GPU_LOST)
        return Response()

    async def ready(self, request: Request) -> Response:
        self._reject_when_draining()
        return Response(status_code=200 if self._health.ready() else 400)

    def _reject_when_draining(self) -> None:
        if self._health.draining:
            raise InferError(Code.NOT_READY, EXITING)

    async def model_metadata(self, request: Request) -> Response:
        model, version = self._find_model(request)
        return json_answer(model_metadata(self._engine, model, version))

    async def model_ready(self, request: Request) -> Response:
        name, version = model_and_version(request)
        try:
            model = self._engine.model(name, version)
        except InferError:
            if not self._repository.startup_finished or any(
                entry["name"] == name and version in {"", str(entry.get("version", version))}
                for entry in self._repository.index(False)
            ):
                raise InferError(Code.INVALID, "Model version not ready") from None
            raise
        if not await check_ready(model):
            raise InferError(Code.INVALID, "Model version not ready")
        return Response()

    async def model_config(self, request: Request) -> Response:
        return json_answer(self._repository.config_json(self._find_model(request)[0]))

    async def all_statistics(self, request: Request) -> Response:
        return await _statistics(self._engine.models())

    async def model_statistics(self, request: Request) -> Response:
        return await _statistics(requested_models(self._engine, *model_and_version(request)))

    async def inference(self, request: Request) -> Response:
        """Reject paths the fast lane does not recognize: only the model name in them may be percent-encoded."""
        raise HTTPException(404)

    async def metrics(self, request: Request) -> Response:
        accept = ",".join(request.headers.getlist("accept-encoding"))
        body, headers = await encode_page(await self._metrics.render(), accept.encode("latin-1"))
        encoding_headers = {name.decode(): value.decode() for name, value in headers.items()}
        return Response(body, headers=encoding_headers | {"content-type": METRICS_TYPE})

    def _find_model(self, request: Request) -> tuple[Model, str]:
        name, version = model_and_version(request)
        return self._engine.model(name, version), version


async def _statistics(models: list[Model]) -> Response:
    epoch_offset_ns = time.time_ns() - time.monotonic_ns()
    stats = []
    for model in models:
        stats.append(model_statistics(model, epoch_offset_ns) | {"run_times": run_times(model)})
        # as on the metrics page: hundreds of models take tens of milliseconds
        await asyncio.sleep(0)
    return json_answer({"model_stats": stats})
