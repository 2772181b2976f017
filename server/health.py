"""Health: whether the server is live and ready, asked by every protocol that has a probe.

Made by the composition root, which sets `draining` when the server is on its way out, `leaving` when --drain-delay-secs
is over too, and who is connected is to go, and `spent` when its process has lost a device for good: only another
process can use that again, so whoever watches over it has to start it anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .engines import ListsModels

EXITING = "Server exiting"
"""Triton's text."""


class Readiness(Protocol):
    """The part of the Repository that is read here."""

    def ready(self, strict: bool = True) -> bool: ...


class Health:
    """`strict` is --strict-readiness: ready only when every model is, and has an Instance that can run."""

    def __init__(self, repository: Readiness, engine: ListsModels, *, strict: bool = True) -> None:
        self._repository = repository
        self._engine = engine
        self._strict = strict
        self.draining = False
        self.leaving = False
        self.spent = False

    def live(self) -> bool:
        """Whether the server runs, and is not on its way out, nor to be started anew."""
        return not self.draining and not self.spent

    def ready(self) -> bool:
        """Whether inference can be asked for. Never true while draining."""
        if self.draining or not self._repository.ready(self._strict):
            return False
        return not self._strict or all(model.ready for model in self._engine.models())
