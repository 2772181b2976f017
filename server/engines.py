"""Serves: what dialects need of an Engine, which may be another process's (remote_engine.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.batching.request import SubmitsSoon

if TYPE_CHECKING:
    from penstock.backends.errors import InferError
    from penstock.batching.model import Model


class Serves(SubmitsSoon, Protocol):
    """The Engine, or what stands for it. `generation` changes whenever what `model` answers may change."""

    generation: int

    def model(self, name: str, version: str = "") -> Model: ...
    def models(self) -> list[Model]: ...
    def hold(self, model: Model) -> None: ...
    def release(self, model: Model) -> None: ...
    def turn_away(self, model: Model) -> InferError | None: ...
