"""Flood: requests sent by the clock, whatever becomes of those before them. `python -m penstock.perf.flood`.

A closed loop cannot overload a server: it waits for the answers. This sends at a fixed rate over as many connections
as there are requests under way, in a process of its own. It reads an order from standard input and writes what it saw
to standard output, both JSON; `perf/overload.py` runs it.

How long an answer took is told by the kernel, which stamps it as it arrives: from just before the request was sent,
so the lateness of this process counts for nothing. Linux only.
"""

from __future__ import annotations

import gc
import json
import resource
import select
import socket
import struct
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

TICK_S = 0.001
LINGER_S = 60.0
"""How long the answers that are due when the flood ends may take."""
_SO_TIMESTAMPNS = 35  # Linux, asm-generic/socket.h
_STAMP = struct.Struct("qq")
_READ_BYTES = 65536


class _Connection:
    """One connection; `sent_ns` is 0 while it is idle, `left` what the kernel would not take yet."""

    __slots__ = ("got", "left", "sent_ns", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sent_ns = 0
        self.left = memoryview(b"")
        self.got = b""


class Flood:
    """One flood. Units: stamps are nanoseconds of the real-time clock, which is what the kernel stamps with."""

    def __init__(self, address: tuple[str, int], request: bytes, rate_per_s: float, most_connections: int) -> None:
        self._address = address
        self._request = request
        self._rate = rate_per_s
        self._most = most_connections
        self._poll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._idle: deque[_Connection] = deque()
        self._end_ns = 0
        self.sent = self.skipped = self.broken = 0
        self.took_ns: dict[int, list[int]] = {}
        self.accepted_at_ns: list[int] = []

    def run(self, seconds: float) -> None:
        """Send for `seconds`, wait for what is due, and close. Once."""
        start_ns = time.time_ns()
        self._end_ns = start_ns + int(seconds * 1e9)
        while (now_ns := time.time_ns()) < self._end_ns:
            due = int((now_ns - start_ns) * self._rate / 1e9)
            while self.sent + self.skipped < due:
                self._send_one()
            time.sleep(TICK_S)
            self._take(0)
        while len(self._idle) < len(self._connections) and time.time_ns() < self._end_ns + LINGER_S * 1e9:
            self._take(0.1)
        self.broken += len(self._connections) - len(self._idle)
        for connection in self._connections.values():
            connection.sock.close()
        self._poll.close()

    def _send_one(self) -> None:
        if self._idle:
            # the one used last: as many connections stay in use as are needed
            connection = self._idle.pop()
        elif len(self._connections) < self._most:
            connection = self._connect()
        else:
            self.skipped += 1
            return
        self.sent += 1
        connection.sent_ns = time.time_ns()
        try:
            taken = connection.sock.send(self._request)
        except BlockingIOError:
            taken = 0
        except OSError:
            self._lose(connection)
            return
        if taken < len(self._request):
            connection.left = memoryview(self._request)[taken:]
            self._poll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _connect(self) -> _Connection:
        sock = socket.create_connection(self._address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        sock.setblocking(False)
        self._poll.register(sock, select.EPOLLIN)
        connection = self._connections[sock.fileno()] = _Connection(sock)
        return connection

    def _lose(self, connection: _Connection) -> None:
        if connection.sent_ns:
            self.broken += 1
        else:
            self._idle.remove(connection)
        del self._connections[connection.sock.fileno()]
        connection.sock.close()

    def _take(self, wait_s: float) -> None:
        for number, event in self._poll.poll(wait_s, self._most):
            connection = self._connections[number]
            if event & select.EPOLLOUT and not event & select.EPOLLERR:
                self._send_more(connection)
            if event & ~select.EPOLLOUT:
                self._read(connection)

    def _send_more(self, connection: _Connection) -> None:
        try:
            connection.left = connection.left[connection.sock.send(connection.left) :]
        except OSError:
            return  # the answer that came before it, if any, is still read
        if not connection.left:
            self._poll.modify(connection.sock, select.EPOLLIN)
            if not connection.sent_ns:
                self._idle.append(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            got, told, _, _ = connection.sock.recvmsg(_READ_BYTES, 64)
        except BlockingIOError:
            return
        except OSError:
            got = b""
        if not got:
            self._lose(connection)
            return
        answer = connection.got + got if connection.got else got
        end = answer.find(b"\r\n\r\n") + 4
        length = answer.find(b"content-length: ", 0, end) + 16
        if end < 4 or len(answer) < end + int(answer[length : answer.index(b"\r", length)]):
            connection.got = answer
            return
        connection.got = b""
        seconds, part_ns = _STAMP.unpack(told[0][2])
        self._note(connection, int(answer[9:12]), seconds * 1_000_000_000 + part_ns)

    def _note(self, connection: _Connection, status: int, at_ns: int) -> None:
        self.took_ns.setdefault(status, []).append(at_ns - connection.sent_ns)
        if status == 200:
            self.accepted_at_ns.append(at_ns)
        connection.sent_ns = 0
        if not connection.left:
            self._idle.append(connection)

    def report(self, seconds: float) -> dict[str, Any]:
        """Say what was seen: times in milliseconds by status, and good answers for each whole second."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        start_ns = self._end_ns - int(seconds * 1e9)
        edges = start_ns + np.arange(int(seconds) + 1) * 1_000_000_000
        took = {}
        for status, values_ns in sorted(self.took_ns.items()):
            p50, p99, most = (np.percentile(values_ns, [50, 99, 100]) / 1e6).round(3).tolist()
            took[str(status)] = {"count": len(values_ns), "p50_ms": p50, "p99_ms": p99, "max_ms": most}
        return {
            "sent": self.sent,
            "skipped": self.skipped,
            "broken": self.broken,
            "connections": len(self._connections),
            "took": took,
            "good_per_s": np.histogram(self.accepted_at_ns, edges)[0].tolist(),
            "cpu_s": used.ru_utime + used.ru_stime,
        }


def main() -> None:
    """Carry out the order on standard input."""
    order = json.load(sys.stdin)
    lines = [f"POST {order['path']} HTTP/1.1", f"Host: {order['host']}:{order['port']}"]
    body = Path(order["body"]).read_bytes()
    lines += [f"{name}: {value}" for name, value in order["headers"].items()]
    request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
    flood = Flood((order["host"], order["port"]), request, order["rate_per_s"], order["connections"])
    gc.disable()
    flood.run(order["seconds"])
    print(json.dumps(flood.report(order["seconds"])))


if __name__ == "__main__":
    main()
