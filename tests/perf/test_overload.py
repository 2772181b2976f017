"""The flood counts what it is answered, the load reads its records, and the report says what holds."""

from __future__ import annotations

import argparse
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

from penstock.perf import models, open_loop_sender
from penstock.perf.open_loop import OpenLoopResult
from penstock.perf.open_loop_sender import BROKEN, RECORD, SKIPPED, OpenLoopSender
from penstock.perf.overload import Baseline, Overload, Round, Sample, overload_seconds, report
from penstock.perf.wrk import Load

REQUEST = b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"


def records(**answers: Any) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """A flood of 20 s: by status how many requests were answered with it, evenly, each after so many ms."""
    rows = []
    for status, (number, took_ms) in answers.items():
        each = np.zeros(number, RECORD)
        each["status"] = int(status.removeprefix("s"))
        each["due_ns"] = np.arange(number) * 20e9 / number
        each["took_ns"] = took_ms * 1e6
        rows.append(each)
    return np.concatenate(rows)


COUNTS = {"s200": (19_000, 900), "s503": (181_000, 0.8)}


@contextmanager
def answering(*statuses: bytes, received: list[bytes] | None = None) -> Iterator[tuple[str, int]]:
    """A server that gives these answers in turn, whatever the connection; b"" closes it instead; none: it is silent."""
    turns = count()

    def serve(connection: socket.socket) -> None:
        with connection:
            while request := connection.recv(len(REQUEST), socket.MSG_WAITALL):
                if received is not None:
                    received.append(request)
                if not statuses:
                    continue
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
class TestOpenLoopSender:
    def test_every_request_is_recorded_with_its_status(self) -> None:
        with answering(b"200 OK", b"503 Service Unavailable") as address:
            results = OpenLoopSender(address, [REQUEST], 1).run([0, 1_000_000, 50_000_000, 50_000_001], [0] * 4)

        assert list(results["due_ns"]) == [0, 1_000_000, 50_000_000, 50_000_001]
        assert set(results["status"]) <= {200, 503, SKIPPED}
        assert results["status"][0] == 200
        assert (results["took_ns"] >= results["late_ns"])[results["status"] > 0].all()

    def test_an_answer_without_a_kernel_timestamp_counts_until_it_is_read(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(open_loop_sender, "SO_TIMESTAMPNS", socket.SO_KEEPALIVE)
        with answering(b"200 OK") as address:
            results = OpenLoopSender(address, [REQUEST], 1).run([0], [0])

        assert list(results["status"]) == [200]
        assert (results["took_ns"] >= results["late_ns"]).all()

    def test_no_request_is_sent_before_it_is_due(self) -> None:
        with answering(b"200 OK") as address:
            results = OpenLoopSender(address, [REQUEST], 100).run([0, 20_000_000, 20_000_000], [0] * 3)

        assert (results["late_ns"] >= 0).all()
        assert list(results["status"]) == [200] * 3

    def test_each_request_is_the_one_that_the_order_names(self) -> None:
        received: list[bytes] = []
        with answering(b"200 OK", received=received) as address:
            results = OpenLoopSender(address, [REQUEST, REQUEST.upper()], 1).run(
                [0, 50_000_000, 100_000_000], [0, 1, 0]
            )

        assert list(results["which"]) == [0, 1, 0]
        assert received == [REQUEST, REQUEST.upper(), REQUEST]

    def test_a_request_is_skipped_while_every_connection_is_in_use(self) -> None:
        with answering() as address:
            open_loop = OpenLoopSender(address, [REQUEST], 1)
            open_loop.linger_s = 0.0
            results = open_loop.run([0, 0], [0, 0])

        assert list(results["status"]) == [BROKEN, SKIPPED]
        assert list(results["took_ns"]) == [0, 0]

    def test_a_connection_that_is_closed_without_an_answer_is_broken(self) -> None:
        with answering(b"") as address:
            results = OpenLoopSender(address, [REQUEST], 100).run([0, 1_000_000], [0, 0])

        assert list(results["status"]) == [BROKEN, BROKEN]


def open_loop_result(**answers: Any) -> OpenLoopResult:
    return OpenLoopResult(records(**answers), connections=1100, cpu_us=9.0, load_cpu_us=30.0)


class TestOpenLoopResult:
    def test_latency_is_measured_from_when_the_request_was_due(self) -> None:
        results = open_loop_result(s200=(100, 7))
        results.records["late_ns"] = 2e6

        assert (results.latency_ms(0.5), results.server_latency_ms(0.5), results.lateness_ms(0.5)) == (7, 5, 2)

    def test_latencies_are_reported_by_status(self) -> None:
        results = open_loop_result(s200=(100, 7), s503=(100, 1))

        assert (results.latency_ms(0.99), results.latency_ms(0.99, 503), results.latency_ms(0.99, 500)) == (7, 1, 0)

    def test_unsent_requests_are_skipped_and_unanswered_ones_unexpected(self) -> None:
        results = open_loop_result(**{"s200": (5, 1), "s500": (4, 1), f"s{BROKEN}": (3, 0), f"s{SKIPPED}": (2, 0)})

        assert (results.skipped, results.unexpected(200)) == (2, 7)

    def test_an_empty_load_has_no_latencies(self) -> None:
        results = open_loop_result(s200=(0, 1))

        assert (results.latency_ms(0.5), results.server_latency_ms(0.5), results.lateness_ms(0.5)) == (0, 0, 0)


def calm(per_s: float) -> Baseline:
    load = Load(requests_per_s=per_s, p50_ms=40, p99_ms=50, cpu_us=9, refused=0, broken=0)
    return Baseline(best_per_s=per_s, concurrent=load, single=load, rss_mib=110)


def one_round(after_per_s: float = 1000, rows: int = 1024, rss_mib: float = 130, **results: Any) -> Round:
    samples = [Sample(rows, 130)] * 60 + [Sample(rows, rss_mib)] * 20
    during = Overload(10_000, 20, open_loop_result(**(COUNTS | results)), samples, 2.5)
    return Round(calm(1000), during, calm(after_per_s))


def lines_for(*rounds: Round) -> list[str]:
    return [line for line in report(rounds).splitlines() if line.endswith(("holds", "DOES NOT HOLD"))]


def test_all_claims_may_hold() -> None:
    assert lines_for(one_round()) == [
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
        ({"s503": (81_000, 0.8)}, "offered 5.0"),
        ({"rows": 1025}, "queue: at most 1025"),
        ({"s200": (17_800, 900)}, "goodput: 89.0%"),
        ({"s503": (181_000, 11)}, "refusals: p99 11.000"),
        ({"s500": (3, 1)}, "neither 200 nor 503: 3"),
        ({"s0": (2, 0)}, "neither 200 nor 503: 2"),
        ({"rss_mib": 135}, "memory: +5.0 MiB"),
        ({"after_per_s": 800}, "after: 80.0%"),
    ],
)
def test_claims_that_do_not_hold_are_reported(change: dict[str, Any], what: str) -> None:
    failed = [line for line in lines_for(one_round(**change)) if line.endswith("DOES NOT HOLD")]

    assert [line.startswith(what) for line in failed] == [True]


