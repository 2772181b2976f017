"""The flood counts what it is answered, and the report says what holds."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import onnxruntime
import pytest

from penstock.perf import models
from penstock.perf.flood import Flood
from penstock.perf.load import Load
from penstock.perf.overload import Calm, Overload, Sample, report

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"
SEEN = {
    "sent": 200_000, "skipped": 0, "broken": 0, "connections": 1100, "cpu_s": 2.0,
    "took": {
        "200": {"count": 19_000, "p50_ms": 900.0, "p99_ms": 1000.0, "max_ms": 1100.0},
        "503": {"count": 181_000, "p50_ms": 0.1, "p99_ms": 0.8, "max_ms": 9.0},
    },
    "good_per_s": [0, *[950] * 19],
}  # fmt: skip


@contextmanager
def answering(*statuses: bytes) -> Iterator[tuple[str, int]]:
    """A server that gives these answers in turn, whatever the connection; b"" closes it instead."""
    turns = count()

    def serve(connection: socket.socket) -> None:
        with connection:
            while connection.recv(len(REQUEST), socket.MSG_WAITALL):
                status = statuses[next(turns) % len(statuses)]
                if not status:
                    return
                connection.sendall(b"HTTP/1.1 %b\r\ncontent-length: 2\r\n\r\n" % status)
                connection.sendall(b"ok")

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's stamps are Linux's")
@pytest.mark.slow
class TestFlood:
    def test_every_request_is_counted_by_how_it_was_answered(self) -> None:
        with answering(b"200 OK", b"503 Service Unavailable") as address:
            flood = Flood(address, REQUEST, 400, 100)
            flood.run(0.1)
            seen = flood.report(1)

        assert 0 < seen["sent"] <= 40
        assert seen["took"]["200"]["count"] + seen["took"]["503"]["count"] == seen["sent"]
        assert 0 < sum(seen["good_per_s"]) <= seen["took"]["200"]["count"]
        assert (seen["skipped"], seen["broken"]) == (0, 0)
        assert 0 < seen["took"]["503"]["p50_ms"] <= seen["took"]["503"]["p99_ms"] <= seen["took"]["503"]["max_ms"]

    def test_a_connection_that_is_closed_instead_is_broken(self) -> None:
        with answering(b"") as address:
            flood = Flood(address, REQUEST, 400, 100)
            flood.run(0.1)
            seen = flood.report(1)

        assert 0 < seen["broken"] == seen["sent"]
        assert (seen["took"], seen["connections"]) == ({}, 0)


def calm(per_s: float) -> Calm:
    load = Load(requests_per_s=per_s, p50_ms=40, p99_ms=50, cpu_us=9, refused=0, broken=0)
    return Calm(best_per_s=per_s, few=load, alone=load, rss_mib=110)


def said(after_per_s: float = 1000, rows: int = 1024, rss_mib: float = 130, **seen: Any) -> list[str]:
    samples = [Sample(rows, 130)] * 60 + [Sample(rows, rss_mib)] * 20
    during = Overload(10_000, 20, SEEN | seen, samples, 22.0, 2.5)
    return [line for line in report(calm(1000), during, calm(after_per_s)).splitlines() if "hold" in line.lower()]


def test_all_of_it_may_hold() -> None:
    assert said() == [
        "offered 10.0 times the peak: holds",
        "queue: at most 1024 rows of 1024: holds",
        "goodput: 95.0% of the peak: holds",
        "refusals: p99 0.800 ms from sent to received: holds",
        "neither 200 nor 503: 0: holds",
        "memory: +0.0 MiB with the queue full: holds",
        "after: 100.0% of the goodput before: holds",
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sent": 100_000}, "offered 5.0"),
        ({"rows": 1025}, "queue: at most 1025"),
        ({"good_per_s": [0, *[890] * 19]}, "goodput: 89.0%"),
        ({"took": {"503": {"count": 1, "p50_ms": 1, "p99_ms": 11, "max_ms": 12}}}, "refusals: p99 11.000"),
        ({"took": SEEN["took"] | {"500": {"count": 3}}}, "neither 200 nor 503: 3"),  # type: ignore[operator]
        ({"broken": 2}, "neither 200 nor 503: 2"),
        ({"rss_mib": 135}, "memory: +5.0 MiB"),
        ({"after_per_s": 800}, "after: 80.0%"),
    ],
)
def test_what_does_not_hold_is_said(change: dict[str, Any], what: str) -> None:
    failed = [line for line in said(**change) if line.endswith("DOES NOT HOLD")]

    assert [line.startswith(what) for line in failed] == [True]


def test_the_deep_model_takes_any_number_of_rows() -> None:
    session = onnxruntime.InferenceSession(models.deep().SerializeToString(), providers=["CPUExecutionProvider"])

    for rows in (1, 3):
        (output,) = session.run(None, {"input": np.ones((rows, 64), np.float32)})

        assert output.shape == (rows, 8)
        assert np.isfinite(output).all()
