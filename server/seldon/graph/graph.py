"""Graph: what a server knows of a graph: its predictors by their shares, and what walks use. Made by dialect.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.backends.errors import InferError
from penstock.server.answering import off_loop

from . import addresses
from .metrics import GraphMetrics
from .walk import Means, Walk, model_of

if TYPE_CHECKING:
    from penstock.server.engines import ServingEngine
    from penstock.server.seldon.exposition import Exposition
    from penstock.server.seldon.loading import SeldonModels
    from penstock.server.seldon.messages import ComponentDescription, Endpoint

    from .nodes import Deployment, Predictor
    from .repository import GraphRepository
    from .wires import Message, MessageCodec

MOST_SHADOWS = 64
"""The most copies for shadows in flight; requests beyond that are not copied."""


class Graph:
    """What GraphService and GraphRpcs answer with. `described` has what workers reported about their nodes, by model.

    Threads: the event loop's.
    """

    def __init__(
        self, engine: ServingEngine, repository: GraphRepository, models: SeldonModels, exposition: Exposition,
        chance: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._repository = repository
        self._looked: tuple[Deployment, int] | None = None
        self._exposition = exposition
        self._labelled: Deployment | None = None
        self._shadows: set[asyncio.Task[object]] = set()
        self.described: Mapping[str, ComponentDescription] = models.described
        self.counted = GraphMetrics(repository.deployment.name)
        self.chance = chance or random.Random()  # noqa: S311 - shares of traffic are no secrets
        self.means = Means(engine, self._tell, self.counted.call, models.sharing, self.chance, self.described)

    @property
    def deployment(self) -> Deployment:
        """The last valid content of the file; until its new nodes are open, the content before."""
        latest = self._repository.deployment
        if latest is not self._repository.served and self._looked != (latest, self.means.engine.generation):
            self._looked = latest, self.means.engine.generation
            if self._open(latest):
                self._repository.served = latest
        return self._repository.served

    @property
    def first(self) -> Predictor:
        """The predictor used for what all have in common."""
        return next(each for each in self.deployment.predictors if not each.shadow)

    async def chosen(self, address: addresses.GraphRoute, message: Message, wire: MessageCodec) -> Predictor:
        """Choose the predictor by share, for feedback by its routing.

        Feedback goes to the one predictor that has all nodes its routing names, or by share if there is no such one.
        """
        candidates = [each for each in self.deployment.predictors if not each.shadow]
        if len(candidates) == 1:
            return candidates[0]
        if address.purpose == addresses.FEEDBACK:
            passed = set(await off_loop(len(message.body), wire.routing, message))
            those = [each for each in candidates if passed and passed <= {node.name for node in each.graph.all()}]
            if len(those) == 1:
                return those[0]
        return self.chance.choices(candidates, [each.weight for each in candidates])[0]

    def shadow(self, message: Message, puid: str, wire: MessageCodec) -> None:
        """Send a copy of a request to every shadow. Nothing waits for the answers."""
        for predictor in self.deployment.predictors:
            if predictor.shadow and len(self._shadows) < MOST_SHADOWS:
                walk = Walk(self.means, predictor, wire)
                task: asyncio.Task[object] = asyncio.get_running_loop().create_task(_dropped(walk, message, puid))
                self._shadows.add(task)
                task.add_done_callback(self._shadows.discard)

    def ready(self) -> bool:
        """Return whether every node can be called."""
        return self._open(self.deployment)

    def _open(self, deployment: Deployment) -> bool:
        try:
            return all(model_of(self.means.engine, node).healthy for node in deployment.nodes)
        except InferError:
            return False

    def _tell(self, model: str, endpoint: Endpoint, metrics: bytes) -> None:
        """Add the metrics of a node, under its own labels."""
        if self._labelled is not self.deployment:
            self._labelled = self.deployment
            for node in self.deployment.nodes:
                self._exposition.label(node.model, node.environment)
        self._exposition.add(endpoint, metrics, model)


async def _dropped(walk: Walk, message: Message, puid: str) -> None:
    with contextlib.suppress(Exception):  # a shadow's failures are in the metrics
        await walk.predict(message, puid)
