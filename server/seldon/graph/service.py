"""GraphService: the Service that answers for a graph on the fast lane, ahead of the v2 protocol's. Made by dialect.py.

Each request that calls nodes is a task, which walks the graph. If its client disconnects, the task is cancelled, and
its waiting calls with it.
Source: Seldon Core 1.17.1, the executor, by observed behavior.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from penstock.backends.errors import Code, InferError
from penstock.server.answering import clear_task, internal_error, read_compressed
from penstock.server.carrying.service import CarryingService
from penstock.server.errors import HTTP_STATUS, retry_after_line
from penstock.server.http.head import HttpError
from penstock.server.seldon.messages import Endpoint
from penstock.server.seldon.pages import JSON, NO_METADATA
from penstock.server.seldon.paths import is_penstock_path, split_target

from . import routes
from .message_codecs import PUID, GraphError, JsonCodec, Message, new_puid
from .metadata import NoMetadataError, graph_metadata, page_of
from .walk import NodeFailed, Walk, model_of

if TYPE_CHECKING:
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.limits import Limits
    from penstock.server.http.service import Service

    from .graph import Graph
    from .nodes import Deployment

TEXT = b"text/plain; charset=utf-8"
LINES = (
    b"x-content-type-options: nosniff\r\naccess-control-allow-origin: *\r\n"
    b"access-control-allow-methods: GET, OPTIONS, POST\r\naccess-control-allow-headers: Accept, Accept-Encoding, "
    b"Authorization, Content-Length, Content-Type, X-CSRF-Token\r\n"
)
"""The header lines of all answers at URLs that exist."""
NOT_FOUND = b"404 page not found\n"
_CATEGORIES = {
    **dict.fromkeys((routes.READY, routes.LIVE, routes.PING, routes.STATUS), "health"),
    **dict.fromkeys((routes.METADATA, routes.GRAPH), "metadata"),
}
_CODINGS = (b"gzip", b"deflate")


class GraphClaim:
    """What a request head says. Cached with the head's bytes. `header_lines` are the answer's, except its id."""

    lookup = None
    """The nodes that a request will reach are not known yet, so none of them can reject it early."""
    __slots__ = (
        "coding", "content_type", "deployment", "fields", "header_lines", "method", "path", "puid", "request_id",
        "route",
    )  # fmt: skip

    def __init__(self, head: Head, path: bytes) -> None:
        header = head.header
        self.method = head.method
        self.fields = head.fields
        self.path = path
        self.deployment: Deployment | None = None
        self.route: routes.GraphRoute | None = None
        kind = header.get(b"content-type", b"")
        self.content_type = JSON if kind.partition(b";")[0].strip().lower() == JSON else kind
        coding = header.get(b"content-encoding", b"").strip().lower()
        self.coding = coding if coding in _CODINGS else b""
        self.puid = header.get(PUID.encode(), b"").decode("latin-1")
        self.request_id = header.get(b"x-request-id", b"").decode("latin-1")[:128]
        self.header_lines = LINES
        if b"ce-specversion" in header:
            self.header_lines += b"ce-specversion: 0.3\r\nce-path: %b\r\n" % path.replace(b"\r", b"").replace(
                b"\n", b""
            )

    def resolve(self, deployment: Deployment) -> None:
        """Find the path's purpose, which may change when the file is read again."""
        self.deployment = deployment
        self.route = routes.find(self.path, deployment.name, deployment.namespace)


