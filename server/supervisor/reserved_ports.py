"""ReservedPorts: holds a server's ports for its lifetime, while front ends come and go. Made by `supervisor.py`."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.server.listening.sockets import bind_all, bind_one, block_new_connections
from penstock.server.settings import Settings

_SETTINGS = {"HTTP": "http_port", "gRPC": "grpc_port", "metrics": "metrics_port"}


class ReservedPorts:
    """Sockets that are bound but never listen: connections go to the front ends, but no other program can bind."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    async def reserve(self, ports: Mapping[str, tuple[str, int]]) -> dict[str, int]:
        """Reserve a port for each name, given its address and its number, 0 for any.

        Returns: the numbers. Raises: ListenError.
        """
        numbers: dict[str, int] = {}
        for name, (address, port) in ports.items():
            if port:
                for probe in await bind_all(name, address, port, _bind_probe):
                    probe.close()
            sockets = await bind_all(name, address, port, _bind_reserved)
            self._sockets += sockets
            numbers[name] = sockets[0].getsockname()[1]
        return numbers

    async def reserve_for(self, settings: Settings) -> Settings:
        """Reserve the ports of a server. Returns: the settings, with the numbers in them. Raises: ListenError."""
        numbers = await self.reserve(served_ports(settings))
        chosen: dict[str, Any] = {_SETTINGS[name]: number for name, number in numbers.items()}
        return replace(settings, **chosen)

    def close(self) -> None:
        """Release the ports."""
        for reserved in self._sockets:
            reserved.close()
        self._sockets.clear()


def served_ports(settings: Settings) -> dict[str, tuple[str, int]]:
    """Return the address and the port of each protocol that is served."""
    ports: dict[str, tuple[str, int]] = {}
    if settings.allow_http:
        ports["HTTP"] = (settings.http_address, settings.http_port)
    if settings.allow_grpc:
        ports["gRPC"] = (settings.grpc_address, settings.grpc_port)
    if settings.allow_metrics:
        ports["metrics"] = (settings.metrics_address or settings.http_address, settings.metrics_port)
    if settings.allow_sagemaker:
        ports["SageMaker"] = (settings.sagemaker_address, settings.sagemaker_port)
    if settings.allow_vertex_ai:
        ports["Vertex AI"] = (settings.vertex_ai_address, settings.vertex_ai_port)
    return ports


def port_urls(settings: Settings) -> dict[str, str]:
    """Return the URLs at which a server listens, in the format of its own ports."""
    schemes = {"gRPC": "grpcs" if settings.grpc_use_ssl or settings.grpc_use_ssl_mutual else "grpc"}
    urls = {}
    for name, (address, port) in served_ports(settings).items():
        host = f"[{address}]" if ":" in address else address
        urls[name] = f"{schemes.get(name, 'http')}://{host}:{port}"
    return urls


def _bind_probe(family: int, address: Any) -> socket.socket:
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


def _bind_reserved(family: int, address: Any) -> socket.socket:
    reserved = bind_one(family, address, reuse_port=True)
    # it was set to take over from an earlier server; from now on no other socket may bypass this one with it
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return reserved
