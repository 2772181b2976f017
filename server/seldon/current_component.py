"""CurrentComponent: the Model to which a server sends calls. Made by dialect.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.server.engines import get_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.batching.model import Model
    from penstock.server.engines import ServingEngine

    from .batching import Sharing
    from .loading import SeldonModels
    from .messages import ComponentDescription


class CurrentComponent:
    """The Model of a server's one component, looked up again whenever the Engine's versions change.

    `name` returns the component's name. `sharing` decodes calls that may share a batch; None if none may, and before
    the first `find`. `reads_request`: the component receives all header fields, for Flask's request.
    Threads: the event loop's.
    """

    __slots__ = ("_engine", "_generation", "_model", "_models", "name", "reads_request", "sharing")

    def __init__(self, engine: ServingEngine, name: Callable[[], str], models: SeldonModels) -> None:
        self._engine = engine
        self._models = models
        self._model: Model | None = None
        self._generation = -1
        self.name = name
        self.sharing: Sharing | None = None
        self.reads_request = False

    @property
    def description(self) -> ComponentDescription | None:
        """What its worker reported about it; None before the first report."""
        return self._models.descriptions.get(self.name())

    def find(self) -> Model:
        """Return the Model. Raises: InferError (NOT_READY)."""
        model = self._model
        if model is None or self._generation != self._engine.generation:
            model = self._model = self._look_up()
        return model

    def _look_up(self) -> Model:
        self._model = self.sharing = None
        generation, name = self._engine.generation, self.name()
        model = get_model(self._engine, name, "the component")
        self._generation, self.sharing = generation, self._models.sharing.get(name)
        description = self._models.descriptions.get(name)
        self.reads_request = self.sharing is None and description is not None and description.reads_request
        return model