class GraphService(CarryingService[GraphClaim]):
    """Answers for the graph of one server. `fallback` answers Penstock's own paths. Threads: the event loop's."""

    claim_type = GraphClaim

    def __init__(self, graph: Graph, fallback: Service, limits: Limits) -> None:
        super().__init__(graph.context.engine, fallback)
        self._graph = graph
        self._limits = limits

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path except Penstock's own."""
        path, _ = split_target(head.path, head.query)
        if is_penstock_path(path):
            return self.fallback.claim(head)
        claim = GraphClaim(head, path)
        claim.resolve(self._graph.deployment)
        purpose = claim.route.purpose if claim.route is not None else ""
        self.restricted.require(_CATEGORIES.get(purpose, "inference"), head.header)
        return claim

    def answer(self, connection: FastLane, claim: GraphClaim, body: bytes) -> None:
        """Answer one request, or start to."""
        if claim.deployment is not self._graph.deployment:
            claim.resolve(self._graph.deployment)
        route = claim.route
        if route is None:
            connection.answer(404, NOT_FOUND, TEXT, b"x-content-type-options: nosniff\r\n")
        elif route.methods and claim.method not in route.methods:
            connection.answer(405, b"", TEXT)
        elif claim.method == b"OPTIONS":
            _send_answer(connection, claim, claim.puid, 200, Message(b"", TEXT))
        elif route.purpose in routes.NODE_CALLS:
            connection.task = connection.loop.create_task(self._run(connection, claim, route, body))
        else:
            _send_answer(connection, claim, claim.puid or new_puid(), *self._page(route))

    def answer_failure(self, connection: FastLane, claim: GraphClaim, error: InferError) -> None:
        """Answer with an error of the server's own."""
        _send_answer(connection, claim, "", *_error_answer(error))

    def log_internal_error(self, claim: GraphClaim, error: Exception) -> InferError:
        """Log a failure under the client's request id, if it sent one."""
        return internal_error(error, "graph", claim.request_id)

    # -- walks -------------------------------------------------------------------------------------------------

    async def _run(self, connection: FastLane, claim: GraphClaim, route: routes.GraphRoute, body: bytes) -> None:
        started_ns, puid = time.monotonic_ns(), claim.puid or new_puid()
        predictor, retry_line, codec = self._graph.first_predictor, b"", JsonCodec(claim.fields, puid)
        try:
            message = Message(await self._decompress(claim, body), claim.content_type)
            predictor = await self._graph.choose_predictor(route, message, codec)
            if route.purpose == routes.PREDICTIONS:
                self._graph.shadow(message, puid, codec)
            walk = Walk(self._graph.context, predictor, codec)
            status, answer = 200, await self._answer_message(walk, route, message, puid)
        except NodeFailed as failed:
            # a component may raise a status that cannot end an answer
            status, answer = (failed.status if 200 <= failed.status <= 999 else 500), failed.message
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever it is
            is_expected = isinstance(error, GraphError | NoMetadataError | InferError | HttpError)
            status, answer, retry_line = _error_answer(error if is_expected else self.log_internal_error(claim, error))
        clear_task(connection)
        _send_answer(connection, claim, puid, status, answer, retry_line)
        method, duration_ns = claim.method.decode("latin-1").lower(), time.monotonic_ns() - started_ns
        self._graph.metrics.count_request(predictor, route.purpose, method, str(status), duration_ns)

    async def _decompress(self, claim: GraphClaim, body: bytes) -> bytes:
        return await read_compressed(body, claim.coding, self._limits, bytes) if claim.coding else body

    async def _answer_message(self, walk: Walk, route: routes.GraphRoute, message: Message, puid: str) -> Message:
        if route.purpose == routes.PREDICTIONS:
            return await walk.predict(message, puid)
        if route.purpose == routes.FEEDBACK:
            return await walk.feedback(message)
        node = self._graph.deployment.find(route.node)
        if node is None:
            raise GraphError(f"there is no node '{route.node}'")
        if route.purpose == routes.METADATA:
            try:
                return Message(page_of(node, self._graph.descriptions))
            except NoMetadataError:
                raise NodeFailed(node.name, 500, Message(NO_METADATA)) from None
        if node.code is None:
            return JsonCodec().write({"meta": {}, "strData": "healthy"})
        description = self._graph.descriptions.get(node.model)
        if description is not None and description.health and model_of(self._graph.context.engine, node).healthy:
            return Message(description.health.encode())
        return await walk.call_node(node, Endpoint.HEALTH, Message(b""))

    # -- everything else ---------------------------------------------------------------------------------------

    def _page(self, route: routes.GraphRoute) -> tuple[int, Message]:
        if route.purpose == routes.READY:
            return (200 if self._graph.ready() else 503), Message(b"", TEXT)
        if route.purpose == routes.LIVE:
            return 200, Message(b"", TEXT)
        if route.purpose == routes.PING:
            return 200, Message(b"pong", TEXT)
        try:
            metadata = graph_metadata(self._graph.first_predictor, self._graph.descriptions)
        except NoMetadataError as error:
            return _error_answer(error)[:2]
        return 200, Message(json.dumps(metadata, separators=(",", ":"), ensure_ascii=False).encode())


def _send_answer(
    connection: FastLane, claim: GraphClaim, puid: str, status: int, message: Message, retry_line: bytes = b""
) -> None:
    """Send an answer. `<`, `>` and `&` are escaped, as in the original, for browsers that take JSON for a page."""
    body = message.body
    for char, escaped in ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026")):
        if char in body and message.content_type == JSON:
            body = body.replace(char, escaped)
    extra = claim.header_lines + retry_line
    if puid:
        encoded_puid = puid.encode("latin-1", "replace")
        extra += b"seldon-puid: %b\r\n" % encoded_puid
        if b"ce-specversion" in claim.header_lines and claim.deployment is not None:
            name, namespace = claim.deployment.name.encode(), claim.deployment.namespace.encode()
            extra += b"ce-id: %b\r\nce-type: seldon.%b.%b.response\r\nce-source: seldon.%b\r\n" % (
                encoded_puid, name, namespace, name,
            )  # fmt: skip
    connection.answer(status, body, message.content_type or TEXT, extra)


def _error_answer(error: Exception) -> tuple[int, Message, bytes]:
    """Return the status, the body and further header lines of the orchestrator's own errors."""
    status, retry_line = 500, b""
    if isinstance(error, InferError):
        # an unreachable node was a 500; one that is only overloaded or not ready says so
        status = HTTP_STATUS[error.code] if error.code in (Code.OVERLOADED, Code.EXPIRED, Code.NOT_READY) else 500
        retry_line = retry_after_line(error)
    elif isinstance(error, GraphError | HttpError):
        status = error.status
    status_body = {"code": status, "info": str(getattr(error, "message", error)), "status": "FAILURE"}
    return (
        status,
        Message(json.dumps({"status": status_body}, separators=(",", ":"), ensure_ascii=False).encode()),
        retry_line,
    )
