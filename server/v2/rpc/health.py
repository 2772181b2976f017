"""grpc.health.v1.Health, used by Kubernetes, load balancers and gRPC clients. Made by `services.py`.

Source: grpc/doc/health-checking.md; Triton, which is SERVING while ready.
"""

from __future__ import annotations

from typing import Any

from penstock.server.grpc.method import Call, Method, Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.health import Health

from .calls import parse_small
from .descriptors import HEALTH, message_class
from .ticker import Ticker

SERVICES = frozenset({"", "inference.GRPCInferenceService"})
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


class HealthRpcs:
    """Check and Watch."""

    def __init__(self, health: Health, ticker: Ticker) -> None:
        self._health = health
        self._ticker = ticker
        self._cached: dict[bool, tuple[int, bytes]] = {}
        self._cached_tick = 0
        self._request = message_class("grpc.health.v1.HealthCheckRequest")
        self._answer = message_class("grpc.health.v1.HealthCheckResponse")

    def methods(self) -> tuple[Method, ...]:
        return Method(f"/{HEALTH}/Check", self.check), Method(f"/{HEALTH}/Watch", self.watch)

    def check(self, call: Call, message: bytes) -> None:
        """Answer whether a service can be used now."""
        service = parse_small(self._request, message).service
        if service not in SERVICES:
            call.abort(Status.NOT_FOUND, "unknown service")
            return
        call.answer(self._encode(self._status(service)))

    def watch(self, call: Call, message: bytes) -> None:
        """Answer like Check, and again whenever the status changes."""
        _Watch(self, call, parse_small(self._request, message).service, self._ticker)

    def draining(self) -> bool:
        return self._health.draining

    def status(self, service: str, *, refresh: bool) -> tuple[int, bytes]:
        """Return a service's status, as a number and an encoded answer, from this tick's cache unless `refresh`."""
        if refresh or self._cached_tick != self._ticker.tick_count:
            self._cached_tick = self._ticker.tick_count
            self._cached.clear()
        known = service in SERVICES
        if known not in self._cached:
            status = self._status(service)
            self._cached[known] = status, self._encode(status)
        return self._cached[known]

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return _SERVICE_UNKNOWN
        return _SERVING if self._health.ready() else _NOT_SERVING

    def _encode(self, status: int) -> bytes:
        encoded: Any = self._answer(status=status).SerializeToString()
        return bytes(encoded)


class _Watch:
    """One Watch call: sends the status when it has changed. It ends when the server drains."""

    def __init__(self, rpcs: HealthRpcs, call: Call, service: str, ticker: Ticker) -> None:
        self._rpcs = rpcs
        self._call = call
        self._service = service
        self._ticker = ticker
        self._sent_status = -1
        call.on_cancel = self._end
        ticker.add(self.check)
        self.check()

    def check(self) -> None:
        status, answer = self._rpcs.status(self._service, refresh=self._sent_status < 0)
        if status != self._sent_status and (self._call.writable or self._sent_status < 0):
            self._sent_status = status
            self._call.send(answer)
        if self._rpcs.draining():
            self._end()
            self._call.abort(Status.UNAVAILABLE, SHUTTING_DOWN)

    def _end(self) -> None:
        self._call.on_cancel = None
        self._ticker.remove(self.check)
