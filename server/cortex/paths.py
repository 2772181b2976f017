"""Paths: the purpose of each URL of a server of Cortex APIs. Called by `service.py`, once for each head.

Source: Cortex 0.9 (`/<deployment>/<api>`, and `/signature` under it), 0.10 (`/predict`, to which the gateway rewrote
the endpoint), 0.11 (GET on the endpoint itself).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .api import Api

ENDPOINT, SIGNATURE, HEALTH = "endpoint", "signature", "health"
"""The purposes of paths: a prediction by POST and the summary by GET; the signature document; the probe."""

PREDICT_PATH, HEALTH_PATH = "/predict", "/healthz"
_METHODS = {ENDPOINT: (b"GET", b"HEAD", b"OPTIONS", b"POST")}
_READ_ONLY = (b"GET", b"HEAD", b"OPTIONS")
_PENSTOCK_PATHS = frozenset(("/v2", "/metrics", "/docs", "/openapi.json"))


@dataclass(frozen=True, slots=True)
class CortexRoute:
    """The purpose of a path, and its API; the probe has none."""

    purpose: str
    api: Api | None = None

    @property
    def methods(self) -> tuple[bytes, ...]:
        """The methods that it accepts."""
        return _METHODS.get(self.purpose, _READ_ONLY)


class CortexPaths:
    """All paths of some APIs, which are given by name."""

    def __init__(self, apis: Mapping[str, Api]) -> None:
        self.apis = apis
        self._count = len(apis)
        self._routes: dict[str, CortexRoute] = {HEALTH_PATH: CortexRoute(HEALTH)}
        if len(apis) == 1:
            self._add(PREDICT_PATH, *apis.values())
        for api in apis.values():
            self._add(api.endpoint, api)

    def _add(self, path: str, api: Api) -> None:
        self._routes.setdefault(path.rstrip("/") + "/signature", CortexRoute(SIGNATURE, api))
        self._routes[path] = CortexRoute(ENDPOINT, api)

    def is_current(self, apis: Mapping[str, Api]) -> bool:
        """Return whether these are still the paths of `apis`: changed projects have a new mapping."""
        return apis is self.apis and len(apis) == self._count

    def find(self, path: str) -> CortexRoute | None:
        """Return the purpose of a path."""
        return self._routes.get(path)


def is_penstock_path(path: str) -> bool:
    """Return whether a path belongs to Penstock's own protocol or its control plane, unless an API has it."""
    return path in _PENSTOCK_PATHS or path.startswith("/v2/")
