"""Socket operations of both ends of a connection, blocking or not, and the descriptors sent with messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from .arena import WireError

MAX_DESCRIPTORS = 200
"""The most that are sent at once; the system allows 253."""
READ_BYTES = 256 << 10
SOCKET_BYTES = 1 << 20
LINGER_S = 0.01
"""How long freed slots wait to be reported together with a message: waking the other side for them alone costs both
sides 20 us in total."""
_ANCILLARY_BYTES = socket.CMSG_LEN(4 * 253)
_TRUNCATED = int(socket.MSG_CTRUNC)
"""As an int: an operation on one of Python's flags makes an enum, which takes 30 times as long, for each message."""


def set_buffer_sizes(sock: socket.socket) -> None:
    """Size a socket's buffers for what a busy loop turn sends."""
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)


def send_once(sock: socket.socket, data: bytes | bytearray | memoryview, descriptors: list[int]) -> int:
    """Send what the socket accepts, and with it the descriptors, which are then closed. Raises: OSError."""
    if not descriptors:
        return sock.send(data)
    batch = descriptors[:MAX_DESCRIPTORS]
    sent = socket.send_fds(sock, [data if len(descriptors) <= MAX_DESCRIPTORS else memoryview(data)[:1]], batch)
    close_descriptors(batch)
    del descriptors[: len(batch)]
    return sent


def receive_once(sock: socket.socket, buffer: bytearray) -> tuple[memoryview, list[int]]:
    """Receive what is there: a view of `buffer`, empty at the end of the stream, and descriptors.

    Raises: OSError; WireError if this process can hold no more descriptors, since those sent are then lost.
    """
    nbytes, ancillary, flags, _ = sock.recvmsg_into([buffer], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
    descriptors: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            complete_bytes = len(data) - len(data) % 4
            descriptors += memoryview(data[:complete_bytes]).cast("i").tolist()
    if flags & _TRUNCATED:
        close_descriptors(descriptors)
        raise WireError("too many open files to receive a message")
    return memoryview(buffer)[:nbytes], descriptors


def duplicate_descriptors(descriptors: Sequence[int]) -> list[int]:
    """Duplicate descriptors, all or none. Raises: OSError."""
    duplicates: list[int] = []
    try:
        for descriptor in descriptors:
            duplicates.append(os.dup(descriptor))  # noqa: PERF401 - what was made is closed if one fails
    except OSError:
        close_descriptors(duplicates)
        raise
    return duplicates


def close_descriptors(descriptors: Sequence[int]) -> None:
    """Close descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
