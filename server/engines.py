"""Serves and Infers: what dialects and hooks need of an Engine, which may be another process's (remote_engine.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock.batching.request import NO_TERMS, SubmitsSoon, Terms

if TYPE_CHECKING:
    from penstock.backends.backend import Array
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


class Infers(Protocol):
    """What hooks need of the Engine."""

    async def infer(
        self,
        model: Model,
        inputs: list[Array | None],
        *,
        wanted: tuple[int, ...] | None = None,
        terms: Terms = NO_TERMS,
        id: str = "",  # noqa: A002 - the protocol's word
        parameters: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Run one request through the batcher."""
