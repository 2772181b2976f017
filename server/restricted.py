"""Restricted APIs: groups of endpoints that require a certain request header.

Made by the composition root from --http-restricted-api and --grpc-restricted-protocol, one per protocol. Checked by the
fast lane once per remembered head, by the control plane's endpoints, and by gRPC methods.
Source: Triton server, restricted_features.h and command_line_parser.cc.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .grpc.method import Call, Method, Reader, Status
from .http.head import HttpError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

CATEGORIES = (
    "health", "metadata", "inference", "shared-memory", "model-config", "model-repository", "statistics", "trace",
    "logging",
)  # fmt: skip
GRPC_PREFIX = "triton-grpc-protocol-"
"""The prefix of a gRPC rule's key in the metadata."""

_FORM = "<category>[,<category>...]:<header>=<value>"
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")
_MODEL = r"/v2/models/[^/]+(?:/versions/[^/]+)?"
_PATHS = tuple(
    (re.compile(path), category)
    for path, category in (
        (r"/v2/health/.*", "health"),
        (_MODEL + "/ready", "health"),
        (r"/v2/models/stats|" + _MODEL + "/stats|/metrics", "statistics"),
        (_MODEL + "/config", "model-config"),
        (_MODEL + "/(?:infer|predict|generate|generate_stream)", "inference"),
        (r"/v2/repository/.*", "model-repository"),
        (r"/v2/(?:system|cuda)sharedmemory/.*", "shared-memory"),
        (r"/v2(?:/models/[^/]+)?/trace/setting", "trace"),
        (r"/v2/logging", "logging"),
        (r"/v2|" + _MODEL, "metadata"),
    )
)
TRITON_SERVICE = "/inference.GRPCInferenceService/"
"""What the paths of Triton's RPCs begin with."""
_RPCS = {
    "ServerLive": "health", "ServerReady": "health", "ModelReady": "health",
    "ServerMetadata": "metadata", "ModelMetadata": "metadata",
    "ModelInfer": "inference", "ModelStreamInfer": "inference",
    "ModelConfig": "model-config", "ModelStatistics": "statistics",
    "RepositoryIndex": "model-repository", "RepositoryModelLoad": "model-repository",
    "RepositoryModelUnload": "model-repository",
    "SystemSharedMemoryStatus": "shared-memory", "SystemSharedMemoryRegister": "shared-memory",
    "SystemSharedMemoryUnregister": "shared-memory", "CudaSharedMemoryStatus": "shared-memory",
    "CudaSharedMemoryRegister": "shared-memory", "CudaSharedMemoryUnregister": "shared-memory",
    "TraceSetting": "trace", "LogSettings": "logging",
}  # fmt: skip
GRPC_CATEGORIES: Mapping[str, str] = {
    **{TRITON_SERVICE + name: category for name, category in _RPCS.items()},
    "/grpc.health.v1.Health/Check": "health",
    "/grpc.health.v1.Health/Watch": "health",
}

HeaderOf = Callable[[str], str | None]


class RestrictedApis:
    """The rules of one protocol: by category, the required header and its value."""

    def __init__(self, rules: Mapping[str, tuple[str, str]] | None = None) -> None:
        self._rules = dict(rules or {})

    def __bool__(self) -> bool:
        """Whether anything is restricted."""
        return bool(self._rules)

    @classmethod
    def parse(cls, entries: Iterable[str], prefix: str = "") -> RestrictedApis:
        """Parse the flags. `prefix` is prepended to each header name.

        Raises: ValueError; its text never includes a value, which is a secret.
        """
        rules: dict[str, tuple[str, str]] = {}
        kind = "protocol" if prefix else "api"
        for entry in entries:
            names, colon, header_rule = entry.partition(":")
            key, equals, value = header_rule.partition("=")
            key, value = key.strip().lower(), value.strip()
            if not (colon and equals and key and value):
                raise ValueError(f"'{names}:{key}...' must have the form {_FORM}")
            if not (value.isascii() and value.isprintable()):
                raise ValueError(f"the value of header '{key}' has characters that a header cannot contain")
            if not _TOKEN.fullmatch(key):
                raise ValueError(f"'{key}' is not a valid header name")
            for name in names.split(","):
                name = name.strip()
                if name not in CATEGORIES:
                    raise ValueError(f"unknown restricted {kind} '{name}', known: {', '.join(CATEGORIES)}")
                if name in rules:
                    raise ValueError(f"{kind} '{name}' can not be specified in multiple config groups")
                rules[name] = (prefix + key, value)
        return cls(rules)

    def check(self, category: str, header_of: HeaderOf) -> str | None:
        """Return None if a request may pass, or the name of the required header.

        `header_of` returns a request header by its lower-case name. The comparison takes constant time.
        """
        rule = self._rules.get(category)
        if rule is None:
            return None
        name, value = rule
        given = header_of(name)
        if given is not None and hmac.compare_digest(given.encode("utf-8", "surrogatepass"), value.encode()):
            return None
        return name

    def require(self, category: str, fields: Mapping[bytes, bytes]) -> None:
        """Check a request of the fast lane by its header fields. Raises: HttpError (403)."""
        if category in self._rules:
            header = self.check(category, lambda name: fields.get(name.encode(), b"").decode("latin-1"))
            if header is not None:
                raise HttpError(403, restriction_text(header))


