"""`penstock perf peers`: Penstock and other servers under the same load, in one table from one run."""

from __future__ import annotations

import argparse
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from penstock.perf.argument_types import positive_int
from penstock.perf.profiling import environment

from . import environments, reference_answers, results, tables
from .environments import Environment, InstallError
from .peer import Peer
from .reference_answers import MODELS
from .results import Results
from .roster import PEERS, RUNTIME
from .rounds import Plan, measure
from .wires import KINDS

_DONE, _FAILED, _INTERRUPTED = 0, 1, 130
_STOPS = (signal.SIGINT, signal.SIGTERM)
_SHOWN_PACKAGES = ("onnxruntime", "numpy")


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    command_parser = argparse.ArgumentParser(
        prog="penstock perf peers",
        description="Install other servers, each in its own environment, serve the same models with each, and print "
        "one table: requests/s, p50, p99, server CPU per request, memory.",
    )
    command_parser.add_argument(
        "--peers", type=_choices_of(PEERS), default=tuple(PEERS), metavar="A,B", help=f"any of {', '.join(PEERS)}"
    )
    command_parser.add_argument(
        "--models", type=_choices_of(MODELS), default=MODELS, metavar="A,B", help=f"any of {', '.join(MODELS)}"
    )
    command_parser.add_argument(
        "--wires", type=_choices_of(KINDS), default=KINDS, metavar="A,B", help=f"any of {', '.join(KINDS)}"
    )
    command_parser.add_argument(
        "--concurrency", type=_counts, default=(1, 8, 32), metavar="N,M", help="concurrent requests (default: 1,8,32)"
    )
    command_parser.add_argument(
        "--rounds", type=positive_int, default=3, help="runs per peer; medians are reported (3)"
    )
    command_parser.add_argument("--seconds", type=_seconds, default=1.2, help="load per run in seconds (1.2)")
    command_parser.add_argument("--json", type=Path, metavar="FILE", help="write the full results")
    command_parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables into this page")
    command_parser.add_argument(
        "--folder",
        type=Path,
        default=environments.DEFAULT_FOLDER,
        help=f"folder of the environments ({environments.DEFAULT_FOLDER})",
    )
    command_parser.add_argument(
        "--keep", action="store_true", help="keep the servers' working folders, with their logs"
    )
    command_parser.add_argument("--list", action="store_true", help="list the peers and how they are set up")
    return command_parser


def _choices_of(choices: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def chosen(text: str) -> tuple[str, ...]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in names if name not in choices]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'none'}: not of {', '.join(choices)}")
        return tuple(name for name in choices if name in names)

    return chosen


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive_int(word) for word in text.split(",")}))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, from 0.1 to 3600")
    return seconds


def main(arguments: Sequence[str]) -> int:
    """Install, measure, print and write. Returns: the exit status."""
    args = parser().parse_args(arguments)
    if args.list:
        _list(args.folder)
        return _DONE
    plan = Plan(args.models, args.wires, args.concurrency, args.rounds, args.seconds, args.keep)
    peers = [PEERS[name] for name in args.peers if plan.wires(PEERS[name])]
    results_found = Results(
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["penstock", "perf", "peers", *arguments]),
        rounds=plan.rounds,
        seconds=plan.seconds,
        machine=environment.machine() | {"python": f"CPython {platform.python_version()}"},
        configurations={peer.name: peer.configuration for peer in peers},
    )
    start_s = time.monotonic()
    before = {number: signal.signal(number, _interrupt) for number in _STOPS}
    try:
        _run(plan, peers, args.folder, results_found)
    except KeyboardInterrupt:
        results_found.interrupted = True
    except reference_answers.MissingModelsError as error:
        print(f"penstock perf peers: {error}", file=sys.stderr)
        return _FAILED
    finally:
        for number, previous_handler in before.items():
            signal.signal(number, previous_handler)
        results_found.took_s = time.monotonic() - start_s
    _write_results(results_found, args)
    if results_found.interrupted:
        return _INTERRUPTED
    return _DONE if any(cell.measured for cell in results_found.cells) else _FAILED


def _interrupt(*_: object) -> None:
    """Interrupt the run once: a second signal while servers are being stopped would leave some of them."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    print("ending the servers", file=sys.stderr, flush=True)
    raise KeyboardInterrupt


def _run(plan: Plan, peers: Sequence[Peer], folder: Path, results_found: Results) -> None:
    models = reference_answers.prepare(plan.models)
    start_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start_s:5.0f} s] {text}", file=sys.stderr, flush=True)

    ready: dict[str, tuple[Peer, Environment]] = {}
    for peer in peers:
        try:
            requirements = environments.requirements(peer, RUNTIME)
            environment = environments.provide(peer, requirements, folder, partial(_named, say, peer.name))
        except InstallError as error:
            results_found.failed[peer.name] = str(error)
            say(f"{peer.name}: {error}")
            continue
        ready[peer.name] = peer, environment
        names = dict.fromkeys((peer.package, *_SHOWN_PACKAGES))
        results_found.versions[peer.name] = {name: environment.versions.get(name, "?") for name in names}
    say(f"measuring takes about {plan.estimate_s([peer for peer, _ in ready.values()]) / 60:.0f} minutes")
    measure(plan, ready, models, results_found, say)


def _named(report_progress: Callable[[str], None], name: str, text: str) -> None:
    report_progress(f"{name}: {text}")


def _write_results(results_found: Results, args: Any) -> None:
    for line in tables.terminal(results_found):
        print(line)
    if args.json:
        results.write(results_found, args.json)
    if args.markdown:
        tables.write_markdown(results_found, args.markdown)


def _list(folder: Path) -> None:
    for peer in PEERS.values():
        requirements = environments.requirements(peer, RUNTIME)
        is_installed = not requirements or environments.is_current(folder.resolve() / peer.name, requirements)
        print(
            f"{peer.name}: {', '.join(requirements) or 'this environment'} "
            f"({'installed' if is_installed else 'not installed'})"
        )
        print(f"    wires: {', '.join(wire.says for wire in peer.wires)}")
        print(f"    {peer.configuration}")
