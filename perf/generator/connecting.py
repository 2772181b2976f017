"""Connecting to a target over TCP or a Unix socket, plain or encrypted."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from typing import Any, TypeVar

from .orders import Target
from .tls import context

_Protocol = TypeVar("_Protocol", bound=asyncio.BaseProtocol)


class Connecting:
    """Connects to one target, whose name is resolved once. asyncio and uvloop set TCP_NODELAY themselves."""

    def __init__(self, target: Target, *protocols: str) -> None:
        self._target = target
        self._protocols = protocols
        self._tls: dict[str, Any] | None = None
        self._addresses: list[str] = []

    async def connect(self, protocol: Callable[[], _Protocol]) -> _Protocol:
        """Connect, with `protocols` offered by ALPN. Raises: OSError, ssl.SSLError."""
        loop, target = asyncio.get_running_loop(), self._target
        if self._tls is None:
            self._tls = self._encryption()
        try:
            if target.host.startswith("/"):
                _, protocol_made = await loop.create_unix_connection(protocol, target.host, **self._tls)
                return protocol_made
            for address in await self._resolved():
                try:
                    _, protocol_made = await loop.create_connection(protocol, address, target.port, **self._tls)
                except OSError as error:
                    failure = error
                else:
                    self._addresses = [address]
                    return protocol_made
            raise failure
        except ssl.SSLError:
            raise
        except OSError as error:
            reason = f"{error.strerror or error}{' (ulimit -n)' if error.errno == errno.EMFILE else ''}"
            raise ConnectionError(f"no connection to {target.host}:{target.port}: {reason}") from error
        except UnicodeError as error:  # an invalid host name
            raise ConnectionError(f"no connection to {target.host}:{target.port}: {error}") from error

    def _encryption(self) -> dict[str, Any]:
        if self._target.tls is None:
            return {}
        name = "localhost" if self._target.host.startswith("/") else self._target.host
        return {"ssl": context(self._target.tls, *self._protocols), "server_hostname": name}

    async def _resolved(self) -> list[str]:
        if not self._addresses:
            infos = await asyncio.get_running_loop().getaddrinfo(
                self._target.host, self._target.port, type=socket.SOCK_STREAM
            )
            self._addresses = list(dict.fromkeys(str(each[4][0]) for each in infos))
        return self._addresses