def test_an_overload_that_refused_nothing_says_nothing_about_refusals() -> None:
    assert "refusals: there were none: DOES NOT HOLD" in lines_for(one_round(s200=(200_000, 900), s503=(0, 0.8)))


def test_one_slow_round_does_not_change_the_median() -> None:
    slow = one_round(after_per_s=800, s200=(15_000, 900), s503=(181_000, 11))

    assert all(line.endswith(": holds") for line in lines_for(one_round(), slow, one_round()))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rows": 1025}, "queue: at most 1025"),
        ({"s500": (3, 1)}, "neither 200 nor 503: 3"),
        ({"rss_mib": 135}, "memory: +5.0 MiB"),
    ],
)
def test_a_violation_in_any_round_is_reported(change: dict[str, Any], what: str) -> None:
    failed = [line for line in lines_for(one_round(), one_round(**change), one_round()) if "NOT" in line]

    assert [line.startswith(what) for line in failed] == [True]


def test_cores_in_use_are_counted_until_the_queue_was_empty() -> None:
    during = Overload(10_000, 20, open_loop_result(**COUNTS), [Sample(0, 130)] * 8, 20)

    # 200,000 requests of 9 and 30 us in 40 s
    assert during.cores_used == pytest.approx((0.045, 0.15))


def test_the_deep_model_accepts_any_number_of_rows() -> None:
    session = onnxruntime.InferenceSession(models.deep().SerializeToString(), providers=["CPUExecutionProvider"])

    for rows in (1, 3):
        (output,) = session.run(None, {"input": np.ones((rows, 64), np.float32)})

        assert output.shape == (rows, 8)
        assert np.isfinite(output).all()


@pytest.mark.parametrize("text", ["0", "1", "1.5"])
def test_an_overload_without_a_second_that_counts_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        overload_seconds(text)


def test_an_overload_of_two_seconds_has_one_that_counts() -> None:
    assert overload_seconds("2") == 2
