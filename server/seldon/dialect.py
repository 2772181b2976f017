"""Seldon: assembles the parts that serve Seldon components. Made by server/dialects.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.server.dialects import Dialect, DialectParts
from penstock.server.restricted import RestrictedApis, restricted_methods

from . import pages, protos
from .check import check_components
from .components import SELDON, Components
from .current_component import CurrentComponent
from .exposition import Exposition
from .graph.graph import Graph
from .graph.repository import GraphRepository
from .graph.rpc import GraphRpcs
from .graph.service import GraphService
from .loading import SeldonModels
from .rpc import CATEGORIES, SeldonRpcs
from .service import SeldonService

if TYPE_CHECKING:
    from penstock.server.grpc.method import Method
    from penstock.server.http.head import HttpError
    from penstock.server.settings import Settings


class Seldon(Dialect):
    """One server's parts. `models` opens the components, `exposition` holds their metrics."""

    no_paths_message = "nothing to serve: pass the PATH of a component, its folder or its Name.py, or of a graph"
    required_kind = "component"
    opens_late = names_server = True
    metrics_content_type = "text/plain; version=0.0.4; charset=utf-8"
    models: SeldonModels
    _parts: DialectParts

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.exposition = Exposition()
        self._graph: Graph | None = None

    def sources(self) -> Components:
        """Return the PATH."""
        return Components(self.settings)

    def check(self, *, invariance: bool) -> tuple[str, int]:
        """Report what would be served."""
        report = check_components(self.settings)
        return str(report), report.exit_status

    def error_response(self, error: HttpError) -> tuple[int, bytes, bytes]:
        """Return the status, content type and body of the answer to a malformed request."""
        return error.status, b"application/json", pages.failure(error.text)

    def service(self, parts: DialectParts) -> SeldonService | GraphService:
        """Make the Service of the HTTP port."""
        self._parts = parts
        self.models = parts.engine.external_loaders[SELDON] = SeldonModels(parts.environments)
        self.models.count_metrics = self.exposition.add
        if isinstance(parts.repository, GraphRepository):
            self._graph = Graph(parts.engine, parts.repository, self.models, self.exposition)
            graph_service = GraphService(self._graph, parts.inference, self.settings.limits())
            graph_service.restricted = parts.inference.restricted
            return graph_service
        service = SeldonService(parts.engine, self._current(), self.exposition, parts.inference, self.settings)
        service.restricted = parts.inference.restricted
        return service

    def grpc_methods(self, restricted: RestrictedApis) -> dict[str, Method]:
        """Make the RPCs of the gRPC port, by path."""
        if self._graph is not None:
            methods = GraphRpcs(self._graph).methods()
        else:
            methods = SeldonRpcs(self._parts.engine, self._current(), self.exposition).methods()
        return restricted_methods(methods, restricted, CATEGORIES)

    def grpc_descriptors(self) -> tuple[Any, ...]:
        """Return the FileDescriptorProtos that reflection offers."""
        return protos.files()

    def metrics_lines(self) -> Iterable[str]:
        """Return the lines for the metrics page."""
        return (*self.exposition.render(), *(self._graph.metrics.render() if self._graph is not None else ()))

    def _current(self) -> CurrentComponent:
        parts = self._parts
        return CurrentComponent(parts.engine, lambda: next(iter(parts.repository.names()), ""), self.models)


DIALECT = Seldon
