"""ServingEngine: the part of an Engine that dialects use. The Engine may be in another process (remote_engine.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.backends.errors import Code, InferError
from penstock.batching.request import SoonSubmitter

if TYPE_CHECKING:
    from penstock.batching.model import Model


class ListsModels(Protocol):
    """An Engine, for callers that go through all served models."""

    def models(self) -> list[Model]: ...


class FindsModels(ListsModels, Protocol):
    """An Engine, for callers that also look models up by name."""

    def model(self, name: str, version: str = "") -> Model: ...


class ServingEngine(FindsModels, SoonSubmitter, Protocol):
    """An Engine or its stand-in. `generation` changes whenever the result of `model` may change."""

    generation: int

    def hold(self, model: Model) -> None: ...
    def release(self, model: Model) -> None: ...
    def early_rejection(self, model: Model) -> InferError | None: ...


def get_model(engine: ServingEngine, name: str, description: str) -> Model:
    """Return the model of a dialect; `description` names it in error texts. Raises: InferError (NOT_READY)."""
    try:
        return engine.model(name)
    except InferError:
        text = f"{description} is not ready: it is being loaded, or it failed to load (see the log)"
        raise InferError(Code.NOT_READY, text) from None
