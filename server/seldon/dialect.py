"""Seldon: the parts that serve Seldon components, put together. Made by server/dialects.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.server.restricted import Restricted, restricted_methods

from . import protos
from .current import Current
from .exposition import Exposition
from .graph.repository import GraphRepository
from .graph.rpc import GraphRpcs
from .graph.service import GraphService
from .graph.shares import Graph
from .loading import SELDON, SeldonModels
from .rpc import CATEGORIES, SeldonRpcs
from .service import SeldonService

if TYPE_CHECKING:
    from penstock.server.engines import Serves
    from penstock.server.environments.environments import Environments
    from penstock.server.grpc.method import Method
    from penstock.server.repository.repository import Repository
    from penstock.server.settings import Settings
    from penstock.server.v2.inference import Inference


class Seldon:
    """What one server has of them. `models` opens them, `exposition` has their metrics."""

    backend = SELDON
    metrics_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, settings: Settings, environments: Environments, repository: Repository) -> None:
        self._settings = settings
        self._repository = repository
        self.models = SeldonModels(environments)
        self.exposition = Exposition()
        self.models.count = self.exposition.add
        self._graph: Graph | None = None

    def service(self, engine: Serves, others: Inference) -> SeldonService | GraphService:
        """Make the Service of the HTTP port."""
        if (graph := self._graph_on(engine)) is not None:
            in_front = GraphService(graph, others, self._settings.limits())
            in_front.restricted = others.restricted
            return in_front
        service = SeldonService(engine, self._current(engine), self.exposition, others, self._settings)
        service.restricted = others.restricted
        return service

    def grpc_methods(self, engine: Serves, restricted: Restricted) -> dict[str, Method]:
        """Make the RPCs of the gRPC port, by their paths."""
        if (graph := self._graph_on(engine)) is not None:
            methods = GraphRpcs(graph).methods()
        else:
            methods = SeldonRpcs(engine, self._current(engine), self.exposition).methods()
        return restricted_methods(methods, restricted, CATEGORIES)

    @staticmethod
    def grpc_files() -> tuple[Any, ...]:
        """Give the FileDescriptorProtos that reflection tells of."""
        return protos.files()

    def render(self) -> Iterable[str]:
        """Give the lines for the metrics page."""
        return (*self.exposition.render(), *(self._graph.counted.render() if self._graph is not None else ()))

    def _graph_on(self, engine: Serves) -> Graph | None:
        """Give the graph that there is instead of one component, on the Engine that runs its nodes."""
        if self._graph is None and isinstance(self._repository, GraphRepository):
            self._graph = Graph(engine, self._repository, self.models, self.exposition)
        return self._graph

    def _current(self, engine: Serves) -> Current:
        return Current(engine, lambda: next(iter(self._repository.names()), ""), self.models)
