"""Walk: one request on its way through a graph, on the event loop. Made by service.py and rpc.py.

Each call of a node is a SeldonCall of its model, so a node that is slow, fails or dies affects only requests that wait
for it.
Source for the order of calls: Seldon Core 1.17.1, the executor.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.batching.sinks import FUTURES
from penstock.server.answering import off_loop
from penstock.server.engines import ServingEngine, get_model
from penstock.server.seldon.calls import SeldonCall
from penstock.server.seldon.environ import UNSET_IMAGE
from penstock.server.seldon.messages import Endpoint, read_answer
from penstock.server.seldon.pages import JSON

from . import builtin
from .nodes import AVERAGE, BUILT_IN, SIMPLE_MODEL, GraphNode, MetaNotes, Predictor
from .wires import GraphError, Message, MessageCodec, Noted

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.server.seldon.batching import Sharing
    from penstock.server.seldon.messages import ComponentDescription

ABORT = -2
"""A router's answer for calling no child: the message is returned as it is."""
ALL = -1


class NodeFailed(Exception):  # noqa: N818 - a condition that the node has answered
    """A node answered with an error: its status, and its answer, which the client receives unchanged."""

    def __init__(self, node: str, status: int, message: Message) -> None:
        super().__init__(node)
        self.node = node
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True)
class Means:
    """What all walks of a server share. `tell` takes the metrics that a node's call reported: model, endpoint, metrics.

    `counted` takes each call's predictor, node, endpoint, status (-1 if none arrived) and nanoseconds. By model,
    `sharing` makes calls that may share batches, and `described` has what a worker reported about its node.
    """

    engine: ServingEngine
    tell: Callable[[str, Endpoint, bytes], None] = lambda model, endpoint, metrics: None
    counted: Callable[[Predictor, GraphNode, Endpoint, int, int], None] = lambda *of_a_call: None
    sharing: Mapping[str, Sharing] = field(default_factory=dict)
    chance: random.Random = field(default_factory=random.Random)
    described: Mapping[str, ComponentDescription] = field(default_factory=dict)


