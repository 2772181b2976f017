"""Health: the answers to probes, and HealthService, which answers on a port of its own. Made by dialect.py.

The original answered /health_check on both its ports, but on its service port only between two calls.
Source: abeja-platform-model-proxy 2.6.5, by observed behavior.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .messages import JSON, status_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.server.http.connection import Connection
    from penstock.server.http.fastlane import FastLane
    from penstock.server.http.head import Head
    from penstock.server.http.service import Service

HEALTH = b"/health_check"
UNAVAILABLE = status_body("service unavailable")
_OK = status_body("ok")


def answer_health(connection: FastLane, ready: bool) -> None:
    """Answer a probe."""
    connection.answer(200 if ready else 503, _OK if ready else UNAVAILABLE, JSON)


class Probe:
    """The claim of /health_check, or of an unknown path."""

    __slots__ = ("is_health_check",)

    def __init__(self, *, is_health_check: bool) -> None:
        self.is_health_check = is_health_check


_HEALTH, _UNKNOWN_PATH = Probe(is_health_check=True), Probe(is_health_check=False)


class HealthService:
    """The Service of the health port. It leaves Penstock's own paths to `others`, and to uvicorn.

    `ready` returns whether the handler can be called, `is_own` whether a path is Penstock's own.
    Threads: the event loop's.
    """

    def __init__(self, ready: Callable[[], bool], others: Service, is_own: Callable[[str], bool]) -> None:
        self._ready = ready
        self._others = others
        self._is_own = is_own

    def claim(self, head: Head) -> Any:
        """Claim all but Penstock's own paths."""
        if head.path == HEALTH:
            return _HEALTH
        claim = self._others.claim(head)
        return claim if claim is not None or self._is_own(head.path.decode("latin-1")) else _UNKNOWN_PATH

    def early_rejection(self, head: Head) -> Any:
        """Turn away what `others` would."""
        return None if isinstance(head.route, Probe) else self._others.early_rejection(head)

    def answer_error(self, connection: FastLane, error: Any) -> None:
        """Answer a request that was turned away."""
        self._others.answer_error(connection, error)

    def begin(self, connection: FastLane, head: Head, body: bytes) -> None:
        """Answer one request."""
        probe = head.route
        if not isinstance(probe, Probe):
            self._others.begin(connection, head, body)
        elif probe.is_health_check:
            answer_health(connection, self._ready())
        else:
            connection.answer(404, b"404 page not found\n", b"text/plain; charset=utf-8")

    def abandon(self, connection: Connection) -> None:
        """Cancel the request of a client that disconnected."""
        self._others.abandon(connection)
