"""Truth, parts 2 and 4: the closed loop beside wrk and h2load, and how fast one process can be. Called by truth.py.

Where a server that does its best shares two cores with its client, requests/s are those of the client as much as of the
server: so what must agree is measured on servers that hold answers back and leave the cores idle. One has a place for
everybody: what a client loses between an answer and the next request shows at once. One is a queue.
All clients take turns; figures are medians of the rounds.
"""

from __future__ import annotations

import re
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .generator.fleet import Fleet, fleet
from .generator.orders import Load
from .load import HOST, Process, drive
from .overload import verdict
from .truth_server import CALL, METHOD, PATH, PROTOCOLS, bare, message, payloads, target

WITHIN = 0.05
LEAST_PER_S = 40_000
WARM_UP_S = 0.5
FAST_CONCURRENCY, STREAMS = 64, 8


@dataclass(frozen=True, slots=True)
class Kept:
    """A server and how many requests are kept under way: `words` are the server's flags."""

    name: str
    words: tuple[object, ...]
    concurrency: int


HELD = (
    Kept("each answer after 20 ms", ("--delay-us", 20_000), 32),
    Kept("a queue of 2 ms each", ("--law", "deterministic", "--mean-us", 2000), 8),
)
FREE = Kept("a server at its best", (), FAST_CONCURRENCY)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one client saw. Units: CPU microseconds per request, of the client and of the server."""

    requests_per_s: float
    cpu_us: float
    server_cpu_us: float


Client = Callable[[Process, int, int], Seen]
"""Keeps so many requests under way for so many seconds."""


def _compiled(run: Callable[[], tuple[float, float]], server: Process) -> Seen:
    """Run a program that gives how many requests were answered, and in how many seconds."""
    before, server_s = resource.getrusage(resource.RUSAGE_CHILDREN), server.cpu_s()
    count, seconds = run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Seen(count / seconds, cpu_s / count * 1e6, (server.cpu_s() - server_s) / count * 1e6)


def wrk(server: Process, concurrency: int, seconds: int) -> Seen:
    """Let wrk do it."""

    def run() -> tuple[float, float]:
        load = drive(server, CALL, concurrency, seconds)
        if load.refused or load.broken:
            raise RuntimeError(f"wrk: {load.refused + load.broken} requests failed")
        return load.requests_per_s * seconds, seconds

    return _compiled(run, server)


def h2load(server: Process, concurrency: int, seconds: int, *, grpc: bool) -> Seen:
    """Let h2load do it. Over gRPC each connection has at most STREAMS streams."""
    with tempfile.TemporaryDirectory() as folder:
        body = Path(folder, "body")
        body.write_bytes(message() if grpc else CALL.bodies[0])
        if grpc:
            words = [f"-c{max(concurrency // STREAMS, 1)}", f"-m{min(concurrency, STREAMS)}"]
            words += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
        else:
            words = ["--h1", f"-c{concurrency}", "-H", "content-type: application/json"]
        command = ["h2load", f"-D{seconds}", "-d", str(body), *words]
        url = f"http://{HOST}:{server.port}{METHOD if grpc else PATH}"

        def run() -> tuple[float, float]:
            said = subprocess.run([*command, url], capture_output=True, text=True, check=True).stdout
            return counted(said), seconds

        return _compiled(run, server)


def counted(said: str) -> int:
    """Read how many requests h2load saw answered well. Raises: RuntimeError where any was not."""
    found = re.search(r"requests: .*?(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", said)
    if found is None or any(map(int, found.groups()[1:])):
        raise RuntimeError(f"h2load: {said[-1000:]}")
    return int(found.group(1))


def ours(server: Process, concurrency: int, seconds: int, *, protocol: str) -> Seen:
    """Let one process of our generator do it."""
    with fleet(target(server, protocol), payloads(protocol)) as running:
        running.go(Load(concurrency=concurrency))
        time.sleep(WARM_UP_S)
        running.take()
        return _window(running, server, seconds)


def _window(running: Fleet, server: Process, seconds: float) -> Seen:
    server_s = server.cpu_s()
    time.sleep(seconds)
    window = running.take()
    if window.errors or window.lost or not len(window.ends_ns):
        raise RuntimeError(f"our generator: {window.lost or dict(window.errors) or 'no answers'}")
    count = len(window.ends_ns)
    return Seen(count / window.seconds, window.cpu_s / count * 1e6, (server.cpu_s() - server_s) / count * 1e6)


def _clients(protocol: str) -> dict[str, Client]:
    ourselves = partial(ours, protocol=protocol)
    if protocol == "gRPC":
        return {"ours": ourselves, "h2load": partial(h2load, grpc=True)}
    return {"ours": ourselves, "wrk": wrk, "h2load --h1": partial(h2load, grpc=False)}


def _rounds(kept: Kept, protocol: str, rounds: int, seconds: int) -> dict[str, Seen]:
    """Let all clients take turns at one server, and give the medians."""
    found: dict[str, list[Seen]] = {name: [] for name in _clients(protocol)}
    with bare(*kept.words) as server:
        for _ in range(rounds):
            for name, client in _clients(protocol).items():
                found[name].append(client(server, kept.concurrency, seconds))
    return {
        name: Seen(
            statistics.median(each.requests_per_s for each in seen),
            statistics.median(each.cpu_us for each in seen),
            statistics.median(each.server_cpu_us for each in seen),
        )
        for name, seen in found.items()
    }


def clients(rounds: int, seconds: int) -> Iterator[str]:
    """Measure what must agree, then what each client is worth, and write the lines as they come."""
    for program, package in (("wrk", "wrk"), ("h2load", "nghttp2-client")):
        if not shutil.which(program):
            raise SystemExit(f"this needs {program}: apt-get install {package}")
    yield f"Requests/s of a closed loop, medians of {rounds} rounds of {seconds} s in turns"
    for kept in (*HELD, FREE):
        for protocol in PROTOCOLS:
            seen = _rounds(kept, protocol, rounds, seconds)
            mine = seen.pop("ours")
            words = f"{kept.name}, {kept.concurrency} under way over {protocol}: ours {_words(mine)}"
            if kept is FREE:
                yield "; ".join([words, *(f"{name} {_words(each)}" for name, each in seen.items())])
                continue
            for name, each in seen.items():
                apart = mine.requests_per_s / each.requests_per_s - 1
                yield verdict(f"{words}; {name} {_words(each)}; {apart:+.1%}", abs(apart) <= WITHIN)


def _words(seen: Seen) -> str:
    return (
        f"{seen.requests_per_s:,.0f}/s (CPU us per request: client {seen.cpu_us:.1f}, server {seen.server_cpu_us:.1f})"
    )


def speed(windows: int, seconds: float) -> Iterator[str]:
    """Let one process go as fast as it can, and write the lines as they come."""
    yield f"One process of the generator against a bare server, medians of {windows} windows of {seconds:g} s"
    for protocol in PROTOCOLS:
        with bare() as server, fleet(target(server, protocol), payloads(protocol)) as running:
            running.go(Load(concurrency=FAST_CONCURRENCY))
            time.sleep(WARM_UP_S)
            running.take()
            seen = [_window(running, server, seconds) for _ in range(windows)]
            running.halt()
        fastest = sorted(seen, key=lambda each: each.requests_per_s)[windows // 2]
        words = f"{protocol}, {FAST_CONCURRENCY} under way, at least {LEAST_PER_S:,}/s: {_words(fastest)}"
        yield verdict(words, fastest.requests_per_s >= LEAST_PER_S)
