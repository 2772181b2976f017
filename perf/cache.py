"""The cost of an answer from the response cache, over HTTP: `python -m penstock.perf.cache`.

`iris` and `mlp` are served twice, with and without a cache, and the same row is requested repeatedly, as JSON and as
binary tensors. All run in turns, round after round, and the table holds medians. CPU is the server's, user and system,
including the kernel's work for its sockets. Before the table come whole trips without sockets, as in perf/micro.py, to
which the budget applies.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import uvloop

from penstock.backends.loading import LOADERS
from penstock.batching.caching.cache import Cache
from penstock.batching.engine import Engine
from penstock.batching.spec import BatchPolicy, ModelSpec

from . import claims, models
from .calls import Call
from .micro import print_cost, trip_us
from .server_process import Process, penstock
from .wrk import Rounds, drive

BUDGET_US = 15.0
CONNECTIONS = 64
SWEEPS = 5
SIZE_BYTES = 1 << 26
WIDTHS = {"iris": 4, "mlp": 512}
HEAD = f"{'':<14}{'way':<8}{'answers/s':>10}{'p50 ms':>8}{'p99 ms':>8}{'CPU us':>8}"


@dataclass(slots=True, kw_only=True)
class Line(Rounds):
    """One model, requested in one way, with or without the cache."""

    model: str
    way: str
    cached: bool

    @property
    def served(self) -> str:
        """The name of the model on the server."""
        return f"{self.model}_cached" if self.cached else self.model

    def __str__(self) -> str:
        rate, p50_ms, p99_ms, cpu_us = map(self.median, ("requests_per_s", "p50_ms", "p99_ms", "cpu_us"))
        return f"{self.served:<14}{self.way:<8}{rate:>10,.0f}{p50_ms:>8.2f}{p99_ms:>8.2f}{cpu_us:>8.1f}"


LINES = [
    Line(model=model, way=way, cached=cached)
    for model in WIDTHS
    for way in ("json", "binary")
    for cached in (False, True)
]


def write(folder: Path) -> None:
    """Write the models, each with and without `response_cache`."""
    for name in WIDTHS:
        for served, config in ((name, ""), (f"{name}_cached", "response_cache { enable: true }")):
            models.make(folder, {served: models.MODELS[name]})
            (folder / served / "config.pbtxt").write_text(config)


def call(line: Line) -> Call:
    """Make a request for one row."""
    width = WIDTHS[line.model]
    row = np.random.default_rng(0).random((1, width), dtype=np.float32)
    entry: dict[str, object] = {"name": "input", "shape": [1, width], "datatype": "FP32"}
    path = f"/v2/models/{line.served}/infer"
    if line.way == "json":
        body = orjson.dumps({"inputs": [entry | {"data": row.ravel().tolist()}]})
        return Call(path, (body,), {"content-type": "application/json"})
    entry["parameters"] = {"binary_data_size": row.nbytes}
    text = orjson.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}})
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(text))}
    return Call(path, (text + row.tobytes(),), headers)


def measure(process: Process, line: Line, seconds: int) -> None:
    """Request one row repeatedly. Raises: RuntimeError if anything failed."""
    load = drive(process, call(line), CONNECTIONS, seconds)
    if load.refused or load.broken:
        raise RuntimeError(f"{line.served}: {load.refused} refused, {load.broken} broken")
    line.loads.append(load)


def check(process: Process, line: Line) -> None:
    """Check that with the cache only the first requests were run. Raises: RuntimeError."""
    rows, _ = process.counts(line.served)
    if line.cached and rows > 1 + CONNECTIONS:
        raise RuntimeError(f"{line.served} has run {rows} rows: its answers were not found")


async def trips(folder: Path, turn_sizes: tuple[int, ...] = (8, 64)) -> float:
    """Print the cost of whole trips without sockets, by requests per turn. Returns: the highest cost of a hit.

    All are measured one after the other, SWEEPS times, and the fastest counts: a shared machine can be slow for
    seconds.
    """
    np.seterr(all="ignore")
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    engine.cache = Cache(SIZE_BYTES)
    lines = [line for line in LINES if line.model == "iris"]
    for line in lines:
        path, policy = folder / line.served / "1" / "model.onnx", BatchPolicy(executor="loop")
        await engine.load(ModelSpec(line.served, 1, path, policy=policy, cached=line.cached))
    cases = [(line, count) for line in lines for count in turn_sizes]
    taken_us = [[await trip_us(engine, count, call(line).request()) for line, count in cases] for _ in range(SWEEPS)]
    await engine.stop(1.0)
    fastest_us = dict(zip(((line.served, line.way, count) for line, count in cases), map(min, *taken_us), strict=True))
    for (served, encoding, count), us in fastest_us.items():
        print_cost(f"whole trip, {served} {encoding}, {count} a turn", us)
    dearest_us: float = max(fastest_us[line.served, line.way, count] for line, count in cases if line.cached)
    return dearest_us


def verdict(dearest_us: float) -> str:
    """Compare the highest cost of a hit with the budget."""
    return claims.verdict(f"a hit: {dearest_us:.1f} us, at most {BUDGET_US:g}", dearest_us <= BUDGET_US)


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3, help="of load per line and round")
    args = parser.parse_args()
    lines = LINES
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        dearest_us = uvloop.run(trips(Path(folder)))
        with penstock(Path(folder), "--cache-config", f"local,size={SIZE_BYTES}") as server:
            for line in lines:  # nothing is measured that fails
                sent = call(line)
                server.request("POST", sent.path, sent.bodies[0], sent.headers)
                measure(server, line, 1)
                line.loads.clear()
            for _ in range(args.rounds):
                for line in lines:
                    measure(server, line, args.seconds)
            for line in lines:
                check(server, line)
    print("\n".join([HEAD, *map(str, lines), verdict(dearest_us)]))


if __name__ == "__main__":
    main()
