"""Crews for tests of components: those of tests/server/carrying, whose fake workers act as a component's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.batching.model import Model
from penstock.batching.spec import WorkerSpec
from penstock.server.seldon.calls import SeldonCall
from penstock.server.seldon.components import SELDON
from penstock.server.seldon.loading import SeldonModels
from penstock.server.seldon.messages import ComponentDescription, Endpoint, PayloadKind
from tests.server.carrying.crews import Echo, Ledger, Stage


class SeldonEcho(Echo):
    """An Echo with a ComponentDescription."""

    def __init__(self) -> None:
        super().__init__()
        self.description = ComponentDescription()


class SeldonStage(Stage):
    """What the workers of one component share."""

    backend = SELDON

    def __init__(self, service: Any, plan: Callable[[bytes], str] = lambda _: "answer") -> None:
        super().__init__(service, plan)
        self.counted: list[tuple[Endpoint, bytes]] = []
        self.models = SeldonModels(self)  # type: ignore[arg-type]
        self.models.count_metrics = lambda endpoint, metrics: self.counted.append((endpoint, metrics))

    def on_open(self) -> bytes:
        """Return the service's description."""
        described: bytes = self.service.description.write()
        return described

    def make_external_loader(self) -> SeldonModels:
        """Return the SeldonModels that open components."""
        return self.models

    def interpreter(self, _worker: WorkerSpec, _label: str) -> str:
        """Stand in for Environments."""
        return ""

    @staticmethod
    def call(model: Model, name: str, ledger: Ledger) -> SeldonCall:
        """Make a call whose name is its payload."""
        seldon_call = SeldonCall(model, Endpoint.PREDICT, PayloadKind.JSON, name.encode(), ledger)
        seldon_call.context = name
        return seldon_call
