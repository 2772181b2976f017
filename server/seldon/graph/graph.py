"""Graph: what a server knows of a graph: its predictors by their shares, and what walks use. Made by dialect.py."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.backends.errors import InferError
from penstock.server.answering import off_loop

from . import routes
from .metrics import GraphMetrics
from .walk import Walk, WalkContext, model_of

if TYPE_CHECKING:
    from penstock.server.engines import ServingEngine
    from penstock.server.seldon.exposition import Exposition
    from penstock.server.seldon.loading import SeldonModels
    from penstock.server.seldon.messages import ComponentDescription, Endpoint

    from .message_codecs import Message, MessageCodec
    from .nodes import Deployment, Predictor
    from .repository import GraphRepository

MAX_SHADOWS = 64
"""The most copies for shadows in flight; requests beyond that are not copied."""


class Graph:
    """What GraphService and GraphRpcs answer with. `descriptions` are what workers reported about nodes, by model.

    Threads: the event loop's.
    """

    def __init__(
        self, engine: ServingEngine, repository: GraphRepository, models: SeldonModels, exposition: Exposition,
        rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._repository = repository
        self._last_checked: tuple[Deployment, int] | None = None
        self._exposition = exposition
        self._labeled_deployment: Deployment | None = None
        self._shadows: set[asyncio.Task[object]] = set()
        self.descriptions: Mapping[str, ComponentDescription] = models.descriptions
        self.metrics = GraphMetrics(repository.deployment.name)
        self.rng = rng or random.Random()  # noqa: S311 - shares of traffic are no secrets
        self.context = WalkContext(
            engine, self._add_metrics, self.metrics.count_call, models.sharing, self.rng, self.descriptions
        )

    @property
    def deployment(self) -> Deployment:
        """The last valid content of the file; until its new nodes are open, the content before."""
        latest = self._repository.deployment
        if latest is not self._repository.served and self._last_checked != (latest, self.context.engine.generation):
            self._last_checked = latest, self.context.engine.generation
            if self._is_open(latest):
                self._repository.served = latest
        return self._repository.served

    @property
    def first_predictor(self) -> Predictor:
        """The predictor used for what all have in common."""
        return next(each for each in self.deployment.predictors if not each.shadow)

    async def choose_predictor(self, route: routes.GraphRoute, message: Message, codec: MessageCodec) -> Predictor:
        """Choose the predictor by share, for feedback by its routing.

        Feedback goes to the one predictor that has all nodes its routing names, or by share if there is no such one.
        """
        candidates = [each for each in self.deployment.predictors if not each.shadow]
        if len(candidates) == 1:
            return candidates[0]
        if route.purpose == routes.FEEDBACK:
            visited = set(await off_loop(len(message.body), codec.routing, message))
            matches = [each for each in candidates if visited and visited <= {node.name for node in each.graph.all()}]
            if len(matches) == 1:
                return matches[0]
        return self.rng.choices(candidates, [each.weight for each in candidates])[0]

    def shadow(self, message: Message, puid: str, codec: MessageCodec) -> None:
        """Send a copy of a request to every shadow. Nothing waits for the answers."""
        for predictor in self.deployment.predictors:
            if predictor.shadow and len(self._shadows) < MAX_SHADOWS:
                walk = Walk(self.context, predictor, codec)
                task: asyncio.Task[object] = asyncio.get_running_loop().create_task(_run_shadow(walk, message, puid))
                self._shadows.add(task)
                task.add_done_callback(self._shadows.discard)

    def ready(self) -> bool:
        """Return whether every node can be called."""
        return self._is_open(self.deployment)

    def _is_open(self, deployment: Deployment) -> bool:
        try:
            return all(model_of(self.context.engine, node).healthy for node in deployment.nodes)
        except InferError:
            return False

    def _add_metrics(self, model: str, endpoint: Endpoint, metrics: bytes) -> None:
        """Add the metrics of a node, under its own labels."""
        if self._labeled_deployment is not self.deployment:
            self._labeled_deployment = self.deployment
            for node in self.deployment.nodes:
                self._exposition.label(node.model, node.environment)
        self._exposition.add(endpoint, metrics, model)


async def _run_shadow(walk: Walk, message: Message, puid: str) -> None:
    with contextlib.suppress(Exception):  # a shadow's failures are in the metrics
        await walk.predict(message, puid)
