"""Arguments: the flags of `penstock perf tune`: its own, and those of `penstock perf`, which also apply."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.perf.argument_types import positive_float, positive_int
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
class TuneOptions:
    """The settings of a search. `target_ms` None: maximize throughput; `cores` 0: those of this machine.

    `closed_loop`: the load is concurrent requests, not requests per second; `has_range`: its range was given.
    """

    options: Options
    output_folder: Path
    target_ms: float | None = None
    percentile: int = PERCENTILE
    memory_bytes: float | None = None
    knobs: tuple[str, ...] = KNOBS
    budget_s: float = 600.0
    cores: int = 0
    window_ms: int = WINDOW_MS
    apply: bool = False
    closed_loop: bool = True
    has_range: bool = False


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of its own flags."""
    parser = argparse.ArgumentParser(
        "penstock perf tune",
        description="Search for a better model configuration on a live server, and write it with the measurements.",
        epilog=_PERF,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for the results")
    parser.add_argument(
        "--latency-target", type=positive_float, metavar="MS", help="maximize throughput within this latency"
    )
    parser.add_argument(
        "--memory-budget", type=positive_float, metavar="MIB", help="exclude settings that exceed this server size"
    )
    parser.add_argument(
        "--over", type=_parse_knobs, default=KNOBS, metavar="KNOB,...", help=f"search over: {', '.join(KNOBS)}"
    )
    parser.add_argument(
        "--budget-minutes", type=positive_float, default=10.0, metavar="N", help="time limit in minutes (default 10)"
    )
    parser.add_argument(
        "--cores", type=positive_int, default=0, metavar="N", help="the server's cores (default: this machine's)"
    )
    parser.add_argument("--apply", action="store_true", help="keep the best configuration loaded, not the original one")
    return parser


def parse_arguments(arguments: Sequence[str], warn: Callable[[str], None] = lambda line: None) -> TuneOptions:
    """Parse the arguments. Raises: UsageError; SystemExit for --help and for errors in its own flags."""
    own_args, other_args = make_parser().parse_known_args(list(arguments))
    given_flags = {key for key, _ in flags.split(other_args)[0]}
    options = options_of(other_args, warn)
    for key in ("request-intervals", "request-count", "binary-search", "latency-threshold"):
        if key in given_flags:
            raise UsageError(f"--{key} is not for tune: it chooses loads itself, by --latency-target")
    target_ms = own_args.latency_target or options.target_ms
    has_range = bool(given_flags & {"concurrency-range", "request-rate-range", "t", "c"})
    closed_loop = "request-rate-range" not in given_flags and (has_range or target_ms is None)
    options = replace(
        options,
        poisson=options.poisson or "request-distribution" not in given_flags,
        command=("penstock", "perf", "tune", *_redacted(arguments, options)),
    )
    return TuneOptions(
        options=options,
        output_folder=own_args.out,
        target_ms=target_ms,
        percentile=options.rule.percentile or PERCENTILE,
        memory_bytes=own_args.memory_budget * MIB if own_args.memory_budget else None,
        knobs=own_args.over,
        budget_s=own_args.budget_minutes * 60,
        cores=own_args.cores,
        window_ms=options.rule.interval_ms if "measurement-interval" in given_flags else WINDOW_MS,
        apply=own_args.apply,
        closed_loop=closed_loop,
        has_range=has_range,
    )


def _redacted(arguments: Sequence[str], options: Options) -> Sequence[str]:
    """Return the arguments without what `options.command` hides."""
    hidden = {shown for shown in options.command if shown.endswith(":...")}
    return [next((each for each in hidden if argument.startswith(each[:-3])), argument) for argument in arguments]


def _parse_knobs(text: str) -> tuple[str, ...]:
    knobs = tuple(each for each in text.split(",") if each)
    if not knobs or not set(knobs) <= set(KNOBS):
        raise argparse.ArgumentTypeError(f"wanted some of {', '.join(KNOBS)}")
    return knobs
