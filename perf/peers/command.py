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
    made = argparse.ArgumentParser(
        prog="penstock perf peers",
        description="Install other servers, each in its own environment, serve the same models with each, and print "
        "one table: requests/s, p50, p99, server CPU per request, memory.",
    )
    made.add_argument(
        "--peers", type=_choices_of(PEERS), default=tuple(PEERS), metavar="A,B", help=f"any of {', '.join(PEERS)}"
    )
    made.add_argument(
        "--models", type=_choices_of(MODELS), default=MODELS, metavar="A,B", help=f"any of {', '.join(MODELS)}"
    )
    made.add_argument(
        "--wires", type=_choices_of(KINDS), default=KINDS, metavar="A,B", help=f"any of {', '.join(KINDS)}"
    )
    made.add_argument(
        "--concurrency", type=_counts, default=(1, 8, 32), metavar="N,M", help="concurrent requests (default: 1,8,32)"
    )
    made.add_argument("--rounds", type=positive_int, default=3, help="runs per peer; medians are reported (3)")
    made.add_argument("--seconds", type=_seconds, default=1.2, help="load per run in seconds (1.2)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the full results")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables into this page")
    made.add_argument(
        "--folder",
        type=Path,
        default=environments.DEFAULT_FOLDER,
        help=f"folder of the environments ({environments.DEFAULT_FOLDER})",
    )
    made.add_argument("--keep", action="store_true", help="keep the servers' working folders, with their logs")
    made.add_argument("--list", action="store_true", help="list the peers and how they are set up")
    return made


def _choices_of(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def chosen(text: str) -> tuple[str, ...]:
        words = [word.strip() for word in text.split(",") if word.strip()]
        unknown = [word for word in words if word not in known]
        if unknown or not words:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'none'}: not of {', '.join(known)}")
        return tuple(word for word in known if word in words)

    return chosen


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({positive_int(word) for word in text.split(",")}))


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.1 <= found <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, from 0.1 to 3600")
    return found


def main(words: Sequence[str]) -> int:
    """Install, measure, print and write. Returns: the exit status."""
    asked = parser().parse_args(words)
    if asked.list:
        _list(asked.folder)
        return _DONE
    plan = Plan(asked.models, asked.wires, asked.concurrency, asked.rounds, asked.seconds, asked.keep)
    peers = [PEERS[name] for name in asked.peers if plan.wires(PEERS[name])]
    found = Results(
        made_at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=shlex.join(["penstock", "perf", "peers", *words]),
        rounds=plan.rounds,
        seconds=plan.seconds,
        machine=environment.machine() | {"python": f"CPython {platform.python_version()}"},
        configurations={peer.name: peer.configuration for peer in peers},
    )
    began = time.monotonic()
    before = {number: signal.signal(number, _interrupt) for number in _STOPS}
    try:
        _run(plan, peers, asked.folder, found)
    except KeyboardInterrupt:
        found.interrupted = True
    except reference_answers.MissingModelsError as error:
        print(f"penstock perf peers: {error}", file=sys.stderr)
        return _FAILED
    finally:
        for number, former in before.items():
            signal.signal(number, former)
        found.took_s = time.monotonic() - began
    _write_results(found, asked)
    if found.interrupted:
        return _INTERRUPTED
    return _DONE if any(cell.measured for cell in found.cells) else _FAILED


def _interrupt(*_: object) -> None:
    """Interrupt the run once: a second signal while servers are being stopped would leave some of them."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    print("ending the servers", file=sys.stderr, flush=True)
    raise KeyboardInterrupt


def _run(plan: Plan, peers: Sequence[Peer], folder: Path, found: Results) -> None:
    models = reference_answers.prepare(plan.models)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", file=sys.stderr, flush=True)

    ready: dict[str, tuple[Peer, Environment]] = {}
    for peer in peers:
        try:
            wanted = environments.requirements(peer, RUNTIME)
            place = environments.provide(peer, wanted, folder, partial(_named, say, peer.name))
        except InstallError as error:
            found.failed[peer.name] = str(error)
            say(f"{peer.name}: {error}")
            continue
        ready[peer.name] = peer, place
        names = dict.fromkeys((peer.package, *_SHOWN_PACKAGES))
        found.versions[peer.name] = {name: place.versions.get(name, "?") for name in names}
    say(f"measuring takes about {plan.estimate_s([peer for peer, _ in ready.values()]) / 60:.0f} minutes")
    measure(plan, ready, models, found, say)


def _named(say: Callable[[str], None], name: str, text: str) -> None:
    say(f"{name}: {text}")


def _write_results(found: Results, asked: Any) -> None:
    for line in tables.terminal(found):
        print(line)
    if asked.json:
        results.write(found, asked.json)
    if asked.markdown:
        tables.write_markdown(found, asked.markdown)


def _list(folder: Path) -> None:
    for peer in PEERS.values():
        wanted = environments.requirements(peer, RUNTIME)
        there = not wanted or environments.is_current(folder.resolve() / peer.name, wanted)
        print(f"{peer.name}: {', '.join(wanted) or 'this environment'} ({'installed' if there else 'not installed'})")
        print(f"    wires: {', '.join(wire.says for wire in peer.wires)}")
        print(f"    {peer.configuration}")
