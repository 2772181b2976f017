"""Health: whether the server is live and ready, used by every protocol that has a health check.

Made by the composition root, which sets `draining` when shutdown begins, `disconnecting` when --drain-delay-secs has
passed and clients are to disconnect, and `device_lost` when the process has lost a device for good: only another
process can use that device again, so the supervisor or orchestrator must restart this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .engines import ListsModels

EXITING = "Server exiting"
"""Triton's text."""


class Health:
    """`strict` is --strict-readiness: ready only if every model is ready and has an Instance that can run.

    `models_ready` returns whether the models are ready, by the same rule.
    """

    def __init__(self, models_ready: Callable[[bool], bool], engine: ListsModels, *, strict: bool = True) -> None:
        self._models_ready = models_ready
        self._engine = engine
        self._strict = strict
        self.draining = False
        self.disconnecting = False
        self.device_lost = False

    def live(self) -> bool:
        """Whether the server is running, not shutting down, and does not need a restart."""
        return not self.draining and not self.device_lost

    def ready(self) -> bool:
        """Whether inference requests can be sent. Never true while draining."""
        if self.draining or not self._models_ready(self._strict):
            return False
        return not self._strict or all(model.ready for model in self._engine.models())
