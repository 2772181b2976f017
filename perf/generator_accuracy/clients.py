"""Parts 2 and 4: the closed loop beside wrk and h2load, and the top speed of one process.

If a server at full speed shares two cores with its client, requests/s depend on the client as much as on the server. So
what must agree is measured on servers that hold answers back and leave the cores idle. One serves all requests in
parallel: any time that a client loses between an answer and the next request shows at once. The other is a queue. All
clients take turns; figures are medians of the rounds.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from penstock.perf import h2load
from penstock.perf.claims import verdict
from penstock.perf.generator import orders
from penstock.perf.generator.fleet import Fleet, fleet
from penstock.perf.h2load import RepeatedPost
from penstock.perf.server_process import Process
from penstock.perf.wrk import Load, drive, require_programs

from .server import CALL, PATH, PROTOCOLS, message, payloads, running_stub_server, target

WITHIN = 0.05
MIN_RATE_PER_S = 40_000
WARM_UP_S = 0.5
FAST_CONCURRENCY, STREAMS = 64, 8


@dataclass(frozen=True, slots=True)
class LoadCase:
    """A server and the number of requests kept in flight. `words` are the server's flags."""

    name: str
    words: tuple[object, ...]
    concurrency: int


PACED_CASES = (
    LoadCase("each answer after 20 ms", ("--delay-us", 20_000), 32),
    LoadCase("a queue of 2 ms each", ("--law", "deterministic", "--mean-us", 2000), 8),
)
UNLIMITED_CASE = LoadCase("a server at its best", (), FAST_CONCURRENCY)


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """One client's measurements. Units: CPU microseconds per request, of the client and of the server."""

    requests_per_s: float
    cpu_us: float
    server_cpu_us: float


Client = Callable[[Process, int, int], ClientFigures]
"""Keeps a number of requests in flight for a number of seconds."""


def _compiled(drive: Callable[[], Load], seconds: int) -> ClientFigures:
    """Drive with a program. Raises: RuntimeError if requests failed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    load = drive()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if load.refused or load.broken:
        raise RuntimeError(f"{load.refused + load.broken} requests failed")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ClientFigures(load.requests_per_s, cpu_s / (load.requests_per_s * seconds) * 1e6, load.cpu_us)


def wrk(server: Process, concurrency: int, seconds: int) -> ClientFigures:
    """Drive with wrk."""
    return _compiled(lambda: drive(server, CALL, concurrency, seconds), seconds)


def over_grpc(server: Process, concurrency: int, seconds: int) -> ClientFigures:
    """Drive with h2load, over gRPC. Each connection has at most STREAMS streams."""
    posts = RepeatedPost(
        server.port, orders.INFER, message(), max(concurrency // STREAMS, 1), min(concurrency, STREAMS)
    )
    return _compiled(lambda: h2load.drive(server, posts, seconds), seconds)


def over_http(server: Process, concurrency: int, seconds: int) -> ClientFigures:
    """Drive with h2load, over HTTP/1.1."""
    posts = RepeatedPost(server.port, PATH, CALL.bodies[0], concurrency, wire=h2load.JSON)
    return _compiled(lambda: h2load.drive(server, posts, seconds), seconds)


def ours(server: Process, concurrency: int, seconds: int, *, protocol: str) -> ClientFigures:
    """Drive with one process of our generator."""
    with fleet(target(server, protocol), payloads(protocol)) as running:
        running.start_load(orders.Load(concurrency=concurrency))
        time.sleep(WARM_UP_S)
        running.take()
        return _window(running, server, seconds)


def _window(running: Fleet, server: Process, seconds: float) -> ClientFigures:
    server_s = server.cpu_s()
    time.sleep(seconds)
    window = running.take()
    if window.errors or window.failure or not len(window.ends_ns):
        raise RuntimeError(f"our generator: {window.failure or dict(window.errors) or 'no answers'}")
    count = len(window.ends_ns)
    return ClientFigures(count / window.seconds, window.cpu_s / count * 1e6, (server.cpu_s() - server_s) / count * 1e6)


def _clients(protocol: str) -> dict[str, Client]:
    ourselves = partial(ours, protocol=protocol)
    if protocol == "gRPC":
        return {"ours": ourselves, "h2load": over_grpc}
    return {"ours": ourselves, "wrk": wrk, "h2load --h1": over_http}


def _rounds(case: LoadCase, protocol: str, rounds: int, seconds: int) -> dict[str, ClientFigures]:
    """Let all clients take turns at one server. Returns: the medians."""
    figures: dict[str, list[ClientFigures]] = {name: [] for name in _clients(protocol)}
    with running_stub_server(*case.words) as server:
        for _ in range(rounds):
            for name, client in _clients(protocol).items():
                figures[name].append(client(server, case.concurrency, seconds))
    return {
        name: ClientFigures(
            statistics.median(each.requests_per_s for each in values),
            statistics.median(each.cpu_us for each in values),
            statistics.median(each.server_cpu_us for each in values),
        )
        for name, values in figures.items()
    }


def clients(rounds: int, seconds: int) -> Iterator[str]:
    """Measure what must agree, then each client's speed, and yield the lines as they come."""
    require_programs("wrk", "h2load")
    yield f"Requests/s of a closed loop, medians of {rounds} rounds of {seconds} s in turns"
    for case in (*PACED_CASES, UNLIMITED_CASE):
        for protocol in PROTOCOLS:
            figures = _rounds(case, protocol, rounds, seconds)
            ours = figures.pop("ours")
            line = f"{case.name}, {case.concurrency} under way over {protocol}: ours {_describe(ours)}"
            if case is UNLIMITED_CASE:
                yield "; ".join([line, *(f"{name} {_describe(each)}" for name, each in figures.items())])
                continue
            for name, each in figures.items():
                difference = ours.requests_per_s / each.requests_per_s - 1
                yield verdict(f"{line}; {name} {_describe(each)}; {difference:+.1%}", abs(difference) <= WITHIN)


def _describe(figures: ClientFigures) -> str:
    cpu_us = f"client {figures.cpu_us:.1f}, server {figures.server_cpu_us:.1f}"
    return f"{figures.requests_per_s:,.0f}/s (CPU us per request: {cpu_us})"


def speed(windows: int, seconds: float) -> Iterator[str]:
    """Run one process at top speed, and yield the lines as they come."""
    yield f"One process of the generator against a bare server, medians of {windows} windows of {seconds:g} s"
    for protocol in PROTOCOLS:
        with running_stub_server() as server, fleet(target(server, protocol), payloads(protocol)) as running:
            running.start_load(orders.Load(concurrency=FAST_CONCURRENCY))
            time.sleep(WARM_UP_S)
            running.take()
            windows_figures = [_window(running, server, seconds) for _ in range(windows)]
            running.halt()
        fastest = sorted(windows_figures, key=lambda each: each.requests_per_s)[windows // 2]
        line = f"{protocol}, {FAST_CONCURRENCY} under way, at least {MIN_RATE_PER_S:,}/s: {_describe(fastest)}"
        yield verdict(line, fastest.requests_per_s >= MIN_RATE_PER_S)
