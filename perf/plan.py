"""`penstock plan`: predicts what a measured model does under a load, and how many devices a target takes.

    penstock plan --costs http://127.0.0.1:8000/v2/models/mlp/stats --rate 50000 --target-ms 20

Run times come from a server's statistics and are simulated with the server's own Scheduler (simulator/). The load is
split among the devices at random: with Poisson arrivals, each of n devices then gets Poisson arrivals at 1/n of the
rate, exactly, and with any others a random n-th, so one device is simulated, however many there are. The front end is
included if the cost of a request to it is given: one server process per device.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.batching.spec import BatchPolicy

from .argument_types import non_negative_float, positive_int, share
from .simulator.arrivals import SHAPELESS, Arrivals, Kind, bursty, poisson, recorded
from .simulator.front_end import FrontCosts, simulate_server
from .simulator.measured_run_times import MeasuredModel, read_costs
from .simulator.simulation import REFUSED, Result, simulate

REQUESTS, MAX_REQUESTS = 20_000, 100_000
"""The number simulated for each figure; more, up to the maximum, if they arrive in under `MIN_SECONDS`, which is forty
bursts.
"""
MIN_SECONDS = 8.0
LOW_LOAD = 0.8
"""The load, as a fraction of capacity, that the default number of devices is chosen for."""
SHARES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
MAX_DEVICES = 1 << 20
FRONT_END_PER_S = 80_000
"""Small requests that one server process accepts, on a quiet core (docs/performance.md)."""
FETCH_TIMEOUT_S = 10.0
MAX_REPLY_BYTES = 500
"""Quoted from a server's reply that holds no costs."""
USAGE_STATUS = 2


class PlanError(Exception):
    """The arguments cannot be planned with."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """One device under one load. Units: `requests_per_s` of this device; `in_time`: as a fraction of its requests."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    rows_per_batch: float
    busy: float
    refused: float
    in_time: float


@dataclass(frozen=True, slots=True)
class Load:
    """The load to plan for: `draw` returns the arrivals at one of n devices."""

    requests_per_s: float
    rows: int
    draw: Callable[[int], list[Arrivals]]


def load_of(text: str, rate_per_s: float, rows: int) -> Load:
    """Make the load of `--arrivals`: "poisson", "bursty", or "trace:FILE" with a time in seconds on each line.

    A trace is slowed down or sped up to `rate_per_s`, unless that is 0. Raises: PlanError.
    """
    kinds = (Kind(rows),)
    if text in {"poisson", "bursty"}:
        make_arrivals = poisson if text == "poisson" else bursty
        if rate_per_s <= 0:
            raise PlanError("--rate says how many requests come per second, and must be above 0")

        def split(devices: int) -> list[Arrivals]:
            rate = rate_per_s / devices
            return [make_arrivals(rate, max(REQUESTS / rate, min(MIN_SECONDS, MAX_REQUESTS / rate)), kinds)]

        return Load(rate_per_s, rows, split)
    if not text.startswith("trace:"):
        raise PlanError(f"--arrivals {text}: poisson, bursty or trace:FILE")
    trace = _trace(Path(text.removeprefix("trace:")), rate_per_s, kinds)

    def thin(devices: int) -> list[Arrivals]:
        if devices == 1:
            return [trace]
        samples = min(max(round(REQUESTS * devices / len(trace)), 1), devices)
        return [trace.thinned(1 / devices, seed) for seed in range(samples)]

    return Load(len(trace) / trace.seconds, rows, thin)


def _trace(path: Path, rate_per_s: float, kinds: Sequence[Kind]) -> Arrivals:
    try:
        times = [float(line) for line in path.read_text("utf-8").split()]
        arrivals = recorded(times, kinds)
        return (
            recorded(np.array(times) * len(arrivals) / arrivals.seconds / rate_per_s, kinds) if rate_per_s else arrivals
        )
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error


