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
from penstock.server.errors import GRPC_STATUS, pushback_ms, shorten
from penstock.server.grpc.method import Call, Method, Status
from penstock.server.seldon.protos import message_class
from penstock.server.v2.rpc.calls import Tasks, client_error, parse_message

from . import routes
from .message_codecs import GraphError, Message, ProtoCodec, new_puid
from .metadata import NoMetadataError, graph_metadata, metadata_of
from .metrics import GRPC_CODES
from .routes import GraphRoute
from .walk import NodeFailed, Walk

if TYPE_CHECKING:
    from .graph import Graph
    from .nodes import Predictor

SERVICE = "/seldon.protos.Seldon/"
_PREDICT, _FEEDBACK = GraphRoute(routes.PREDICTIONS), GraphRoute(routes.FEEDBACK)
_PUID = "seldon-puid"
_GRAPH_ERRORS = (GraphError, NoMetadataError)


class GraphRpcs:
    """Answers for the graph of one server; a client's cancellation cancels the work. Threads: the event loop's."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._tasks = Tasks()
        self._codec = ProtoCodec()

    def methods(self) -> dict[str, Method]:
        """Return the RPCs by path."""
        unary = {
            "Predict": partial(self._start, "Predict", self._predict),
            "SendFeedback": partial(self._start, "SendFeedback", self._feedback),
            "ModelMetadata": partial(self._answer_metadata, self._model_metadata),
            "GraphMetadata": partial(self._answer_metadata, self._graph_metadata),
        }
        return {SERVICE + name: Method(SERVICE + name, answer) for name, answer in unary.items()}

    # -- walks -------------------------------------------------------------------------------------------------

    def _start(self, name: str, work: _Work, call: Call, message: bytes) -> None:
        self._tasks.start(call, partial(self._run, SERVICE + name, work, call, Message(message)), "a graph's call")

    async def _run(self, path: str, work: _Work, call: Call, message: Message) -> None:
        started_ns, status, predictor = time.monotonic_ns(), Status.OK, self._graph.first_predictor
        try:
            route = _PREDICT if work == self._predict else _FEEDBACK
            predictor = await self._graph.choose_predictor(route, message, self._codec)
            answer = await work(predictor, call, message)
            call.on_cancel = None
            call.answer(answer.body)
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever it is
            call.on_cancel = None
            status, text, retry_ms = _error_status(error)
            call.abort(status, text, retry_ms)
        duration_ns = time.monotonic_ns() - started_ns
        self._graph.metrics.count_request(predictor, path, "unary", GRPC_CODES[status], duration_ns)

    async def _predict(self, predictor: Predictor, call: Call, message: Message) -> Message:
        puid = call.metadata.get(_PUID, "") or new_puid()
        self._graph.shadow(message, puid, self._codec)
        return await self._walk(predictor).predict(message, puid)

    async def _feedback(self, predictor: Predictor, call: Call, message: Message) -> Message:
        answer = await self._walk(predictor).feedback(message)
        # the executor returned an empty message if the first node takes no feedback
        return Message(b"") if answer is message else answer

    def _walk(self, predictor: Predictor) -> Walk:
        return Walk(self._graph.context, predictor, self._codec)

    # -- metadata ----------------------------------------------------------------------------------------------

    @staticmethod
    def _answer_metadata(work: Callable[[bytes], Any], call: Call, message: bytes) -> None:
        try:
            call.answer(work(message).SerializeToString())
        except (*_GRAPH_ERRORS, json_format.ParseError) as error:
            call.abort(Status.UNKNOWN, str(error))

    def _model_metadata(self, message: bytes) -> Any:
        name = parse_message(message_class("SeldonModelMetadataRequest"), message).name
        node = self._graph.deployment.find(name)
        if node is None:
            raise GraphError(f"there is no node '{name}'")
        try:
            return _make_message("SeldonModelMetadata", metadata_of(node, self._graph.descriptions))
        except NoMetadataError:
            return _make_message("SeldonModelMetadata", {})  # as the node itself answers

    def _graph_metadata(self, message: bytes) -> Any:
        found = graph_metadata(self._graph.first_predictor, self._graph.descriptions)
        tensors = {"inputs": found["graphinputs"], "outputs": found["graphoutputs"]}
        tensors = {key: value for key, value in tensors.items() if value}
        return _make_message("SeldonGraphMetadata", {"name": found["name"], "models": found["models"], **tensors})


_Work = Callable[["Predictor", Call, Message], Awaitable[Message]]


def _make_message(kind: str, fields: dict[str, Any]) -> Any:
    return json_format.ParseDict(fields, message_class(kind)(), ignore_unknown_fields=True)


def _error_status(error: Exception) -> tuple[Status, str, int]:
    """Return the status, the text, and the retry delay; for a failed node, its own status and text."""
    if isinstance(error, NodeFailed):
        return Status(error.status), error.message.body.decode("utf-8", "replace"), 0
    if isinstance(error, _GRAPH_ERRORS):
        return Status.UNKNOWN, str(error), 0
    server_error: InferError = client_error(error, "a graph's call")
    return GRPC_STATUS[server_error.code], shorten(server_error.message), pushback_ms(server_error)
