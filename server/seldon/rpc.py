"""SeldonRpcs: the RPCs of seldon.protos, and the sink of their calls. Made by dialect.py, called by the gRPC lane.

A call is forwarded to its component unread, without logging or a task. With batching, the messages of Predict are
decoded here, large ones in a task.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf import json_format

from penstock.backends.errors import Code, InferError
from penstock.server.answering import LARGE_BYTES, off_loop
from penstock.server.grpc.method import Method, Status
from penstock.server.v2.rpc.calls import Tasks, abort, client_error

from .calls import SeldonCall
from .messages import Endpoint, PayloadKind, read_answer
from .protos import message_class

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.batching.model import Model
    from penstock.batching.request import InferRequest
    from penstock.server.engines import ServingEngine
    from penstock.server.grpc.method import Call, Unary

    from .batching import Sharing
    from .current_component import CurrentComponent
    from .exposition import Exposition

PACKAGE = "/seldon.protos."
RPCS: dict[str, Endpoint] = {
    "Generic/TransformInput": Endpoint.TRANSFORM_INPUT,
    "Generic/TransformOutput": Endpoint.TRANSFORM_OUTPUT,
    "Generic/Route": Endpoint.ROUTE,
    "Generic/Aggregate": Endpoint.AGGREGATE,
    "Generic/SendFeedback": Endpoint.FEEDBACK,
    "Model/Predict": Endpoint.PREDICT,
    "Model/SendFeedback": Endpoint.FEEDBACK,
    "Router/Route": Endpoint.ROUTE,
    "Router/SendFeedback": Endpoint.FEEDBACK,
    "Transformer/TransformInput": Endpoint.TRANSFORM_INPUT,
    "OutputTransformer/TransformOutput": Endpoint.TRANSFORM_OUTPUT,
    "Combiner/Aggregate": Endpoint.AGGREGATE,
    "Seldon/Predict": Endpoint.PREDICT,
    "Seldon/SendFeedback": Endpoint.FEEDBACK,
}
"""The Endpoint that each RPC calls. Every component answers all of them, whatever its type."""
METADATA = ("Model/Metadata", "Seldon/ModelMetadata")
GRAPH_METADATA = "Seldon/GraphMetadata"
CATEGORIES = {
    **{PACKAGE + path: "inference" for path in RPCS},
    **{PACKAGE + path: "metadata" for path in (*METADATA, GRAPH_METADATA)},
}
"""The categories by which access to the RPCs can be restricted."""
NO_GRAPH = "Exception calling application: GraphMetadata not available on the Model level."


class SeldonRpcs:
    """Answers for the one component of a server, which `current` finds.

    A call's deadline limits its time in the queue, and a client's cancellation removes it from there.
    Threads: the event loop's.
    """

    def __init__(self, engine: ServingEngine, current: CurrentComponent, exposition: Exposition) -> None:
        self._engine = engine
        self._current = current
        self._exposition = exposition
        self._tasks = Tasks()

    def methods(self) -> dict[str, Method]:
        """Return the RPCs by their paths."""
        unary: dict[str, Unary] = {path: partial(self.begin, endpoint) for path, endpoint in RPCS.items()}
        unary |= dict.fromkeys(METADATA, self.metadata)
        unary[GRAPH_METADATA] = self.graph_metadata
        return {PACKAGE + path: Method(PACKAGE + path, answer) for path, answer in unary.items()}

    def begin(self, endpoint: Endpoint, call: Call, message: bytes) -> None:
        """Submit one call. Raises: InferError."""
        model, sharing = self._current.find(), self._current.sharing
        if sharing is None or endpoint is not Endpoint.PREDICT:
            self._submit(call, SeldonCall(model, endpoint, PayloadKind.PROTO, message, self))
            return
        # the message is parsed here, so first reject a call that would be rejected whatever it contains
        refusal = self._engine.early_rejection(model)
        if refusal is not None:
            self._abort(call, refusal)
        elif len(message) < LARGE_BYTES:
            self._submit(call, sharing.make_call(model, endpoint, PayloadKind.PROTO, message, self))
        else:
            self._engine.hold(model)  # keeps this version loaded meanwhile
            task = self._tasks.start(call, partial(self._share_off_loop, model, sharing, call, message), "Predict")
            task.add_done_callback(lambda _: self._engine.release(model))

    def metadata(self, call: Call, message: bytes) -> None:
        """Answer with the component's metadata, or an empty message if it is invalid. The requested name is ignored."""
        description = self._current.description
        try:
            call.answer(metadata_message((description.metadata if description is not None else None) or {}))
        except json_format.ParseError:
            call.abort(Status.UNKNOWN, "Exception calling application: ")

    def graph_metadata(self, call: Call, message: bytes) -> None:
        """Report that a component has no graph."""
        call.abort(Status.UNKNOWN, NO_GRAPH)

    def _submit(self, call: Call, request: SeldonCall) -> None:
        request.context = call
        request.deadline_ns = call.deadline_ns
        call.on_cancel = partial(self._engine.cancel, request)
        try:
            self._engine.submit(request)
        except InferError as error:
            call.on_cancel = None
            self._abort(call, error)

    async def _share_off_loop(self, model: Model, sharing: Sharing, call: Call, message: bytes) -> None:
        """Decode on a thread what would block the event loop."""
        request = await off_loop(
            len(message), sharing.make_call, model, Endpoint.PREDICT, PayloadKind.PROTO, message, self
        )
        self._submit(call, request)  # a call that has ended meanwhile has cancelled this

    # -- the sink ----------------------------------------------------------------------------------------------

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        """Send the answers of one delivery."""
        for request in requests:
            call: Call = request.context
            # breaks a cycle: `on_cancel` holds the request, which holds the call
            call.on_cancel = None
            try:
                if request.error is not None:
                    self._abort(call, request.error)
                    continue
                # only SeldonCalls are submitted here
                reply: bytes = request.reply  # type: ignore[attr-defined]
                status, metrics, _, body = read_answer(reply)
                if metrics:
                    self._exposition.add(request.endpoint, metrics)  # type: ignore[attr-defined]
                if status:
                    call.abort(Status(status), body.decode("utf-8", "replace"))
                else:
                    call.answer(body)
            except Exception as error:  # noqa: BLE001 - one answer's failure must not take its batch mates' answers
                abort(call, client_error(error, "component"))

    @staticmethod
    def _abort(call: Call, error: InferError) -> None:
        if error.code is Code.EXPIRED:
            # its only deadline was the client's
            call.abort(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")
        else:
            abort(call, error)


def metadata_message(metadata: dict[str, Any]) -> bytes:
    """Encode a component's metadata as a SeldonModelMetadata; unknown fields are dropped. Raises: ParseError."""
    message = message_class("SeldonModelMetadata")()
    json_format.ParseDict(metadata, message, ignore_unknown_fields=True)
    return bytes(message.SerializeToString())