class Walk:
    """One request. `routing` has the child that each node chose so far, `path` the images of the nodes it passed."""

    def __init__(self, means: Means, predictor: Predictor, wire: MessageCodec) -> None:
        self._means = means
        self._predictor = predictor
        self._wire = wire
        self._limit_s = wire.limit_s(predictor)
        self.routing: dict[str, int] = {}
        self.path: dict[str, str] = {}

    async def predict(self, message: Message, puid: str) -> Message:
        """Answer a request. Raises: NodeFailed, GraphError, InferError."""
        answer = await self._through(self._predictor.graph, message)
        notes = self._predictor.notes
        if notes is MetaNotes.NONE:
            return answer
        noted = Noted(self.routing, self.path, puid)
        return await off_loop(len(answer.body), self._wire.noted, answer, noted, notes)

    async def feedback(self, message: Message) -> Message:
        """Send feedback to the nodes that its request passed. Raises: as `predict`."""
        routing = await off_loop(len(message.body), self._wire.routing, message)
        return await self._back(self._predictor.graph, message, routing)

    async def ask(self, node: GraphNode, endpoint: Endpoint, message: Message) -> Message:
        """Call one node. Raises: as `predict`."""
        self.path[node.name] = node.image or UNSET_IMAGE
        model = model_of(self._means.engine, node)
        sharing, described = self._means.sharing.get(node.model), self._means.described.get(node.model)
        looks = sharing is None and described is not None and described.looks and endpoint is not Endpoint.HEALTH
        form, payload = self._wire.payload(message, headed=looks)
        if sharing is None:
            call = SeldonCall(model, endpoint, form, payload, FUTURES)
        else:
            call = await off_loop(len(payload), sharing.call_of, model, endpoint, form, payload, FUTURES)
        call.context = asyncio.get_running_loop().create_future()
        began_ns, status = time.monotonic_ns(), -1
        try:
            self._means.engine.submit(call)
            await self._answered(call, node)
            status, answer = self._opened(call, node, endpoint)
        finally:
            self._means.counted(self._predictor, node, endpoint, status, time.monotonic_ns() - began_ns)
        if status != self._wire.good:
            raise NodeFailed(node.name, status, answer)
        return answer

    async def _answered(self, call: SeldonCall, node: GraphNode) -> None:
        """Wait for an answer; cancel the call if its client is gone or the time limit is reached."""
        try:
            async with asyncio.timeout(self._limit_s or None):
                await call.context
        except TimeoutError:
            self._means.engine.cancel(call)
            raise GraphError(f"node '{node.name}' has not answered within {self._limit_s:g} s") from None
        except asyncio.CancelledError:
            self._means.engine.cancel(call)
            raise

    def _opened(self, call: SeldonCall, node: GraphNode, endpoint: Endpoint) -> tuple[int, Message]:
        """Return the status and message of an answer, and count the metrics it reported."""
        status, metrics, lines, body = read_answer(call.reply)
        if metrics:
            self._means.tell(node.model, endpoint, metrics)
        return status, Message(body, lines.partition(b"\r\n")[0] if lines else JSON)

    # -- predictions -------------------------------------------------------------------------------------------

    async def _through(self, node: GraphNode, message: Message) -> Message:
        message = await self._into(node, message)
        message = await self._children(node, message)
        if node.out and node.code is not None:
            message = await self.ask(node, Endpoint.TRANSFORM_OUTPUT, message)
        return message

    async def _into(self, node: GraphNode, message: Message) -> Message:
        if node.implementation == SIMPLE_MODEL:
            self._pass(node)
            return self._wire.write(builtin.predict(self._wire.read(message)))
        if node.into is None or node.implementation in BUILT_IN:
            return message
        self.routing[node.name] = ALL
        return await self.ask(node, node.into, message)

    async def _children(self, node: GraphNode, message: Message) -> Message:
        """Call the children that the node chooses, and merge their messages into one."""
        if not node.children:
            return message
        route = await self._route(node, message)
        if route == ABORT:
            self.routing[node.name] = ABORT
            return message
        chosen = node.children if route == ALL else (node.children[route],)
        answers = await _together([self._through(child, message) for child in chosen])
        self.routing[node.name] = route
        if node.implementation == AVERAGE:
            self._pass(node)
            size = sum(len(each.body) for each in answers)
            return await off_loop(size, _averaged, self._wire, answers)
        if node.aggregates and node.implementation not in BUILT_IN:
            self.routing[node.name] = ALL
            return await self.ask(node, Endpoint.AGGREGATE, self._wire.combined(answers))
        return answers[0]

    async def _route(self, node: GraphNode, message: Message) -> int:
        """Ask a router for the next child. Raises: GraphError if there is no such child."""
        if node.implementation in BUILT_IN:
            if node.implementation in (AVERAGE, SIMPLE_MODEL):
                return ALL
            self._pass(node)
            return builtin.route(node, self._means.chance)
        if not node.routes:
            return ALL
        try:
            route = self._wire.route(await self.ask(node, Endpoint.ROUTE, message))
        except NodeFailed as failed:
            # the only call whose error answer the executor did not pass on
            reason = self._wire.reason(failed.message)
            raise GraphError(f"node '{node.name}' could not say where to go: {reason}", failed.status) from None
        if not ABORT <= route < len(node.children):
            raise GraphError(f"node '{node.name}' chose child {route}, and has {len(node.children)}")
        return route

    def _pass(self, node: GraphNode) -> None:
        self.path[node.name] = node.implementation

    # -- feedback ----------------------------------------------------------------------------------------------

    async def _back(self, node: GraphNode, message: Message, routing: object) -> Message:
        """Send it to the children on the request's way first, then to the node itself."""
        if node.children:
            said = routing.get(node.name, ALL) if isinstance(routing, dict) else ALL
            route = said if isinstance(said, int) else ALL
            if not ABORT <= route < len(node.children):
                raise GraphError(f"feedback: child {route} of node '{node.name}', which has {len(node.children)}")
            chosen: Sequence[GraphNode] = ()
            if route != ABORT:
                chosen = node.children if route == ALL else (node.children[route],)
            await _together([self._back(child, message, routing) for child in chosen])
        if not node.takes_feedback or node.code is None:
            return message
        return await self.ask(node, Endpoint.FEEDBACK, message)


def _averaged(wire: MessageCodec, messages: Sequence[Message]) -> Message:
    return wire.write(builtin.average([wire.read(each) for each in messages]))


async def _together(works: Sequence[object]) -> list[Message]:
    """Wait for all concurrently, then raise the first one's error, if any failed."""
    if len(works) == 1:
        return [await works[0]]  # type: ignore[misc]
    answers = await asyncio.gather(*works, return_exceptions=True)  # type: ignore[call-overload]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[no-any-return]


def model_of(engine: ServingEngine, node: GraphNode) -> Model:
    """Return a node's model. Raises: InferError (NOT_READY)."""
    return get_model(engine, node.model, f"node '{node.name}'")
