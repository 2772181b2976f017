"""Serves: what dialects need of an Engine, which may be in another process (fronts/remote_engine.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from penstock.batching.request import NO_TERMS, Terms

if TYPE_CHECKING:
    from penstock.backends.backend import Array
    from penstock.backends.errors import InferError
    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest


class Serves(Protocol):
    """The Engine, or what stands for it. `generation` changes whenever what `model` answers may change."""

    generation: int

    def model(self, name: str, version: str = "") -> Model: ...
    def models(self) -> list[Model]: ...
    def hold(self, model: Model) -> None: ...
    def release(self, model: Model) -> None: ...
    def turn_away(self, model: Model) -> InferError | None: ...
    def submit(self, request: InferRequest) -> None: ...
    def cancel(self, request: InferRequest) -> None: ...

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
