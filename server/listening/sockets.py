"""Sockets: creates the sockets of a port, and sets how the kernel treats their connections.

Called by a Port and by the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

_SERVICES = {"gRPC": "GRPC", "metrics": "Metrics"}
"""Triton's names in the text for a port in use, if different. Source: Triton server, main.cc."""
_MISSING_ADDRESS = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
# Classic BPF over a TCP header: drop packets with SYN and without ACK, accept others. Each is (code, jt, jf, k).
_NO_NEW_CONNECTIONS = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF))
_UNSENT_BYTES = 1 << 18
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h; missing from the socket module


class StartError(Exception):
    """Why a server cannot start, for the operator: one line per reason."""


class ListenError(StartError):
    """Why a port cannot be listened on, for the operator."""


def listen_error(name: str, address: str, port: int, error: OSError) -> ListenError:
    """Return the error for a port that cannot be listened on."""
    if error.errno == errno.EADDRINUSE:
        service = _SERVICES.get(name, name)
        return ListenError(f"failed to start {service} service: Unavailable - Socket '{address}:{port}' already in use")
    reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    return ListenError(f"cannot listen for {name} on {address}, port {port}: {reason}")


async def bind_all(
    name: str, address: str, port: int, bind: Callable[[int, Any], socket.socket]
) -> list[socket.socket]:
    """Bind every address a name resolves to, all on the same port; `bind` takes family and address.

    Raises: ListenError.
    """
    loop = asyncio.get_running_loop()
    requested_port = port
    try:
        addresses = await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise ListenError(f"cannot listen for {name} on {address}, port {port}: not a valid host name") from error
    except socket.gaierror as error:
        raise listen_error(name, address, requested_port, error) from error
    sockets: list[socket.socket] = []
    last_error: OSError | None = None
    for family, _, _, _, resolved in dict.fromkeys(addresses):
        try:
            sockets.append(bind(family, (resolved[0], port, *resolved[2:])))
        except OSError as error:
            # A name such as localhost may resolve to an IPv6 address that this machine does not have.
            last_error = error
            if error.errno in _MISSING_ADDRESS:
                continue
            for bound in sockets:
                bound.close()
            raise listen_error(name, address, requested_port, error) from error
        port = sockets[0].getsockname()[1]
    if not sockets:
        raise listen_error(name, address, requested_port, last_error or OSError(errno.EADDRNOTAVAIL, ""))
    return sockets


def bind_one(family: int, address: Any, *, reuse_port: bool = False) -> socket.socket:
    """Bind one address. Raises: OSError."""
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        limit_unsent_bytes(listening)
        if reuse_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # `::` means every address, including IPv4, as in gRPC; a name has its IPv4 addresses separately
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != "::")
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening


def limit_unsent_bytes(bound: socket.socket) -> None:
    """Limit the unsent data that the kernel buffers per connection.

    By default it accepts 4 MB of an answer at once, which blocks the event loop for a millisecond or more, and again
    each time it has sent that: 50 clients that began to read at the same time blocked the loop for 0.4 s.
    """
    if sys.platform == "linux":
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def block_new_connections(bound: socket.socket) -> None:
    """Make the kernel ignore new connection attempts; established connections stay."""
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _NO_NEW_CONNECTIONS))
    option = struct.pack("HL", len(_NO_NEW_CONNECTIONS), ctypes.addressof(program))
    # If this is not permitted, only connections made in the last microseconds are at risk.
    with contextlib.suppress(OSError):
        bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def has_pending_connections(sockets: list[socket.socket]) -> bool:
    """Return whether there are connections waiting to be accepted."""
    poll = select.poll()
    for bound in sockets:
        poll.register(bound, select.POLLIN)
    return bool(poll.poll(0))
