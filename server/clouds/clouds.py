"""Clouds: assembles the ports of SageMaker and Vertex AI. Created by the composition root if one is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import InferError
from penstock.server.http.service import HttpShared
from penstock.server.listening.ports import make_listener
from penstock.server.v2.inference import Inference

from .archives import Archives, LinksFolder
from .sagemaker import SageMakerApp, SageMakerInference, SageMakerPaths, SageMakerService
from .vertex_ai import PredictRoutes, VertexApp, VertexService

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.batching.engine import Engine
    from penstock.server.listening.listener import Listener
    from penstock.server.repository.control import ModelControl
    from penstock.server.repository.repository import Repository
    from penstock.server.settings import Settings
    from penstock.server.telemetry.page import ASGIApp


@dataclass(frozen=True, slots=True)
class CloudParts:
    """The parts of a server that the clouds' ports use. `inference` makes one of a type, without forwarded headers."""

    app: Callable[[], ASGIApp]
    engine: Engine
    repository: Repository
    control: ModelControl
    inference: Callable[[type[Any]], Any]


class Clouds:
    """The ports that the settings allow. `settings` are the server's, with the archives' folder among the repositories.

    Call `ports` before the other methods.
    """

    def __init__(self, settings: Settings) -> None:
        self._links = LinksFolder() if settings.allow_sagemaker and settings.model_control_mode == "explicit" else None
        self.settings = settings
        if self._links is not None:
            repositories = (*settings.model_repository, str(self._links.root))
            self.settings = replace(settings, model_repository=repositories)
        self._routes = PredictRoutes(
            settings.vertex_ai_health_route, settings.vertex_ai_predict_route, settings.vertex_ai_default_model
        )
        self.sagemaker: Listener | None = None
        self.vertex_ai: Listener | None = None

    @property
    def links_folder(self) -> Path | None:
        """The folder of the archives' links, if there is one."""
        return None if self._links is None else self._links.root

    def ports(self, parts: CloudParts) -> Iterator[Listener]:
        """Create the ports."""
        if self.settings.allow_sagemaker:
            self.sagemaker = self._sagemaker(parts)
            yield self.sagemaker
        if self.settings.allow_vertex_ai:
            self.vertex_ai = self._vertex_ai(parts)
            yield self.vertex_ai

    def _vertex_ai(self, parts: CloudParts) -> Listener:
        settings = self.settings
        shared = HttpShared(VertexService(parts.inference(Inference), self._routes), settings.limits())
        app = VertexApp(parts.app(), self._routes)
        return make_listener(settings, "Vertex AI", (settings.vertex_ai_address, settings.vertex_ai_port), app, shared)

    def _sagemaker(self, parts: CloudParts) -> Listener:
        settings, paths = self.settings, SageMakerPaths.from_settings(self.settings)

        def ready(name: str) -> bool:
            try:
                return parts.engine.model(name).ready
            except InferError:
                return False

        links_folder, archives = self.links_folder, None
        if links_folder is not None:
            archives = Archives(links_folder, parts.control, parts.repository.names, ready)
        inference = parts.inference(SageMakerInference)
        shared = HttpShared(SageMakerService(inference, paths, archives), settings.limits())
        app = SageMakerApp(parts.app(), paths, archives, inference.restricted)
        return make_listener(settings, "SageMaker", (settings.sagemaker_address, settings.sagemaker_port), app, shared)

    def default_model_problem(self, engine: Engine) -> str:
        """Return why there is no default model, once all are loaded; "" if there is one, or none is needed."""
        if not self.settings.allow_vertex_ai:
            return ""
        problem = self._routes.choose(model.name for model in engine.models())
        return f"failed to start Vertex AI service: {problem}" if problem else ""

    def close(self) -> None:
        """Remove the folder created on disk."""
        if self._links is not None:
            self._links.close()
