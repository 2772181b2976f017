"""Dialects: what a server does its own way where its PATHs are of another format. One is made by the composition root.

A format has a package of its own, with a Dialect in its `dialect.py`; all of it is reached through that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from .errors import error_body
from .options.dialect_settings import DIALECTS
from .repository.mirrors import Mirrors, defaults_of

if TYPE_CHECKING:
    from penstock.batching.engine import Engine
    from penstock.batching.model import Model

    from .environments.environments import Environments
    from .grpc.method import Method
    from .hooks.runner import Hooks
    from .http.head import HttpError
    from .http.service import Service
    from .listening.listener import Port
    from .repository.findings import Finding
    from .repository.repository import Repository
    from .repository.scan import Defaults
    from .restricted import Restricted
    from .settings import Settings
    from .telemetry.page import ASGIApp
    from .v2.inference import Inference


class Sources(Protocol):
    """The PATHs: model repositories and their copies (Mirrors), or projects."""

    def wrong(self) -> Finding | None:
        """Say which path is not what it has to be; None if all are."""

    def repository(self, defaults: Defaults) -> Repository:
        """Give the Repository of these paths."""

    def open(self) -> None:
        """Reach what is elsewhere, and check what must be right as a whole; it blocks.

        Raises: RemoteError, MistakesError.
        """

    def close(self) -> None:
        """Remove what was copied."""


@dataclass(frozen=True, slots=True)
class DialectParts:
    """What of a server its Dialect works with. `ready` tells whether the server is."""

    engine: Engine
    environments: Environments
    repository: Repository
    hooks_of: Callable[[Model], Hooks]
    inference: Inference
    ready: Callable[[], bool]


class Dialect:
    """How model repositories are served; the other formats' descend from it, and say what is otherwise.

    `nothing` is what a command line without PATHs is told, "" if it needs none. `alone` is what those served are
    called where their containers ended with what they served: so does the server, if it can serve none of them. `late`:
    the ports open when everything is loaded, as probes take an open port for a server that is ready. `loud`: answers
    name the server's software and the date.
    """

    nothing = (
        "nothing to serve: pass the PATH of a model repository, an .onnx file or a SavedModel; "
        "with --dialect cortex, a project's folder"
    )
    alone = ""
    late = False
    loud = False
    metrics_type = ""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def sources(self) -> Sources:
        """Give the PATHs."""
        return Mirrors.of(self.settings.model_repository)

    def check(self, *, invariance: bool) -> tuple[str, int]:
        """Say what would be served, and every mistake; it blocks.

        Returns: that, and the exit status. Raises: RemoteError.
        """
        from penstock.backends.loading import LOADERS

        from .environments.environments import Environments
        from .isolated.loader import with_isolated
        from .repository.check import check

        settings, mirrors = self.settings, Mirrors.of(self.settings.model_repository)
        try:
            mirrors.open()
            failures, stray = mirrors.refresh_all()
            loaders = with_isolated(LOADERS, Environments.of(settings).interpreter)
            report = check(mirrors.paths, loaders, defaults_of(settings), invariance=invariance)
            hint = mirrors.project()
            report.findings += [*failures.values(), *stray, *([hint] if hint else ())]
            return mirrors.spelled(str(report)), report.status
        finally:
            mirrors.close()

    def failure(self, text: str) -> bytes:
        """Write the body of what is refused as no request."""
        return error_body(text)

    def refusal(self, error: HttpError) -> tuple[int, bytes, bytes]:
        """Give the status, the content type and the body of the answer to what is refused as no request."""
        return error.status, b"application/json", self.failure(error.text)

    def service(self, parts: DialectParts) -> Service:
        """Take the parts of the server, and make what answers the requests of its HTTP port. Called first, and once."""
        return parts.inference

    def grpc_methods(self, restricted: Restricted) -> Mapping[str, Method]:
        """Make further RPCs, by their paths."""
        return {}

    def grpc_files(self) -> tuple[Any, ...]:
        """Give the FileDescriptorProtos of these, for reflection."""
        return ()

    def ports(self, app: ASGIApp) -> Iterable[Port]:
        """Make further ports. `app` answers what is Penstock's own over HTTP."""
        return ()

    def render(self) -> Iterable[str]:
        """Give further lines for the metrics page."""
        return ()

    async def close(self) -> None:
        """End what is neither a model nor a port, as the server drains."""


def dialect_of(settings: Settings) -> Dialect:
    """Make the Dialect of the settings. Imports no other format's package."""
    if settings.dialect == DIALECTS[0]:
        return Dialect(settings)
    module = importlib.import_module(f"{__package__}.{settings.dialect}.dialect")
    made: Dialect = module.DIALECT(settings)
    return made
