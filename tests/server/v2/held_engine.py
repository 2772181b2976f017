"""HeldEngine: an Engine that answers on demand, for tests of dialects."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from tests.fakes import fake_model

ROW = np.array([[1, 2, 3, 4]], np.float32)


@dataclass
class HeldEngine:
    """Keeps submitted requests until the test lets them go."""

    loaded: list[Model] = field(default_factory=lambda: [fake_model()])
    generation: int = 1
    held: list[InferRequest] = field(default_factory=list)
    cancelled: list[InferRequest] = field(default_factory=list)
    failure: Exception | None = None
    refusal: InferError | None = None

    def model(self, name: str, version: str = "") -> Model:
        for each in self.loaded:
            if each.name == name and version in {"", each.version}:
                return each
        raise InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' is not found")

    def models(self) -> list[Model]:
        return self.loaded

    def submit(self, request: InferRequest) -> None:
        if self.failure is not None:
            raise self.failure
        self.held.append(request)

    submit_soon = submit

    def early_rejection(self, model: Model) -> InferError | None:
        return self.refusal

    def cancel(self, request: InferRequest) -> None:
        self.cancelled.append(request)

    def hold(self, model: Model) -> None:
        model.hold_count += 1

    def release(self, model: Model) -> None:
        model.hold_count -= 1

    def let_go(self, values: Array = ROW, *, count: int | None = None) -> None:
        """Answer all submitted requests as one batch; every output has these values."""
        batch, self.held = self.held[:count], self.held[len(self.held[:count]) :]
        for each in batch:
            each.outputs = [values for _ in each.output_positions]
        batch[0].sink.deliver(batch)

    def fail(self, error: InferError) -> None:
        """Answer all submitted requests with an error."""
        batch, self.held = self.held, []
        for each in batch:
            each.error = error
        batch[0].sink.deliver(batch)
