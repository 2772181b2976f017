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
from penstock.server.seldon.paths import is_ours, parted

from . import addresses
from .metadata import NotDescribedError, graph_metadata, page_of
from .walk import NodeFailed, Walk, model_of
from .wires import PUID, GraphError, JsonWire, Message, new_puid

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
    **dict.fromkeys((addresses.READY, addresses.LIVE, addresses.PING, addresses.STATUS), "health"),
    **dict.fromkeys((addresses.METADATA, addresses.GRAPH), "metadata"),
}
_CODINGS = (b"gzip", b"deflate")


class GraphClaim:
    """What a request head says. Cached with the head's bytes. `lines` are the answer's header lines except its id."""

    found = None
    """The nodes that a request will reach are not known yet, so none of them can turn it away."""
    __slots__ = (
        "address", "coding", "content_type", "deployment", "fields", "lines", "method", "path", "puid", "request_id",
    )  # fmt: skip

    def __init__(self, head: Head, path: bytes) -> None:
        header = head.header
        self.method = head.method
        self.fields = head.fields
        self.path = path
        self.deployment: Deployment | None = None
        self.address: addresses.GraphRoute | None = None
        kind = header.get(b"content-type", b"")
        self.content_type = JSON if kind.partition(b";")[0].strip().lower() == JSON else kind
        coding = header.get(b"content-encoding", b"").strip().lower()
        self.coding = coding if coding in _CODINGS else b""
        self.puid = header.get(PUID.encode(), b"").decode("latin-1")
        self.request_id = header.get(b"x-request-id", b"").decode("latin-1")[:128]
        self.lines = LINES
        if b"ce-specversion" in header:
            self.lines += b"ce-specversion: 0.3\r\nce-path: %b\r\n" % path.replace(b"\r", b"").replace(b"\n", b"")

    def resolve(self, deployment: Deployment) -> None:
        """Find the path's purpose, which may change when the file is read again."""
        self.deployment = deployment
        self.address = addresses.find(self.path, deployment.name, deployment.namespace)