def category_of(path: str) -> str | None:
    """Return the category of an HTTP path or route pattern; None for pages that reveal nothing about models."""
    for pattern, category in _PATHS:
        if pattern.fullmatch(path):
            return category
    return None


def restriction_text(header: str) -> str:
    """Return the text of a 403 answer."""
    return f"This API is restricted, expecting header '{header}'"


def with_access_check(
    path: str, endpoint: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap a control plane endpoint with the check. `path` is its route's pattern.

    The check uses the route's pattern, so no spelling of a request path can avoid it. The rules are the application's
    `state.restricted`, if set.
    """
    category = category_of(path)
    if category is None:
        return endpoint

    # not imported at the top, because reading the settings does not need it
    from starlette.requests import Request
    from starlette.responses import Response

    from .errors import error_body

    async def checked(request: Request) -> Response:
        restricted = getattr(request.app.state, "restricted", None)
        header = restricted.check(category, request.headers.get) if restricted else None
        if header is not None:
            return Response(error_body(restriction_text(header)), 403, media_type="application/json")
        return await endpoint(request)

    # read by FastAPI: annotations, resolved by name in this module, and the name and description for the page
    checked.__annotations__ = {"request": Request, "return": Response}
    checked.__name__, checked.__doc__ = getattr(endpoint, "__name__", "checked"), endpoint.__doc__
    return checked


def restricted_methods(
    methods: Mapping[str, Method], restricted: RestrictedApis, categories: Mapping[str, str] = GRPC_CATEGORIES
) -> dict[str, Method]:
    """Wrap every method that has a category with the check; return the methods unchanged if nothing is restricted."""
    if not restricted:
        return dict(methods)
    return {path: _with_check(method, restricted, categories.get(path)) for path, method in methods.items()}


class _Gate:
    """The check of one method. It remembers metadata that passed, as calls with the same header block share it."""

    __slots__ = ("_category", "_passed", "_restricted")

    def __init__(self, category: str, restricted: RestrictedApis) -> None:
        self._category = category
        self._restricted = restricted
        self._passed: Any = None

    def rejects(self, call: Call) -> bool:
        """Refuse a call that must not pass; return whether it was refused."""
        metadata = call.metadata
        if metadata is self._passed:
            return False
        header = self._restricted.check(self._category, metadata.get)
        if header is None:
            self._passed = metadata
            return False
        call.abort(Status.UNAVAILABLE, f"This protocol is restricted, expecting header '{header}'")
        return True


class _DiscardingReader:
    """The Reader of a refused stream."""

    def on_message(self, message: bytes) -> None:
        """Drop the message."""

    def on_half_close(self) -> None:
        """Do nothing."""


def _with_check(method: Method, restricted: RestrictedApis, category: str | None) -> Method:
    if category is None or restricted.check(category, lambda name: None) is None:
        return method
    gate = _Gate(category, restricted)
    unary, streaming = method.unary, method.streaming
    if unary is not None:

        def checked_unary(call: Call, message: bytes) -> None:
            if not gate.rejects(call):
                unary(call, message)

        return Method(method.path, unary=checked_unary)
    if streaming is None:
        raise ValueError(f"{method.path}: neither unary nor streaming")

    def checked_streaming(call: Call) -> Reader:
        return _DiscardingReader() if gate.rejects(call) else streaming(call)

    return Method(method.path, streaming=checked_streaming)
