"""Ensemble: what a model made of models has besides: the links to its steps, and what is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.backends.errors import Code, InferError
from penstock.batching.request import InferRequest, Submitter
from penstock.batching.sequences.sequels import Sequels

from .steps import link_steps

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.batching.running.batch import Batch

    from .course import Links
    from .passage import Passage


class EnsembleEngine(Submitter, Protocol):
    """The part of the Engine that is used here."""

    stopping: bool
    trace: Callable[[Model, Batch, int], None] | None

    def make_room(self, model: Model) -> None: ...
    def submit_together(self, model: Model, requests: Sequence[InferRequest]) -> bool: ...
    def model(self, name: str, version: str = "") -> Model: ...
    def hold(self, model: Model) -> None: ...
    def release(self, model: Model) -> None: ...


class Ensemble:
    """The additional state of an ensemble's Model: the links to its steps, and what is under way.

    Steps, including nested ones, are looked up once, and again when any model has been published or withdrawn. Their
    Models are held from then on, so that none of them is retired while a request may need it.
    Threads: the event loop's.
    """

    def __init__(self, model: Model, engine: EnsembleEngine) -> None:
        self.model = model
        self._engine = engine
        self._links: Links | None = None
        self.passages: dict[InferRequest, Passage] = {}
        self.sequels = Sequels()

    def check(self) -> None:
        """Check that the models being served can be its steps. Raises: InferError."""
        if self._links is None:
            links = link_steps(self.model.spec, self.model.binding_signature, self._engine.model)
            if links.decoupled != self.model.spec.decoupled:
                text = f"ensemble '{self.model.name}' must be reloaded: one of its steps"
                change = "has become decoupled" if links.decoupled else "is no longer decoupled"
                raise InferError(Code.NOT_READY, f"{text} {change}")

    def links(self) -> Links:
        """Return the steps as they are served now. Raises: InferError."""
        links = self._links
        if links is None:
            links = link_steps(self.model.spec, self.model.binding_signature, self._engine.model)
            links.nested = {model: model.ensemble.links() for model in links.models if model.ensemble is not None}
            for nested in links.nested.values():
                nested.user_count += 1
            for model in links.models:
                self._engine.hold(model)
            self._links = links
        return links

    def invalidate_links(self) -> None:
        """Look the steps up again for the next request. Requests under way keep theirs."""
        links, self._links = self._links, None
        if links is not None:
            links.stale = True
            self.release_links(links, 0)

    def release_links(self, links: Links, user_count: int = 1) -> None:
        """Remove users of links, its own or nested ones, and release the models of stale links without users."""
        links.user_count -= user_count
        if links.stale and not links.user_count:
            for nested in links.nested.values():
                self.release_links(nested)
            for model in links.models:
                self._engine.release(model)

    @property
    def healthy(self) -> bool:
        """Whether its steps are served, fit together, and can run."""
        try:
            return all(model.healthy for model in self.links().models)
        except InferError:
            return False
