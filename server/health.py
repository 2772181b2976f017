"""Health: whether the server is live and ready, asked by every protocol that has a probe.

Made by the composition root, which sets `draining` when the server is on its way out.
"""

from __future__ import annotations

from typing import Protocol


class Readiness(Protocol):
    """The part of the Repository that is read here."""

    def ready(self, strict: bool = True) -> bool: ...


class Health:
    """`strict` is --strict-readiness: ready only when every model is."""

    def __init__(self, repository: Readiness, *, strict: bool = True) -> None:
        self._repository = repository
        self._strict = strict
        self.draining = False

    def live(self) -> bool:
        """Whether the server runs and is not on its way out."""
        return not self.draining

    def ready(self) -> bool:
        """Whether inference can be asked for. Never true while draining."""
        return not self.draining and self._repository.ready(self._strict)