class Plan:
    """Queries the simulator about one model under one load, and caches the results.

    `front_us`: CPU time of the server's event loop for a request; 0 leaves the front end out.
    """

    def __init__(self, measured: MeasuredModel, load: Load, target_ms: float = 0.0, front_us: float = 0.0) -> None:
        self._run_times = measured.run_times
        self._front = FrontCosts.split(1000 * front_us) if front_us else None
        self._load = load
        self._within_ns = target_ms * 1e6 or float("inf")
        self._policy = BatchPolicy(max_batch_rows=max(measured.max_rows, load.rows))
        self.knee_rows, device_rows_per_s = measured.run_times.knee(SHAPELESS, self._policy.max_batch_rows or 1)
        front_rows_per_s = load.rows * 1e6 / front_us if front_us else math.inf
        self.knee_rows_per_s = min(device_rows_per_s, front_rows_per_s)
        self.knee_by = "device" if device_rows_per_s <= front_rows_per_s else "front end"
        self.on_devices = cache(self._on_devices)

    @property
    def min_devices(self) -> float:
        """How many devices the load keeps busy without a pause."""
        return self._load.requests_per_s * self._load.rows / self.knee_rows_per_s

    def _on_devices(self, devices: int) -> Outlook:
        """Simulate one of `devices` devices."""
        return self._summarize([self._simulate(each) for each in self._load.draw(devices)])

    def _simulate(self, arrivals: Arrivals) -> Result:
        if self._front is None:
            return simulate(arrivals, self._policy, self._run_times)
        return simulate_server(arrivals, self._policy, self._run_times, self._front)

    def curve(self) -> list[Outlook]:
        """Simulate one device under Poisson arrivals, from a low load to nearly its capacity."""
        kinds, outlooks = (Kind(self._load.rows),), []
        for busy in SHARES:
            rate = busy * self.knee_rows_per_s / self._load.rows
            outlooks.append(self._summarize([self._simulate(poisson(rate, REQUESTS / rate, kinds))]))
        return outlooks

    def _summarize(self, results: Sequence[Result]) -> Outlook:
        latency_ns = np.concatenate([result.latency_ns for result in results])
        count = max(sum(len(result.arrivals) for result in results), 1)
        p50_ms, p99_ms = (np.quantile(latency_ns, (0.5, 0.99)) / 1e6).tolist() if len(latency_ns) else (0.0, 0.0)
        return Outlook(
            requests_per_s=count / sum(result.arrivals.seconds for result in results),
            p50_ms=p50_ms,
            p99_ms=p99_ms,
            rows_per_batch=float(np.mean([result.rows_per_batch for result in results])),
            busy=float(np.mean([result.utilization for result in results])),
            refused=sum(result.count(REFUSED) for result in results) / count,
            in_time=int((latency_ns <= self._within_ns).sum()) / count,
        )

    def devices(self, attain: float) -> int:
        """Return the fewest devices that serve a fraction `attain` of all requests in time; 0 if no number does.

        The search is between the number that the load keeps busy and the number that leaves each almost idle.
        """
        low, high = max(math.ceil(self.min_devices) - 1, 0), max(math.ceil(self.min_devices), 1)
        while self.on_devices(high).in_time < attain:
            if high > max(64 * self.min_devices, 2) or high > MAX_DEVICES:
                return 0
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.on_devices(middle).in_time >= attain else (middle, high)
        return high


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns: its exit status."""
    args = _parser().parse_args(argv)
    try:
        measured = _measured(args.costs)
        load = load_of(args.arrivals, args.rate, args.rows)
        plan = Plan(measured, load, args.target_ms, args.front_us)
        answers = _answers(plan, args)
    except PlanError as error:
        print(f"penstock plan: {error}", file=sys.stderr)
        return USAGE_STATUS
    print(json.dumps(answers, indent=2) if args.json else _text(answers))
    return 0


def _answers(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    devices = args.devices or max(math.ceil(plan.min_devices / LOW_LOAD), 1)
    answers: dict[str, Any] = {
        "knee": {"rows_per_batch": plan.knee_rows, "rows_per_s": plan.knee_rows_per_s, "by": plan.knee_by},
        "front_us": args.front_us,
        "curve": [asdict(outlook) for outlook in plan.curve()],
        "load": {"devices": devices, "each": asdict(plan.on_devices(devices))},
    }
    if args.target_ms:
        fewest = plan.devices(args.attain)
        answers["target"] = {"ms": args.target_ms, "attain": args.attain, "devices": fewest}
        tried = {"each": fewest, "with_one_less": fewest - 1}
        answers["target"] |= {name: asdict(plan.on_devices(count)) for name, count in tried.items() if count > 0}
    return answers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="penstock plan", allow_abbrev=False,
        description="Predict the latency and throughput of a measured model, and the number of devices for a target.",
    )  # fmt: skip
    parser.add_argument("--costs", required=True, metavar="URL|FILE", help="a model's statistics, or a cost table")
    parser.add_argument(
        "--rate", type=non_negative_float, default=0.0, metavar="N", help="requests per second over all devices"
    )
    parser.add_argument(
        "--arrivals", default="poisson", metavar="HOW", help="poisson, bursty or trace:FILE (default: poisson)"
    )
    parser.add_argument("--rows", type=positive_int, default=1, metavar="N", help="rows per request (default: 1)")
    parser.add_argument(
        "--front-us",
        type=non_negative_float,
        default=0.0,
        metavar="US",
        help="event loop time per request, in microseconds",
    )
    parser.add_argument(
        "--devices", type=positive_int, metavar="N", help="number of devices (default: enough for 80%% load)"
    )
    parser.add_argument(
        "--target-ms",
        type=non_negative_float,
        default=0.0,
        metavar="MS",
        help="find the number of devices that meet MS",
    )
    parser.add_argument(
        "--attain", type=share, default=0.99, metavar="P", help="fraction answered in time (default: 0.99)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _measured(source: str) -> MeasuredModel:
    try:
        return read_costs(_fetch(source))
    except ValueError as error:
        raise PlanError(str(error)) from error


def _fetch(source: str) -> str:
    try:
        if source.startswith(("http://", "https://")):
            with urllib.request.urlopen(source, timeout=FETCH_TIMEOUT_S) as answer:  # noqa: S310 - the scheme is checked
                return str(answer.read(), "utf-8")
        return Path(source).read_text("utf-8")
    except urllib.error.HTTPError as error:
        with error:
            text = str(error.read(MAX_REPLY_BYTES), "utf-8", "replace")
        raise PlanError(f"--costs {source}: {error}: {text}") from error
    except (OSError, urllib.error.URLError) as error:
        raise PlanError(f"--costs {source}: {error}") from error


def _text(answers: Mapping[str, Any]) -> str:
    knee = answers["knee"]
    explanation = (
        f"in batches of {knee['rows_per_batch']}" if knee["by"] == "device" else "all that its front end takes in"
    )
    lines = [
        f"one device: at most {knee['rows_per_s']:,.0f} rows/s, {explanation}",
        f"{'requests/s':>12} {'p50 ms':>8} {'p99 ms':>8} {'rows/batch':>10} {'busy':>5}",
    ]
    for each in answers["curve"]:
        line = f"{each['requests_per_s']:>12,.0f} {each['p50_ms']:>8.2f} {each['p99_ms']:>8.2f}"
        lines.append(f"{line} {each['rows_per_batch']:>10.1f} {each['busy']:>5.0%}")
    if not answers["front_us"] and knee["rows_per_s"] > FRONT_END_PER_S:
        lines.append(f"devices alone, see --front-us: one front end takes in some {FRONT_END_PER_S:,} small requests/s")
    load = answers["load"]
    lines.append(f"the load on {_devices(load['devices'])}: {_describe(load['each'])}")
    target = answers.get("target")
    if target:
        goal = f"{100 * target['attain']:.6g}% within {target['ms']:g} ms"
        lines.append(f"{goal}: {_devices(target['devices']) if target['devices'] else 'cannot be had'}")
        if "each" in target:
            lines.append(f"  {_describe(target['each'])}, {target['each']['in_time']:.2%} in time")
        if "with_one_less" in target:
            lines.append(f"  with one less: {target['with_one_less']['in_time']:.2%} in time")
    return "\n".join(lines)


def _devices(count: int) -> str:
    return f"{count:,} device{'s' if count > 1 else ''}"


def _describe(outlook: Mapping[str, Any]) -> str:
    text = f"{outlook['requests_per_s']:,.0f} requests/s each, p50 {outlook['p50_ms']:.2f} ms"
    text += f", p99 {outlook['p99_ms']:.2f} ms"
    return text + (f", {outlook['refused']:.1%} refused" if outlook["refused"] else "")


if __name__ == "__main__":
    sys.exit(main())
