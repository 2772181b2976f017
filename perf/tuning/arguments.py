"""Arguments: the flags of `penstock perf tune`: its own, and those of `penstock perf`, which also apply."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.perf.numbers import above_zero, at_least_one
from penstock.perf.profiling import flags
from penstock.perf.profiling.command_line import options as options_of
from penstock.perf.profiling.flags import UsageError
from penstock.perf.profiling.options import Options

from .knobs import KNOBS

WINDOW_MS = 2000
PERCENTILE = 99
MIB = 1 << 20
_PERF = """
The flags of `penstock perf` also apply: -m, -u, -i, -b, --input-data, --shape, TLS, headers and so on. Among them:
  -p MS                     duration of one measurement, without warm-up (default 2000)
  --concurrency-range A:B   closed loop: concurrent requests, or the range searched for a sufficient one (default 1:64)
  --request-rate-range A:B  open loop: requests per second; one rate without a target: minimize latency at that rate
  --percentile P            latency percentile to optimize (default 99)
  --request-distribution    poisson, the default, or constant
"""


@dataclass(frozen=True, slots=True)
class Tuning:
    """The settings of a search. `target_ms` None: maximize throughput; `cores` 0: those of this machine.

    `closed`: the load is concurrent requests, not requests per second; `ranged`: its range was given.
    """

    options: Options
    out: Path
    target_ms: float | None = None
    percentile: int = PERCENTILE
    memory_bytes: float | None = None
    over: tuple[str, ...] = KNOBS
    budget_s: float = 600.0
    cores: int = 0
    window_ms: int = WINDOW_MS
    apply: bool = False
    closed: bool = True
    ranged: bool = False


def parser() -> argparse.ArgumentParser:
    """Return the parser of its own flags."""
    made = argparse.ArgumentParser(
        "penstock perf tune",
        description="Search for a better model configuration on a live server, and write it with the measurements.",
        epilog=_PERF,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for the results")
    made.add_argument("--latency-target", type=above_zero, metavar="MS", help="maximize throughput within this latency")
    made.add_argument(
        "--memory-budget", type=above_zero, metavar="MIB", help="exclude settings that exceed this server size"
    )
    made.add_argument("--over", type=_knobs, default=KNOBS, metavar="KNOB,...", help=f"search over: {', '.join(KNOBS)}")
    made.add_argument(
        "--budget-minutes", type=above_zero, default=10.0, metavar="N", help="time limit in minutes (default 10)"
    )
    made.add_argument(
        "--cores", type=at_least_one, default=0, metavar="N", help="the server's cores (default: this machine's)"
    )
    made.add_argument("--apply", action="store_true", help="keep the best configuration loaded, not the original one")
    return made


def tuning(words: Sequence[str], warn: Callable[[str], None] = lambda line: None) -> Tuning:
    """Parse the arguments. Raises: UsageError; SystemExit for --help and for errors in its own flags."""
    own, rest = parser().parse_known_args(list(words))
    given = {key for key, _ in flags.split(rest)[0]}
    options = options_of(rest, warn)
    for key in ("request-intervals", "request-count", "binary-search", "latency-threshold"):
        if key in given:
            raise UsageError(f"--{key} is not for tune: it chooses loads itself, by --latency-target")
    target_ms = own.latency_target or options.target_ms
    ranged = bool(given & {"concurrency-range", "request-rate-range", "t", "c"})
    closed = "request-rate-range" not in given and (ranged or target_ms is None)
    options = replace(
        options,
        poisson=options.poisson or "request-distribution" not in given,
        command=("penstock", "perf", "tune", *_shown(words, options)),
    )
    return Tuning(
        options=options,
        out=own.out,
        target_ms=target_ms,
        percentile=options.rule.percentile or PERCENTILE,
        memory_bytes=own.memory_budget * MIB if own.memory_budget else None,
        over=own.over,
        budget_s=own.budget_minutes * 60,
        cores=own.cores,
        window_ms=options.rule.interval_ms if "measurement-interval" in given else WINDOW_MS,
        apply=own.apply,
        closed=closed,
        ranged=ranged,
    )


def _shown(words: Sequence[str], options: Options) -> Sequence[str]:
    """Return the words without what `options.command` hides."""
    hidden = {told for told in options.command if told.endswith(":...")}
    return [next((each for each in hidden if word.startswith(each[:-3])), word) for word in words]


def _knobs(word: str) -> tuple[str, ...]:
    found = tuple(each for each in word.split(",") if each)
    if not found or not set(found) <= set(KNOBS):
        raise argparse.ArgumentTypeError(f"wanted some of {', '.join(KNOBS)}")
    return found
