"""Listening: one port of the gRPC lane, opened, drained and closed like every Port. Made by the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from penstock.server.listening.listener import Port

from .connection import GrpcConnection, GrpcShared


class GrpcListener(Port):
    """The gRPC port."""

    def __init__(self, address: str, port: int, shared: GrpcShared) -> None:
        super().__init__("gRPC", address, port, shared)
        self._grpc = shared
        self.max_connections = shared.limits.max_connections

    @property
    def scheme(self) -> str:  # type: ignore[override]
        """`grpcs` over TLS."""
        return "grpc" if self.tls is None else "grpcs"

    def make_protocol(self) -> asyncio.BaseProtocol:
        """Make a connection of the lane."""
        return GrpcConnection(self._grpc)

    def open_connections(self) -> Collection[Any]:
        """Return the lane's connections."""
        return self._grpc.connections

    def use_connections(self, connections: set[Any]) -> None:
        """Have the lane use this set for its connections."""
        self._grpc.connections = connections

    async def close(self) -> None:
        """Close the port and every connection at once."""
        await super().close()
        self._grpc.deadlines.close()
