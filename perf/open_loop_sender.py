"""Open-loop load: requests sent on schedule, answered or not. `python -m penstock.perf.open_loop_sender`.

A closed loop cannot overload a server, and it hides waiting: it sends only after an answer. This sends request i when
it is due, over as many connections as there are requests in flight, from a process of its own. `run_open_loop` in
`perf/open_loop.py` starts it. They exchange

- an order, JSON on standard input: `host`, `port`; `connections`, the most allowed, and `opened`, how many are opened
  at the start, since a busy server is slow to accept; `requests`, a list of files, each a whole request that can be
  sent; `at`, a .npy file: when each request is due, in nanoseconds from the start, ascending; `which`, a .npy file: the
  index in `requests` of each; `records`, the file to write;
- `records`, a .npy file with one RECORD for each request;
- a report, JSON on standard output: `connections` used, and `cpu_s`, the CPU time from the first request on.

Times are measured from when a request was due: if this process sends it late, that is in `late_ns` and is part of
`took_ns`, so no delay is omitted. The time of an answer is the kernel's timestamp of its arrival, so it does not matter
when it is read. Linux only.

A request of 2 kB costs 29 us of CPU here at 10,000 a second, 42 at 4,000, and 110 at 500, where each one wakes both
this process and the server: most of it is `send`, which carries the packet to the other end's socket.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

RECORD = np.dtype([("due_ns", "i8"), ("late_ns", "i8"), ("took_ns", "i8"), ("status", "i4"), ("which", "i4")])
"""The result of one request: when it was due, from the start; how much later it was sent; the time from due to
answered; the answer's HTTP status, BROKEN or SKIPPED; which of the order's requests it was.
"""
BROKEN = 0
"""The status of a request sent but not answered: its connection was closed, or it took longer than LINGER_S."""
SKIPPED = -1
"""The status of a request that could not be sent because every connection was in use."""
MIN_SLEEP_NS = 100_000
"""The shortest sleep. Requests that fall due meanwhile are sent together, late by half of it on average."""
READ_INTERVAL_NS = 5_000_000
INITIAL_CONNECTIONS = 32
"""How many connections are opened in advance if the order does not say, so that the first requests need not wait."""
LINGER_S = 60.0
"""How long to wait for outstanding answers after the last request has been sent."""
_SO_TIMESTAMPNS = 35  # Linux, asm-generic/socket.h
_PR_SET_TIMERSLACK = 29  # Linux, linux/prctl.h
_TIMESPEC = struct.Struct("qq")
_READ_BYTES = 65536


class _Connection:
    """One connection. `request_number`: the request it carries, -1 while idle; `unsent`: what is yet to be sent."""

    __slots__ = ("received", "request_number", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.request_number = -1
        self.unsent = memoryview(b"")
        self.received = b""


class OpenLoopSender:
    """One load. Units: timestamps are nanoseconds of the real-time clock, which the kernel's timestamps use."""

    def __init__(
        self,
        address: tuple[str, int],
        requests: Sequence[bytes],
        max_connections: int,
        initial_connections: int = INITIAL_CONNECTIONS,
    ) -> None:
        self._address = address
        self._requests = requests
        self._max_connections = max_connections
        self._initial_connections = initial_connections
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._idle: deque[_Connection] = deque()
        self._sent_ns: list[int] = []
        self._answered_ns: list[int] = []
        self._statuses: list[int] = []
        self.opened_connections = 0
        self.linger_s = LINGER_S

    def run(self, at_ns: Sequence[int], request_indexes: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Send every request when it is due, wait for the answers, and close. Call once. Returns: the RECORDs."""
        count = len(at_ns)
        self._sent_ns, self._answered_ns, self._statuses = [0] * count, [0] * count, [SKIPPED] * count
        while len(self._connections) < min(self._initial_connections, self._max_connections):
            self._idle.append(self._connect())
        start_ns = time.time_ns() + READ_INTERVAL_NS
        self._send_all([start_ns + at for at in at_ns], request_indexes)
        end = time.monotonic() + self.linger_s
        while len(self._idle) < len(self._connections) and time.monotonic() < end:
            self._poll_events(0.1)
        for connection in self._connections.values():
            connection.sock.close()
        self._epoll.close()
        records = np.zeros(count, RECORD)
        records["due_ns"], records["which"], records["status"] = at_ns, request_indexes, self._statuses
        sent, answered = records["status"] != SKIPPED, records["status"] > BROKEN
        records["late_ns"][sent] = (np.array(self._sent_ns) - start_ns - records["due_ns"])[sent]
        records["took_ns"][answered] = (np.array(self._answered_ns) - start_ns - records["due_ns"])[answered]
        return records

    def _send_all(self, due_ns: list[int], request_indexes: Sequence[int]) -> None:
        number, count, read_ns = 0, len(due_ns), 0
        while number < count:
            now_ns = time.time_ns()
            while number < count and due_ns[number] <= now_ns:
                self._send(number, self._requests[request_indexes[number]])
                number += 1
            if now_ns >= read_ns:
                self._poll_events(0)
                read_ns = now_ns + READ_INTERVAL_NS
            if number < count:
                # answers are read now and then, which delays no timestamp and frees their connections
                sleep_ns = min(due_ns[number], read_ns) - time.time_ns()
                time.sleep(max(sleep_ns, MIN_SLEEP_NS) / 1e9)

    def _send(self, number: int, request: bytes) -> None:
        if not self._idle:
            self._poll_events(0)
        if self._idle:
            # the one used last, so that no more connections stay in use than needed
            connection = self._idle.pop()
        elif len(self._connections) < self._max_connections:
            connection = self._connect()
        else:
            return
        connection.request_number = number
        self._statuses[number] = BROKEN
        self._sent_ns[number] = time.time_ns()
        try:
            sent_bytes = connection.sock.send(request)
        except BlockingIOError:
            sent_bytes = 0
        except OSError:
            self._drop(connection)
            return
        if sent_bytes < len(request):
            connection.unsent = memoryview(request)[sent_bytes:]
            self._epoll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def _connect(self) -> _Connection:
        sock = socket.create_connection(self._address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        sock.setblocking(False)
        self._epoll.register(sock, select.EPOLLIN)
        connection = self._connections[sock.fileno()] = _Connection(sock)
        self.opened_connections += 1
        return connection

    def _drop(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)
        del self._connections[connection.sock.fileno()]
        connection.sock.close()

    def _poll_events(self, wait_s: float) -> None:
        for number, event in self._epoll.poll(wait_s, self._max_connections):
            connection = self._connections[number]
            if event & select.EPOLLOUT and not event & select.EPOLLERR:
                self._resume_send(connection)
            if event & ~select.EPOLLOUT:
                self._read(connection)

    def _resume_send(self, connection: _Connection) -> None:
        try:
            connection.unsent = connection.unsent[connection.sock.send(connection.unsent) :]
        except OSError:
            return  # an answer that arrived before is still read
        if not connection.unsent:
            self._epoll.modify(connection.sock, select.EPOLLIN)
            if connection.request_number < 0:
                self._idle.append(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            received, ancillary, _, _ = connection.sock.recvmsg(_READ_BYTES, 64)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received or connection.request_number < 0:
            self._drop(connection)
            return
        answer = connection.received + received if connection.received else received
        end = answer.find(b"\r\n\r\n") + 4
        length = answer.find(b"\r\ncontent-length: ", 0, end) + 18
        if end < 4 or len(answer) < end + int(answer[length : answer.index(b"\r", length)]):
            connection.received = answer
            return
        connection.received = b""
        self._statuses[connection.request_number] = int(answer[9:12])
        self._answered_ns[connection.request_number] = _kernel_timestamp_ns(ancillary)
        connection.request_number = -1
        if not connection.unsent:
            self._idle.append(connection)


def _kernel_timestamp_ns(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """Return the kernel's timestamp. Data received before timestamps took effect has none, and the time is now."""
    if not ancillary:
        return time.time_ns()
    seconds, nanoseconds = _TIMESPEC.unpack(ancillary[0][2])
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def main() -> None:
    """Carry out the order on standard input."""
    order = json.load(sys.stdin)
    requests = [Path(request).read_bytes() for request in order["requests"]]
    at_ns, request_indexes = np.load(order["at"]).tolist(), np.load(order["which"]).tolist()
    sender = OpenLoopSender((order["host"], order["port"]), requests, order["connections"], order["opened"])
    # end sleeps on time, not up to 50 us later
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    gc.disable()
    before = resource.getrusage(resource.RUSAGE_SELF)
    records = sender.run(at_ns, request_indexes)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    np.save(order["records"], records)
    cpu_s = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"connections": sender.opened_connections, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
