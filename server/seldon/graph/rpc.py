"""GraphRpcs: the service `Seldon` of seldon.protos for a graph. Made by dialect.py, called by the gRPC lane.

Source: Seldon Core 1.17.1, the executor, which had no other service.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from penstock.backends.errors import InferError
from penstock.server.errors import GRPC_STATUS, pushback_ms
from penstock.server.grpc.method import Call, Method, Status
from penstock.server.seldon.protos import message_class
from penstock.server.v2.rpc.calls import Tasks, as_refusal, brief, parsed

from . import addresses
from .addresses import GraphRoute
from .metadata import NotDescribedError, graph_metadata, metadata_of
from .metrics import GRPC_CODES
from .walk import NodeFailed, Walk
from .wires import GraphError, Message, ProtoWire, new_puid

if TYPE_CHECKING:
    from .graph import Graph
    from .nodes import Predictor

SERVICE = "/seldon.protos.Seldon/"
_PREDICT, _FEEDBACK = GraphRoute(addresses.PREDICTIONS), GraphRoute(addresses.FEEDBACK)
_PUID = "seldon-puid"
_KNOWN = (GraphError, NotDescribedError)


class GraphRpcs:
    """Answers for the graph of one server; a client's cancellation cancels the work. Threads: the event loop's."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._tasks = Tasks()
        self._wire = ProtoWire()

    def methods(self) -> dict[str, Method]:
        """Return the RPCs by path."""
        unary = {
            "Predict": partial(self._begin, "Predict", self._predict),
            "SendFeedback": partial(self._begin, "SendFeedback", self._feedback),
            "ModelMetadata": partial(self._tell, self._model_metadata),
            "GraphMetadata": partial(self._tell, self._graph_metadata),
        }
        return {SERVICE + name: Method(SERVICE + name, answer) for name, answer in unary.items()}

    # -- walks -------------------------------------------------------------------------------------------------

    def _begin(self, name: str, work: _Work, call: Call, message: bytes) -> None:
        self._tasks.start(call, partial(self._run, SERVICE + name, work, call, Message(message)), "a graph's call")

    async def _run(self, path: str, work: _Work, call: Call, message: Message) -> None:
        began_ns, status, predictor = time.monotonic_ns(), Status.OK, self._graph.first
        try:
            address = _PREDICT if work == self._predict else _FEEDBACK
            predictor = await self._graph.chosen(address, message, self._wire)
            answer = await work(predictor, call, message)
            call.on_cancel = None
            call.answer(answer.body)
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever it is
            call.on_cancel = None
            status, text, again_ms = _refusal(error)
            call.abort(status, text, again_ms)
        spent_ns = time.monotonic_ns() - began_ns
        self._graph.counted.request(predictor, path, "unary", GRPC_CODES[status], spent_ns)

    async def _predict(self, predictor: Predictor, call: Call, message: Message) -> Message:
        puid = call.metadata.get(_PUID, "") or new_puid()
        self._graph.shadow(message, puid, self._wire)
        return await self._walk(predictor).predict(message, puid)

    async def _feedback(self, predictor: Predictor, call: Call, message: Message) -> Message:
        answer = await self._walk(predictor).feedback(message)
        # the executor returned an empty message if the first node takes no feedback
        return Message(b"") if answer is message else answer

    def _walk(self, predictor: Predictor) -> Walk:
        return Walk(self._graph.means, predictor, self._wire)

    # -- metadata ----------------------------------------------------------------------------------------------

    @staticmethod
    def _tell(work: Callable[[bytes], Any], call: Call, message: bytes) -> None:
        try:
            call.answer(work(message).SerializeToString())
        except (*_KNOWN, json_format.ParseError) as error:
            call.abort(Status.UNKNOWN, str(error))

    def _model_metadata(self, message: bytes) -> Any:
        name = parsed(message_class("SeldonModelMetadataRequest"), message).name
        node = self._graph.deployment.find(name)
        if node is None:
            raise GraphError(f"there is no node '{name}'")
        try:
            return _made("SeldonModelMetadata", metadata_of(node, self._graph.described))
        except NotDescribedError:
            return _made("SeldonModelMetadata", {})  # as the node itself answers

    def _graph_metadata(self, message: bytes) -> Any:
        found = graph_metadata(self._graph.first, self._graph.described)
        said = {"inputs": found["graphinputs"], "outputs": found["graphoutputs"]}
        said = {key: value for key, value in said.items() if value}
        return _made("SeldonGraphMetadata", {"name": found["name"], "models": found["models"], **said})


_Work = Callable[["Predictor", Call, Message], Awaitable[Message]]


def _made(kind: str, said: dict[str, Any]) -> Any:
    return json_format.ParseDict(said, message_class(kind)(), ignore_unknown_fields=True)


def _refusal(error: Exception) -> tuple[Status, str, int]:
    """Return the status, the text, and the retry delay; for a failed node, its own status and text."""
    if isinstance(error, NodeFailed):
        return Status(error.status), error.message.body.decode("utf-8", "replace"), 0
    if isinstance(error, _KNOWN):
        return Status.UNKNOWN, str(error), 0
    known: InferError = as_refusal(error, "a graph's call")
    return GRPC_STATUS[known.code], brief(known.message), pushback_ms(known)
