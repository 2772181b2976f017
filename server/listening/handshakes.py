"""Handshakes: what the kernel does with those who connect to a listening socket. Called by a Port."""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import sys

# Classic BPF over a TCP header: drop what has SYN and not ACK, take everything else. (code, jt, jf, k) each.
_NO_NEW_CONNECTIONS = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFF))
_UNSENT_BYTES = 1 << 18
_SO_ATTACH_FILTER = 26  # Linux, asm-generic/socket.h; the socket module does not name it


def keep_little(bound: socket.socket) -> None:
    """Have the kernel take little of what it cannot send yet, for each who connects.

    It would take 4 MB of an answer at once, a millisecond of the event loop or more, and again whenever that has left:
    50 clients that begin to read at the same time held it for 0.4 s.
    """
    if sys.platform == "linux":
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def keep_out_new(bound: socket.socket) -> None:
    """Have the kernel ignore those who want to connect; what has connected stays."""
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in _NO_NEW_CONNECTIONS))
    option = struct.pack("HL", len(_NO_NEW_CONNECTIONS), ctypes.addressof(program))
    # Where it is not allowed, only the connections of the last microseconds are at risk.
    with contextlib.suppress(OSError):
        bound.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def somebody_waits(sockets: list[socket.socket]) -> bool:
    """Tell whether anybody has connected who is not accepted yet."""
    poll = select.poll()
    for bound in sockets:
        poll.register(bound, select.POLLIN)
    return bool(poll.poll(0))