class GraphService(CarryingService):
    """Answers for the graph of one server. `others` answers Penstock's own paths. Threads: the event loop's."""

    claims = GraphClaim

    def __init__(self, graph: Graph, others: Service, limits: Limits) -> None:
        super().__init__(graph.means.engine, others)
        self._graph = graph
        self._limits = limits

    # -- the Service -------------------------------------------------------------------------------------------

    def claim(self, head: Head) -> Any:
        """Claim every path except Penstock's own."""
        path, _ = parted(head.path, head.query)
        if is_ours(path):
            return self.others.claim(head)
        claim = GraphClaim(head, path)
        claim.resolve(self._graph.deployment)
        purpose = claim.address.purpose if claim.address is not None else ""
        self.restricted.require(_CATEGORIES.get(purpose, "inference"), head.header)
        return claim

    def answer(self, connection: FastLane, claim: Any, body: bytes) -> None:
        """Answer one request, or start to."""
        if claim.deployment is not self._graph.deployment:
            claim.resolve(self._graph.deployment)
        address = claim.address
        if address is None:
            connection.answer(404, NOT_FOUND, TEXT, b"x-content-type-options: nosniff\r\n")
        elif address.methods and claim.method not in address.methods:
            connection.answer(405, b"", TEXT)
        elif claim.method == b"OPTIONS":
            _answer(connection, claim, claim.puid, 200, Message(b"", TEXT))
        elif address.purpose in addresses.CALLED:
            connection.task = connection.loop.create_task(self._run(connection, claim, address, body))
        else:
            _answer(connection, claim, claim.puid or new_puid(), *self._page(address))

    def answer_failure(self, connection: FastLane, claim: Any, error: InferError) -> None:
        """Answer with an error of the server's own."""
        _answer(connection, claim, "", *_refusal(error))

    def trouble(self, claim: Any, error: Exception) -> InferError:
        """Log a failure under the client's request id, if it sent one."""
        return internal_error(error, "graph", claim.request_id)

    # -- walks -------------------------------------------------------------------------------------------------

    async def _run(self, connection: FastLane, claim: GraphClaim, address: addresses.GraphRoute, body: bytes) -> None:
        began_ns, puid = time.monotonic_ns(), claim.puid or new_puid()
        predictor, again, wire = self._graph.first, b"", JsonWire(claim.fields, puid)
        try:
            message = Message(await self._decoded(claim, body), claim.content_type)
            predictor = await self._graph.chosen(address, message, wire)
            if address.purpose == addresses.PREDICTIONS:
                self._graph.shadow(message, puid, wire)
            walk = Walk(self._graph.means, predictor, wire)
            status, answer = 200, await self._answered(walk, address, message, puid)
        except NodeFailed as failed:
            # a component may raise a status that cannot end an answer
            status, answer = (failed.status if 200 <= failed.status <= 999 else 500), failed.message
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever it is
            known = isinstance(error, GraphError | NotDescribedError | InferError | HttpError)
            status, answer, again = _refusal(error if known else self.trouble(claim, error))
        clear_task(connection)
        _answer(connection, claim, puid, status, answer, again)
        method, spent_ns = claim.method.decode("latin-1").lower(), time.monotonic_ns() - began_ns
        self._graph.counted.request(predictor, address.purpose, method, str(status), spent_ns)

    async def _decoded(self, claim: GraphClaim, body: bytes) -> bytes:
        return await read_compressed(body, claim.coding, self._limits, bytes) if claim.coding else body

    async def _answered(self, walk: Walk, address: addresses.GraphRoute, message: Message, puid: str) -> Message:
        if address.purpose == addresses.PREDICTIONS:
            return await walk.predict(message, puid)
        if address.purpose == addresses.FEEDBACK:
            return await walk.feedback(message)
        node = self._graph.deployment.find(address.node)
        if node is None:
            raise GraphError(f"there is no node '{address.node}'")
        if address.purpose == addresses.METADATA:
            try:
                return Message(page_of(node, self._graph.described))
            except NotDescribedError:
                raise NodeFailed(node.name, 500, Message(NO_METADATA)) from None
        if node.code is None:
            return JsonWire().write({"meta": {}, "strData": "healthy"})
        described = self._graph.described.get(node.model)
        if described is not None and described.health and model_of(self._graph.means.engine, node).healthy:
            return Message(described.health.encode())
        return await walk.ask(node, Endpoint.HEALTH, Message(b""))

    # -- everything else ---------------------------------------------------------------------------------------

    def _page(self, address: addresses.GraphRoute) -> tuple[int, Message]:
        if address.purpose == addresses.READY:
            return (200 if self._graph.ready() else 503), Message(b"", TEXT)
        if address.purpose == addresses.LIVE:
            return 200, Message(b"", TEXT)
        if address.purpose == addresses.PING:
            return 200, Message(b"pong", TEXT)
        try:
            found = graph_metadata(self._graph.first, self._graph.described)
        except NotDescribedError as error:
            return _refusal(error)[:2]
        return 200, Message(json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode())


def _answer(
    connection: FastLane, claim: GraphClaim, puid: str, status: int, message: Message, again: bytes = b""
) -> None:
    """Send an answer. `<`, `>` and `&` are escaped, as in the original, for browsers that take JSON for a page."""
    body = message.body
    for sign, escaped in ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026")):
        if sign in body and message.content_type == JSON:
            body = body.replace(sign, escaped)
    extra = claim.lines + again
    if puid:
        said = puid.encode("latin-1", "replace")
        extra += b"seldon-puid: %b\r\n" % said
        if b"ce-specversion" in claim.lines and claim.deployment is not None:
            name, place = claim.deployment.name.encode(), claim.deployment.namespace.encode()
            extra += b"ce-id: %b\r\nce-type: seldon.%b.%b.response\r\nce-source: seldon.%b\r\n" % (
                said, name, place, name,
            )  # fmt: skip
    connection.answer(status, body, message.content_type or TEXT, extra)


def _refusal(error: Exception) -> tuple[int, Message, bytes]:
    """Return the status, the body and further header lines of the orchestrator's own errors."""
    status, again = 500, b""
    if isinstance(error, InferError):
        # an unreachable node was a 500; one that is only overloaded or not ready says so
        status = HTTP_STATUS[error.code] if error.code in (Code.OVERLOADED, Code.EXPIRED, Code.NOT_READY) else 500
        again = retry_after_line(error)
    elif isinstance(error, GraphError | HttpError):
        status = error.status
    said = {"code": status, "info": str(getattr(error, "message", error)), "status": "FAILURE"}
    return status, Message(json.dumps({"status": said}, separators=(",", ":"), ensure_ascii=False).encode()), again
