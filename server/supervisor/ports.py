"""Ports: reserves the ports of a server for its lifetime, while front ends come and go. Created by `supervisor.py`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.server.listening.socket_options import block_new_connections
from penstock.server.listening.sockets import bind_all, bind_one
from penstock.server.settings import Settings

_SETTINGS = {"HTTP": "http_port", "gRPC": "grpc_port", "metrics": "metrics_port"}


class Ports:
    """Sockets that are bound but never listen: connections go to the front ends, but no other program can bind."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    async def hold(self, wanted: Mapping[str, tuple[str, int]]) -> dict[str, int]:
        """Reserve a port for each name, given its address and its number, 0 for any.

        Returns: the numbers. Raises: ListenError.
        """
        numbers: dict[str, int] = {}
        for name, (address, port) in wanted.items():
            if port:
                for probe in await bind_all(name, address, port, _probed):
                    probe.close()
            sockets = await bind_all(name, address, port, _held)
            self._sockets += sockets
            numbers[name] = sockets[0].getsockname()[1]
        return numbers

    async def hold_for(self, settings: Settings) -> Settings:
        """Reserve the ports of a server. Returns: the settings, with the numbers in them. Raises: ListenError."""
        numbers = await self.hold(wanted(settings))
        chosen: dict[str, Any] = {_SETTINGS[name]: number for name, number in numbers.items()}
        return replace(settings, **chosen)

    def close(self) -> None:
        """Release the ports."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()


def wanted(settings: Settings) -> dict[str, tuple[str, int]]:
    """Return the address and the port of each protocol that is served."""
    found = {}
    if settings.allow_http:
        found["HTTP"] = (settings.http_address, settings.http_port)
    if settings.allow_grpc:
        found["gRPC"] = (settings.grpc_address, settings.grpc_port)
    if settings.allow_metrics:
        found["metrics"] = (settings.metrics_address or settings.http_address, settings.metrics_port)
    if settings.allow_sagemaker:
        found["SageMaker"] = (settings.sagemaker_address, settings.sagemaker_port)
    if settings.allow_vertex_ai:
        found["Vertex AI"] = (settings.vertex_ai_address, settings.vertex_ai_port)
    return found


def places(settings: Settings) -> dict[str, str]:
    """Return the URLs at which a server listens, in the format of its own ports."""
    schemes = {"gRPC": "grpcs" if settings.grpc_use_ssl or settings.grpc_use_ssl_mutual else "grpc"}
    urls = {}
    for name, (address, port) in wanted(settings).items():
        host = f"[{address}]" if ":" in address else address
        urls[name] = f"{schemes.get(name, 'http')}://{host}:{port}"
    return urls


def _probed(family: int, address: Any) -> socket.socket:
    """Listen for a moment without sharing: SO_REUSEPORT alone would let a second penstock in.

    Raises: OSError.
    """
    probe = bind_one(family, address)
    try:
        block_new_connections(probe)
        probe.listen(1)
    except OSError:
        probe.close()
        raise
    return probe


def _held(family: int, address: Any) -> socket.socket:
    held = bind_one(family, address, reuse_port=True)
    # it was set to take over from an earlier server; from now on no other socket may bypass this one with it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held
