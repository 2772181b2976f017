"""The measurements that the simulator is compared with."""

from __future__ import annotations

import socket
import time

from penstock.perf import reality


def test_an_answer_without_a_timestamp_counts_as_of_now() -> None:
    client, server = socket.socketpair()
    with client, server:
        server.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        before_ns = time.time_ns()

        assert before_ns <= reality._answered_ns(client) <= time.time_ns()
