"""Dialects: what is another for a server whose PATHs are another component format's. Called by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from .repository.mirrors import Mirrors
from .settings import Settings

if TYPE_CHECKING:
    from penstock.batching.model import Model

    from .engines import Serves
    from .environments.environments import Environments
    from .hooks.runner import Hooks
    from .http.service import Service
    from .repository.findings import Finding
    from .repository.repository import Repository
    from .repository.scan import Defaults
    from .seldon.dialect import Seldon
    from .v2.inference import Inference

CORTEX, SELDON = "cortex", "seldon"
ALONE = {CORTEX: "API", SELDON: "component"}
"""Formats whose containers ended when what they served could not be: what that was called."""


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


def sources_of(settings: Settings) -> Sources:
    """Give the PATHs, as what the dialect says they are."""
    if settings.dialect == CORTEX:
        from .cortex.projects import Projects

        return Projects(settings.model_repository, settings.s3_root)
    if settings.dialect == SELDON:
        from .seldon.components import Components

        return Components(settings)
    return Mirrors.of(settings.model_repository)


def seldon_of(settings: Settings, environments: Environments, repository: Repository) -> Seldon | None:
    """Give what serves Seldon components, if that is what the PATHs hold."""
    if settings.dialect != SELDON:
        return None
    from .seldon.dialect import Seldon

    return Seldon(settings, environments, repository)


def in_front(
    settings: Settings, engine: Serves, repository: Repository, hooks_of: Callable[[Model], Hooks],
    inference: Inference, ready: Callable[[], bool],
) -> tuple[Service, Callable[[], Iterable[str]]]:  # fmt: skip
    """Put a dialect's own Service before the one of the v2 protocol.

    Returns: what answers requests, and what gives the lines that it has for the metrics page.
    """
    if settings.dialect != CORTEX:
        return inference, tuple
    from .cortex.repository import CortexRepository
    from .cortex.service import CortexService

    if not isinstance(repository, CortexRepository):
        raise TypeError(f"{type(repository).__name__} is no repository of Cortex projects")
    service = CortexService(engine, repository, hooks_of, settings.limits(), inference, ready)
    service.restricted = inference.restricted
    return service, service.tracked.render
