"""Paths: the purpose of each URL of a component server. Called by `service.py`, once for each head. Pure.

Source: seldon-core 1.17.1 on Flask 2.2 and gunicorn 20.1, by observed behavior.
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from penstock.server.http.target import path_in

from .messages import Endpoint

PING, METADATA, OPENAPI = "ping", "metadata", "openapi"
"""What the server itself answers."""
NOT_FOUND, NOT_ALLOWED, OPTIONS = "not found", "not allowed", "options"
"""The other outcomes of a request."""
Purpose = Endpoint | str

_GET_METHODS, _CALL_METHODS, _POST_METHODS = (b"GET", b"HEAD"), (b"GET", b"POST", b"HEAD"), (b"POST",)


class SeldonRoute(NamedTuple):
    """The purpose of a path, and its methods."""

    purpose: Purpose
    methods: tuple[bytes, ...]


_ROUTES = {
    b"/predict": SeldonRoute(Endpoint.PREDICT, _CALL_METHODS),
    b"/api/v1.0/predictions": SeldonRoute(Endpoint.PREDICT, _POST_METHODS),
    b"/api/v0.1/predictions": SeldonRoute(Endpoint.PREDICT, _POST_METHODS),
    b"/send-feedback": SeldonRoute(Endpoint.FEEDBACK, _CALL_METHODS),
    b"/api/v1.0/feedback": SeldonRoute(Endpoint.FEEDBACK, _POST_METHODS),
    b"/api/v0.1/feedback": SeldonRoute(Endpoint.FEEDBACK, _POST_METHODS),
    b"/transform-input": SeldonRoute(Endpoint.TRANSFORM_INPUT, _CALL_METHODS),
    b"/transform-output": SeldonRoute(Endpoint.TRANSFORM_OUTPUT, _CALL_METHODS),
    b"/route": SeldonRoute(Endpoint.ROUTE, _CALL_METHODS),
    b"/aggregate": SeldonRoute(Endpoint.AGGREGATE, _CALL_METHODS),
    b"/health/status": SeldonRoute(Endpoint.HEALTH, _GET_METHODS),
    b"/api/v1.0/health/status": SeldonRoute(Endpoint.HEALTH, _GET_METHODS),
    b"/health/ping": SeldonRoute(PING, _GET_METHODS),
    b"/metadata": SeldonRoute(METADATA, _GET_METHODS),
    b"/api/v1.0/metadata": SeldonRoute(METADATA, _GET_METHODS),
    b"/seldon.json": SeldonRoute(OPENAPI, _GET_METHODS),
}
_PENSTOCK_SEGMENTS = frozenset((b"v2", b"docs", b"openapi.json", b"metrics"))
"""The first segments of Penstock's own paths. The original has none of them."""


def split_target(path: bytes, query: bytes) -> tuple[bytes, bytes]:
    """Return the decoded path of a request and its query, from its target.

    Several leading slashes count as one. The fragment, from `#` on, is dropped.
    """
    path, fragment, _ = path.partition(b"#")
    query = b"" if fragment else query.partition(b"#")[0]
    return b"/" + unquote_to_bytes(path_in(path)).lstrip(b"/"), query


def is_penstock_path(path: bytes) -> bool:
    """Return whether a path belongs to Penstock's own protocol or its control plane."""
    return path.split(b"/", 2)[1] in _PENSTOCK_SEGMENTS


def purpose_of(method: bytes, path: bytes, *, strict: bool) -> Purpose:
    """Return the purpose of a request. `path` is decoded.

    The original serves a folder that does not exist at every path except `/`. A GET of an unknown path, or of a path
    that accepts only POST, is therefore not found; any other method is not allowed, and OPTIONS is answered. Unless
    `strict`, there is no such folder.
    """
    route = _ROUTES.get(path)
    if route is not None and method in route.methods:
        return route.purpose
    if (path == b"/" or method in _GET_METHODS) if strict else route is None:
        return NOT_FOUND
    return OPTIONS if method == b"OPTIONS" else NOT_ALLOWED


def methods_of(path: bytes, *, strict: bool) -> bytes:
    """Return the value of the Allow field of a path."""
    route = _ROUTES.get(path)
    methods = route.methods if route is not None else ()
    if strict:
        methods = (*methods, *(method for method in _GET_METHODS if method not in methods))
    return b", ".join((b"OPTIONS", *methods))
