"""Accuracy: checks the load generator's measurements. `python -m penstock.perf.generator_accuracy`, about 7 minutes.

Four parts: `theory`, an open loop against a virtual queue with known sojourn times; `clients`, requests/s beside wrk
and h2load; `analyzer`, every mode that perf_analyzer has too, beside it; `speed`, what one process can drive. Each line
states a claim and whether it holds; the machine must be idle otherwise. The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import signal
from collections.abc import Callable, Iterator

from penstock.perf.claims import FAILS

from . import analyzer, clients, theory
from .server import PROTOCOLS


def _parts(quick: bool) -> dict[str, Callable[[], Iterator[str]]]:
    return {
        "theory": lambda: theory.report(PROTOCOLS, 4.0 if quick else theory.SECONDS),
        "clients": lambda: clients.clients(*((1, 1) if quick else (3, 3))),
        "analyzer": lambda: analyzer.report(quick=quick),
        "speed": lambda: clients.speed(*((3, 0.5) if quick else (9, 1.0))),
    }


def main() -> int:
    """Print the lines as they come. Returns: the exit status."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.generator_accuracy", description=__doc__)
    names = tuple(_parts(quick=False))
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="the parts to run")
    parser.add_argument("--quick", action="store_true", help="short runs, for trying: their noise is above 5%%")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the servers
    parts = _parts(args.quick)
    broken = 0
    for line in itertools.chain.from_iterable(parts[name]() for name in args.only):
        print(line, flush=True)
        broken += FAILS in line
    return 1 if broken else 0
