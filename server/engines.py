"""Serves: what dialects need of an Engine, which may be another process's (remote_engine.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.backends.errors import Code, InferError
from penstock.batching.request import SubmitsSoon

if TYPE_CHECKING:
    from penstock.batching.model import Model


class Serves(SubmitsSoon, Protocol):
    """The Engine, or what stands for it. `generation` changes whenever what `model` answers may change."""

    generation: int

    def model(self, name: str, version: str = "") -> Model: ...
    def models(self) -> list[Model]: ...
    def hold(self, model: Model) -> None: ...
    def release(self, model: Model) -> None: ...
    def turn_away(self, model: Model) -> InferError | None: ...


def served(engine: Serves, name: str, said: str) -> Model:
    """Give the model of a format's own, which `said` names in its words. Raises: InferError (NOT_READY)."""
    try:
        return engine.model(name)
    except InferError:
        text = f"{said} is not ready: it is being loaded, or it failed to load (see the log)"
        raise InferError(Code.NOT_READY, text) from None
