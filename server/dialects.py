"""Dialect: how a server behaves for one format of PATH. The composition root makes one per server.

Each format other than model repositories has a package with a subclass of Dialect in its `dialect.py`; nothing else of
the package is imported from outside.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import json_error
from .options.dialect_settings import DIALECTS
from .repository.mirrors import Mirrors, make_defaults

if TYPE_CHECKING:
    from penstock.batching.engine import Engine
    from penstock.batching.model import Model

    from .environments.environments import Environments
    from .grpc.method import Method
    from .hooks.runner import Hooks
    from .http.head import HttpError
    from .http.service import Service
    from .listening.listener import Port
    from .repository.defaults import Defaults
    from .repository.findings import Finding
    from .repository.repository import Repository
    from .restricted import RestrictedApis
    from .settings import Settings
    from .telemetry.page import ASGIApp
    from .v2.inference import Inference


class Sources(Protocol):
    """The PATHs: model repositories and their local copies (Mirrors), or projects."""

    def invalid_path(self) -> Finding | None:
        """Return a Finding for a path that is not valid; None if all are."""

    def repository(self, defaults: Defaults) -> Repository:
        """Return the Repository of these paths."""

    def open(self) -> None:
        """Connect to remote paths, and check what must hold across all of them. Blocks.

        Raises: RemoteError, MistakesError.
        """

    def close(self) -> None:
        """Remove local copies."""


@dataclass(frozen=True, slots=True)
class DialectParts:
    """The parts of a server that its Dialect uses. `ready` reports whether the server is ready."""

    engine: Engine
    environments: Environments
    repository: Repository
    hooks_of: Callable[[Model], Hooks]
    inference: Inference
    ready: Callable[[], bool]


class Dialect:
    """The Dialect of model repositories, and the base class of the others, which override what differs.

    `no_paths_message` is the error for a command line without PATHs, "" if none are needed. `required_kind` names what
    is served, for formats whose original container exits if it cannot serve it; the server then exits too if none can
    be served. `opens_late` opens the ports only after everything is loaded, for probes that take an open port for a
    ready server. `names_server` makes answers name the server's software and the date.
    """

    no_paths_message = (
        "nothing to serve: pass the PATH of a model repository, an .onnx file or a SavedModel; "
        "with --dialect cortex, a project's folder"
    )
    required_kind = ""
    opens_late = False
    names_server = False
    metrics_content_type = ""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def sources(self) -> Sources:
        """Return the PATHs."""
        return Mirrors.from_paths(self.settings.model_repository)

    def check(self, *, invariance: bool) -> tuple[str, int]:
        """Report what would be served, and every mistake. Blocks.

        Returns: the report and the exit status. Raises: RemoteError.
        """
        from penstock.backends.loading import LOADERS

        from .environments.environments import Environments
        from .isolated.loader import with_isolated
        from .repository.check import check

        settings, mirrors = self.settings, Mirrors.from_paths(self.settings.model_repository)
        try:
            mirrors.open()
            failures, general = mirrors.refresh_all()
            loaders = with_isolated(LOADERS, Environments.from_settings(settings).interpreter)
            report = check(mirrors.paths, loaders, make_defaults(settings), invariance=invariance)
            hint = mirrors.foreign_project()
            report.findings += [*failures.values(), *general, *([hint] if hint else ())]
            return mirrors.with_urls(str(report)), report.exit_status
        finally:
            mirrors.close()

    def error_response(self, error: HttpError) -> tuple[int, bytes, bytes]:
        """Return the status, content type and body for input rejected before it is a request."""
        return json_error(error)

    def service(self, parts: DialectParts) -> Service:
        """Return the Service that answers HTTP requests, made from the server's parts. Called first, and only once."""
        return parts.inference

    def grpc_methods(self, restricted: RestrictedApis) -> Mapping[str, Method]:
        """Return additional RPCs by path."""
        return {}

    def grpc_descriptors(self) -> tuple[Any, ...]:
        """Return the FileDescriptorProtos of those RPCs, for reflection."""
        return ()

    def extra_ports(self, app: ASGIApp) -> Iterable[Port]:
        """Return additional ports. `app` answers Penstock's own HTTP requests."""
        return ()

    def metrics_lines(self) -> Iterable[str]:
        """Return additional lines for the metrics page."""
        return ()

    async def close(self) -> None:
        """Close what is neither a model nor a port, as the server drains."""


def dialect_of(settings: Settings) -> Dialect:
    """Make the Dialect for the settings, importing no other format's package."""
    if settings.dialect == DIALECTS[0]:
        return Dialect(settings)
    module = importlib.import_module(f"{__package__}.{settings.dialect}.dialect")
    dialect: Dialect = module.DIALECT(settings)
    return dialect
