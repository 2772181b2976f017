"""Claims: what a request head says, and the API it is for. Made by `service.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from penstock.server.http.coding import choose_coding

from .bodies import is_json
from .paths import ENDPOINT, CortexPaths, CortexRoute
from .prediction_metrics import ApiMetrics

if TYPE_CHECKING:
    from penstock.batching.model import Model
    from penstock.server.http.head import Head

    from .api import Api


class ServedApi:
    """One API, as requests reach it. `model` is valid while `generation` equals the Engine's."""

    __slots__ = ("api", "generation", "metrics", "model", "parameters")

    def __init__(self, api: Api, metrics: ApiMetrics) -> None:
        self.api = api
        self.metrics = metrics
        self.generation = -1
        self.model: Model | None = None
        self.parameters = {"tracked": True} if api.tracker is not None else {}


class CortexClaim:
    """What a request head says: the purpose of its path, and relevant header fields. Cached with the head's bytes.

    `served_api` is the API of a prediction, `parameters` are passed with it. `json`: the body is parsed.
    """

    __slots__ = (
        "accept",
        "coding",
        "json",
        "method",
        "parameters",
        "path",
        "paths",
        "request_id",
        "route",
        "served_api",
    )  # fmt: skip

    def __init__(self, head: Head, path: str) -> None:
        self.method = head.method
        self.path = path
        self.paths: CortexPaths | None = None
        self.route: CortexRoute | None = None
        self.served_api: ServedApi | None = None
        self.json = is_json(head.header.get(b"content-type", b""))
        self.coding = head.header.get(b"content-encoding", b"").strip().lower()
        self.accept = choose_coding(head.header.get(b"accept-encoding", b""))
        self.request_id = head.header.get(b"x-request-id", b"").decode("latin-1")[:128]
        self.parameters: dict[str, Any] = {"debug": True} if is_debug(head.query) else {}

    def resolve(self, paths: CortexPaths, served_api_of: Callable[[Api], ServedApi]) -> None:
        """Find the purpose of the path."""
        self.paths = paths
        self.route = route = paths.find(self.path)
        is_prediction = route is not None and route.purpose == ENDPOINT and self.method == b"POST"
        self.served_api = (
            served_api_of(route.api) if is_prediction and route is not None and route.api is not None else None
        )


def is_debug(query: bytes) -> bool:
    """Return whether a query requests that intermediate values be logged: its first `debug` is true, in any case."""
    if b"debug" not in query and b"%" not in query:
        return False
    fields = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return next((value.lower() == "true" for name, value in fields if name == "debug"), False)
