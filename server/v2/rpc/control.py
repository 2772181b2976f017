"""The RPCs about the server and its models: health, metadata, configuration, statistics and the repository.

Made by `services.py`. Source: Triton server, grpc_server.cc (codes, texts).
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.running.external_models import check_ready
from penstock.server.engines import FindsModels
from penstock.server.grpc.method import Method
from penstock.server.health import Health
from penstock.server.protobuf import service_pb2
from penstock.server.restricted import TRITON_SERVICE
from penstock.server.v2.call_parameters import parse_version
from penstock.server.v2.metadata import model_metadata, model_statistics, requested_models

from .calls import Tasks, unary_method

if TYPE_CHECKING:
    from penstock.server.v2.repository import LoadsModels

_NAMED_REPOSITORY = "'repository_name' specification is not supported"


class Configurations(Protocol):
    """The part of the Repository used here."""

    def config(self, model: Model) -> Any: ...


class ServerRpcs:
    """The read-only RPCs."""

    def __init__(self, models: FindsModels, repository: Configurations, health: Health, name: str) -> None:
        self._models = models
        self._repository = repository
        self._health = health
        self._pb = service_pb2()
        self._name = name

    def methods(self, extensions: Sequence[str], tasks: Tasks) -> tuple[Method, ...]:
        pb = self._pb
        version = importlib.metadata.version("penstock")
        server = pb.ServerMetadataResponse(name=self._name, version=version, extensions=extensions)
        return (
            unary_method(
                TRITON_SERVICE + "ServerLive", pb.ServerLiveRequest,
                lambda _: pb.ServerLiveResponse(live=self._health.live()),
            ),
            unary_method(
                TRITON_SERVICE + "ServerReady", pb.ServerReadyRequest,
                lambda _: pb.ServerReadyResponse(ready=self._health.ready()),
            ),
            unary_method(TRITON_SERVICE + "ServerMetadata", pb.ServerMetadataRequest, lambda _: server),
            tasks.unary_method(TRITON_SERVICE + "ModelReady", pb.ModelReadyRequest, self.model_ready),
            unary_method(TRITON_SERVICE + "ModelMetadata", pb.ModelMetadataRequest, self.model_metadata),
            unary_method(TRITON_SERVICE + "ModelConfig", pb.ModelConfigRequest, self.model_config),
            tasks.unary_method(TRITON_SERVICE + "ModelStatistics", pb.ModelStatisticsRequest, self.model_statistics),
        )  # fmt: skip

    async def model_ready(self, request: Any) -> Any:
        version = parse_version(request.version)
        try:
            model = self._models.model(request.name, version)
        except InferError as error:
            if error.code not in {Code.NOT_FOUND, Code.NOT_READY}:
                raise
            return self._pb.ModelReadyResponse(ready=False)
        return self._pb.ModelReadyResponse(ready=await check_ready(model) and not self._health.draining)

    def model_metadata(self, request: Any) -> Any:
        version = parse_version(request.version)
        model = self._models.model(request.name, version)
        return self._pb.ModelMetadataResponse(**model_metadata(self._models, model, version))

    def model_config(self, request: Any) -> Any:
        model = self._models.model(request.name, parse_version(request.version))
        return self._pb.ModelConfigResponse(config=self._repository.config(model))

    async def model_statistics(self, request: Any) -> Any:
        answer = self._pb.ModelStatisticsResponse()
        offset_ns = time.time_ns() - time.monotonic_ns()
        for model in requested_models(self._models, request.name, parse_version(request.version)):
            answer.model_stats.add(**model_statistics(model, offset_ns))
            # as over HTTP: hundreds of models take tens of milliseconds
            await asyncio.sleep(0)
        return answer


class RepositoryRpcs:
    """The RPCs that list the repository, load and unload."""

    def __init__(self, control: LoadsModels) -> None:
        self._control = control
        self._pb = service_pb2()

    def methods(self, tasks: Tasks) -> tuple[Method, ...]:
        pb = self._pb
        return (
            tasks.unary_method(TRITON_SERVICE + "RepositoryIndex", pb.RepositoryIndexRequest, self.index),
            tasks.unary_method(
                TRITON_SERVICE + "RepositoryModelLoad", pb.RepositoryModelLoadRequest, self.load, large=True
            ),
            tasks.unary_method(TRITON_SERVICE + "RepositoryModelUnload", pb.RepositoryModelUnloadRequest, self.unload),
        )

    async def index(self, request: Any) -> Any:
        _reject_repository(request)
        return self._pb.RepositoryIndexResponse(models=await self._control.index(request.ready))

    async def load(self, request: Any) -> Any:
        _reject_repository(request)
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, value in request.parameters.items():
            if key == "config":
                config = _parameter_value(value, key, "load", "string_param")
            elif key.startswith("file:"):
                files[key.removeprefix("file:")] = _parameter_value(value, key, "load", "bytes_param")
            else:
                raise InferError(Code.INVALID, f"unrecognized load parameter '{key}', expected 'config' or 'file:...'")
        await self._control.load(request.model_name, config, files)
        return self._pb.RepositoryModelLoadResponse()

    async def unload(self, request: Any) -> Any:
        _reject_repository(request)
        dependents = False
        for key, value in request.parameters.items():
            if key != "unload_dependents":
                raise InferError(Code.INVALID, f"unrecognized unload parameter '{key}', expected 'unload_dependents'")
            dependents = _parameter_value(value, key, "unload", "bool_param")
        await self._control.unload(request.model_name, dependents=dependents)
        return self._pb.RepositoryModelUnloadResponse()


def _reject_repository(request: Any) -> None:
    if request.repository_name:
        raise InferError(Code.UNSUPPORTED, _NAMED_REPOSITORY)


def _parameter_value(value: Any, key: str, operation: str, expected: str) -> Any:
    if value.WhichOneof("parameter_choice") != expected:
        raise InferError(Code.INVALID, f"invalid value type for {operation} parameter '{key}', expected {expected}.")
    return getattr(value, expected)
