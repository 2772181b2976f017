"""Socket options: how the kernel treats the connections of a listening socket. Called by a Port."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import sys

# Classic BPF over a TCP header: drop packets with SYN and without ACK, accept others. Each is (code, jt, jf, k).
_NO_NEW_CONNECTIONS = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF))
_UNSENT_BYTES = 1 << 18
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h; missing from the socket module


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
