"""GraphRoutes: the purpose of each URL of a graph's server, with or without an ingress's prefix. Pure.

Source: Seldon Core 1.17.1, the executor's routes; `/ping` was the engine's.
"""

from __future__ import annotations

from typing import NamedTuple

PREDICTIONS, FEEDBACK, STATUS, METADATA, GRAPH = "predictions", "feedback", "status", "metadata", "graph"
READY, LIVE, PING = "ready", "live", "ping"
NODE_CALLS = (PREDICTIONS, FEEDBACK, STATUS, METADATA)
"""The purposes that call nodes. Metrics use these words for the service; GRAPH counts as metadata."""
_POST, _GET, _ANY = (b"POST", b"OPTIONS"), (b"GET", b"OPTIONS"), ()
_VERSIONS = (b"v1.0", b"v0.1")


class GraphRoute(NamedTuple):
    """The purpose of a path. `methods` are those it accepts, () for all. `node` is the node that the path names."""

    purpose: str
    methods: tuple[bytes, ...] = _ANY
    node: str = ""


_PROBES = {b"ready": GraphRoute(READY), b"live": GraphRoute(LIVE), b"ping": GraphRoute(PING)}


def find(path: bytes, deployment: str, namespace: str) -> GraphRoute | None:
    """Return the purpose of a decoded path; None if it has none.

    A path may begin with /seldon/NAMESPACE/DEPLOYMENT; any namespace is accepted for a deployment without one.
    """
    _, *parts = path.split(b"/")
    if parts[0] == b"seldon" and len(parts) > 3:
        requested_namespace, name = parts[1].decode("utf-8", "replace"), parts[2].decode("utf-8", "replace")
        if name != deployment or (namespace and requested_namespace != namespace):
            return None
        parts = parts[3:]
    if len(parts) == 1:
        return _PROBES.get(parts[0])
    if len(parts) < 3 or parts[0] != b"api" or parts[1] not in _VERSIONS:
        return None
    word = parts[2].decode("utf-8", "replace")
    if len(parts) == 3:
        if word in {PREDICTIONS, FEEDBACK}:
            return GraphRoute(word, _POST)
        return GraphRoute(GRAPH, _GET) if word == METADATA and parts[1] == b"v1.0" else None
    if len(parts) == 4 and word in {STATUS, METADATA}:
        return GraphRoute(word, _GET, parts[3].decode("utf-8", "replace"))
    return None
