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
from .message_codecs import GraphError, Message, MessageCodec, WalkRecord
from .nodes import AVERAGE, BUILT_IN, SIMPLE_MODEL, GraphNode, MetaMode, Predictor

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
class WalkContext:
    """What all walks of a server share. `report_metrics` takes the model, endpoint and metrics that a call reported.

    `count_call` takes each call's predictor, node, endpoint, status (-1 if none arrived) and nanoseconds. By model,
    `sharing` makes calls that may share batches, and `descriptions` has what a worker reported about its node.
    """

    engine: ServingEngine
    report_metrics: Callable[[str, Endpoint, bytes], None] = lambda model, endpoint, metrics: None
    count_call: Callable[[Predictor, GraphNode, Endpoint, int, int], None] = lambda *of_a_call: None
    sharing: Mapping[str, Sharing] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.Random)
    descriptions: Mapping[str, ComponentDescription] = field(default_factory=dict)


class Walk:
    """One request. `routing` has the child that each node chose so far, `path` the images of the nodes it passed."""

    def __init__(self, context: WalkContext, predictor: Predictor, codec: MessageCodec) -> None:
        self._context = context
        self._predictor = predictor
        self._codec = codec
        self._limit_s = codec.limit_s(predictor)
        self.routing: dict[str, int] = {}
        self.path: dict[str, str] = {}

    async def predict(self, message: Message, puid: str) -> Message:
        """Answer a request. Raises: NodeFailed, GraphError, InferError."""
        answer = await self._predict_from(self._predictor.graph, message)
        meta_mode = self._predictor.meta_mode
        if meta_mode is MetaMode.NONE:
            return answer
        record = WalkRecord(self.routing, self.path, puid)
        return await off_loop(len(answer.body), self._codec.add_meta, answer, record, meta_mode)

    async def feedback(self, message: Message) -> Message:
        """Send feedback to the nodes that its request passed. Raises: as `predict`."""
        routing = await off_loop(len(message.body), self._codec.routing, message)
        return await self._send_feedback(self._predictor.graph, message, routing)

    async def call_node(self, node: GraphNode, endpoint: Endpoint, message: Message) -> Message:
        """Call one node. Raises: as `predict`."""
        self.path[node.name] = node.image or UNSET_IMAGE
        model = model_of(self._context.engine, node)
        sharing, description = self._context.sharing.get(node.model), self._context.descriptions.get(node.model)
        with_headers = (
            sharing is None
            and description is not None
            and description.reads_request
            and endpoint is not Endpoint.HEALTH
        )
        payload_kind, payload = self._codec.payload(message, with_headers=with_headers)
        if sharing is None:
            call = SeldonCall(model, endpoint, payload_kind, payload, FUTURES)
        else:
            call = await off_loop(len(payload), sharing.make_call, model, endpoint, payload_kind, payload, FUTURES)
        call.context = asyncio.get_running_loop().create_future()
        started_ns, status = time.monotonic_ns(), -1
        try:
            self._context.engine.submit(call)
            await self._await_answer(call, node)
            status, answer = self._read_answer(call, node, endpoint)
        finally:
            self._context.count_call(self._predictor, node, endpoint, status, time.monotonic_ns() - started_ns)
        if status != self._codec.ok_status:
            raise NodeFailed(node.name, status, answer)
        return answer

    async def _await_answer(self, call: SeldonCall, node: GraphNode) -> None:
        """Wait for an answer; cancel the call if its client is gone or the time limit is reached."""
        try:
            async with asyncio.timeout(self._limit_s or None):
                await call.context
        except TimeoutError:
            self._context.engine.cancel(call)
            raise GraphError(f"node '{node.name}' did not answer within {self._limit_s:g} s") from None
        except asyncio.CancelledError:
            self._context.engine.cancel(call)
            raise

    def _read_answer(self, call: SeldonCall, node: GraphNode, endpoint: Endpoint) -> tuple[int, Message]:
        """Return the status and message of an answer, and count the metrics it reported."""
        status, metrics, lines, body = read_answer(call.reply)
        if metrics:
            self._context.report_metrics(node.model, endpoint, metrics)
        return status, Message(body, lines.partition(b"\r\n")[0] if lines else JSON)

    # -- predictions -------------------------------------------------------------------------------------------

    async def _predict_from(self, node: GraphNode, message: Message) -> Message:
        message = await self._transform_input(node, message)
        message = await self._call_children(node, message)
        if node.transforms_output and node.code is not None:
            message = await self.call_node(node, Endpoint.TRANSFORM_OUTPUT, message)
        return message

    async def _transform_input(self, node: GraphNode, message: Message) -> Message:
        if node.implementation == SIMPLE_MODEL:
            self._record_builtin(node)
            return await off_loop(len(message.body), _predict_simple, self._codec, message)
        if node.input_endpoint is None or node.implementation in BUILT_IN:
            return message
        self.routing[node.name] = ALL
        return await self.call_node(node, node.input_endpoint, message)

    async def _call_children(self, node: GraphNode, message: Message) -> Message:
        """Call the children that the node chooses, and merge their messages into one."""
        if not node.children:
            return message
        route = await self._choose_child(node, message)
        if route == ABORT:
            self.routing[node.name] = ABORT
            return message
        chosen = node.children if route == ALL else (node.children[route],)
        answers = await _gather([self._predict_from(child, message) for child in chosen])
        self.routing[node.name] = route
        if node.implementation == AVERAGE:
            self._record_builtin(node)
            size = sum(len(each.body) for each in answers)
            return await off_loop(size, _average, self._codec, answers)
        if node.is_combiner and node.implementation not in BUILT_IN:
            self.routing[node.name] = ALL
            return await self.call_node(node, Endpoint.AGGREGATE, self._codec.combine(answers))
        return answers[0]

    async def _choose_child(self, node: GraphNode, message: Message) -> int:
        """Ask a router for the next child. Raises: GraphError if there is no such child."""
        if node.implementation in BUILT_IN:
            if node.implementation in (AVERAGE, SIMPLE_MODEL):
                return ALL
            self._record_builtin(node)
            return builtin.route(node, self._context.rng)
        if not node.is_router:
            return ALL
        try:
            route = self._codec.route(await self.call_node(node, Endpoint.ROUTE, message))
        except NodeFailed as failed:
            # the only call whose error answer the executor did not pass on
            reason = self._codec.reason(failed.message)
            raise GraphError(f"node '{node.name}' did not choose a child: {reason}", failed.status) from None
        if not ABORT <= route < len(node.children):
            raise GraphError(f"node '{node.name}' chose child {route}, but has {_children(node)}")
        return route

    def _record_builtin(self, node: GraphNode) -> None:
        self.path[node.name] = node.implementation

    # -- feedback ----------------------------------------------------------------------------------------------

    async def _send_feedback(self, node: GraphNode, message: Message, routing: object) -> Message:
        """Send it to the children on the request's way first, then to the node itself."""
        if node.children:
            chosen_route = routing.get(node.name, ALL) if isinstance(routing, dict) else ALL
            route = chosen_route if isinstance(chosen_route, int) else ALL
            if not ABORT <= route < len(node.children):
                raise GraphError(f"feedback is for child {route} of node '{node.name}', which has {_children(node)}")
            chosen: Sequence[GraphNode] = ()
            if route != ABORT:
                chosen = node.children if route == ALL else (node.children[route],)
            await _gather([self._send_feedback(child, message, routing) for child in chosen])
        if not node.takes_feedback or node.code is None:
            return message
        return await self.call_node(node, Endpoint.FEEDBACK, message)


def _children(node: GraphNode) -> str:
    count = len(node.children)
    return "1 child" if count == 1 else f"{count} children"


def _predict_simple(codec: MessageCodec, message: Message) -> Message:
    return codec.write(builtin.predict(codec.read(message)))


def _average(codec: MessageCodec, messages: Sequence[Message]) -> Message:
    return codec.write(builtin.average([codec.read(each) for each in messages]))


async def _gather(calls: Sequence[object]) -> list[Message]:
    """Wait for all concurrently, then raise the first one's error, if any failed."""
    if len(calls) == 1:
        return [await calls[0]]  # type: ignore[misc]
    answers = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[call-overload]
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[no-any-return]


def model_of(engine: ServingEngine, node: GraphNode) -> Model:
    """Return a node's model. Raises: InferError (NOT_READY)."""
    return get_model(engine, node.model, f"node '{node.name}'")
