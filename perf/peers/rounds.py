"""Rounds: the same load for every peer in turns, round after round, while the others are stopped."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from penstock.perf.background_load import BackgroundLoad
from penstock.perf.generator.fleet import Fleet, FleetError, fleet
from penstock.perf.generator.orders import Load, Window
from penstock.perf.payloads.repeated import Repeated
from penstock.perf.profiling.stability import percentiles_ns
from penstock.perf.server_process import Process

from .environments import Environment
from .peer import Peer
from .process_tree import ProcessTree
from .results import Cell, Results, Sample
from .serving import CallError, Model, Server, StartError, served
from .wires import Wire

SETTLE_S = 0.25
WARM_UP_S = 1.0
SPAWN_S = 0.7
START_S = 5.0
MAX_STALL_S = 60.0
TOLERANCE = 1e-4
MAX_EXTENSION = 3
MIN_REQUESTS_PER_SLOT = 3
"""The least requests per slot in a window: with fewer, the window's edges would dominate."""
ReportProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `kinds`: of wires."""

    models: tuple[str, ...]
    kinds: tuple[str, ...]
    concurrency: tuple[int, ...]
    rounds: int
    seconds: float
    keep: bool = False

    def wires(self, peer: Peer) -> list[Wire]:
        """Return the requested wires of a peer."""
        return [wire for wire in peer.wires if wire.kind in self.kinds]

    def estimate_s(self, peers: Sequence[Peer]) -> float:
        """Estimate the duration: turns, and a start for each peer and model."""
        warm_up_s = sum(len(self.wires(peer)) for peer in peers) * (WARM_UP_S + SPAWN_S)
        turns_s = self.rounds * sum(map(self.turn_s, peers))
        return len(self.models) * (turns_s + warm_up_s + START_S * len(peers))

    def turn_s(self, peer: Peer) -> float:
        """Estimate the duration of a peer's turn."""
        return len(self.wires(peer)) * (len(self.concurrency) * (self.seconds + SETTLE_S) + SPAWN_S)


class _ServerAndGenerator(Process):
    """The server and the generator, as opposed to others. `generator_s`: its CPU time, once known."""

    def __init__(self, tree: ProcessTree) -> None:
        super().__init__(tree.pid, tree.port)
        self.generator_s = 0.0
        self._tree = tree

    def cpu_s(self) -> float:
        return self._tree.cpu_s() + self.generator_s


@dataclass(frozen=True, slots=True)
class _Participant:
    """A peer in the rounds: its server, if kept running; what yields it for a turn; and its cells by wire kind."""

    peer: Peer
    model: Model
    server: Server | None
    turn: Callable[[], contextlib.AbstractContextManager[Server]]
    cells: Mapping[str, Sequence[Cell]]


def measure(
    plan: Plan,
    peers: Mapping[str, tuple[Peer, Environment]],
    models: Mapping[str, Model],
    results: Results,
    report_progress: ReportProgress,
) -> None:
    """Measure all, model after model. Results are added at once, so that an interrupt loses none."""
    for name in plan.models:
        with contextlib.ExitStack() as stack:
            participants = []
            for peer, environment in peers.values():
                report_progress(f"{name}: {peer.name}: starting")
                start = partial(served, peer, environment, models[name], keep=plan.keep)
                try:
                    participants.append(_add_participant(plan, peer, models[name], start, stack, results))
                except StartError as error:
                    results.failed[f"{peer.name}, {name}"] = str(error)
                    report_progress(f"{name}: {peer.name}: {error}")
            stack.callback(_terminate_all, participants)
            for number in range(plan.rounds + 1):  # the first is a warm-up
                first_index = number % max(len(participants), 1)
                for participant in participants[first_index:] + participants[:first_index]:
                    _turn(plan, participant, number, report_progress)


def _add_participant(
    plan: Plan,
    peer: Peer,
    model: Model,
    start: Callable[[], contextlib.AbstractContextManager[Server]],
    stack: contextlib.ExitStack,
    results: Results,
) -> _Participant:
    with contextlib.ExitStack() as once:
        server = (once if peer.fresh else stack).enter_context(start())
        cells = {}
        for wire in plan.wires(peer):
            error = verify_answer(server, wire, model)
            cells[wire.kind] = [
                Cell(peer.name, model.name, wire.kind, wire.says, each, error=error) for each in plan.concurrency
            ]
            results.cells += cells[wire.kind]
        server.suspend()
    if peer.fresh:
        return _Participant(peer, model, None, start, cells)
    return _Participant(peer, model, server, partial(_resumed, server), cells)


def _terminate_all(participants: Sequence[_Participant]) -> None:
    """Ask all to stop concurrently, which takes no longer than the slowest."""
    for participant in participants:
        if participant.server:
            participant.server.tree.terminate()


@contextlib.contextmanager
def _resumed(server: Server) -> Iterator[Server]:
    server.resume()
    try:
        yield server
    finally:
        server.suspend()


def verify_answer(server: Server, wire: Wire, model: Model) -> str:
    """Send one row and compare with the offline answer. Returns: what is wrong, or ""."""
    try:
        answer = server.ask(wire, model.name, model.rows[0])
    except CallError as error:
        return str(error)
    expected = model.answers[0].ravel()
    if answer.shape != expected.shape:
        return f"the answer has {answer.size} numbers instead of {expected.size}"
    max_deviation = float(np.max(np.abs(answer - expected) / np.maximum(np.abs(expected), 1.0)))
    return "" if max_deviation <= TOLERANCE else f"the answer is {max_deviation:.2g} apart from the offline one"


def _turn(plan: Plan, participant: _Participant, number: int, report_progress: ReportProgress) -> None:
    wires = [
        wire for wire in plan.wires(participant.peer) if not all(cell.error for cell in participant.cells[wire.kind])
    ]
    if not wires or (participant.peer.fresh and not number):
        return
    try:
        with (
            participant.turn() as server,
            _time_limit(server, MAX_EXTENSION * plan.turn_s(participant.peer) + MAX_STALL_S),
        ):
            for wire in wires:
                label = f"round {number} of {plan.rounds}" if number else "warming up"
                report_progress(f"{participant.model.name}: {label}: {participant.peer.name}, {wire.says}")
                _load(plan, participant, server, wire, is_counted=bool(number))
    except StartError as error:
        for cell in itertools.chain(*participant.cells.values()):
            cell.error = cell.error or str(error)


def _load(plan: Plan, participant: _Participant, server: Server, wire: Wire, *, is_counted: bool) -> None:
    cells = [cell for cell in participant.cells[wire.kind] if not cell.error]
    payloads = Repeated(tuple(wire.payload(participant.model.name, row) for row in participant.model.rows))
    try:
        with fleet(server.target(wire), payloads) as loaders:
            if participant.peer.fresh:
                _warm_up(loaders, plan.concurrency[0])
            elif not is_counted:
                _warm_up(loaders, plan.concurrency[-1])
            for cell in cells if is_counted else ():
                measured_sample, error = _measure_window(server, loaders, cell.concurrency, plan.seconds)
                cell.error = cell.error or error or ("" if server.tree.is_alive() else "its first process has ended")
                if measured_sample:
                    cell.samples.append(measured_sample)
                    cell.memory = server.tree.memory()
    except (OSError, FleetError) as error:
        for cell in cells:
            cell.error = cell.error or str(error)


def _warm_up(loaders: Fleet, concurrency: int) -> None:
    loaders.start_load(Load(concurrency=concurrency))
    loaders.wait(WARM_UP_S)
    loaders.halt()


def _measure_window(server: Server, loaders: Fleet, concurrency: int, seconds: float) -> tuple[Sample | None, str]:
    loaders.start_load(Load(concurrency=concurrency))
    _wait(loaders, SETTLE_S, concurrency)
    loaders.take()
    before_s, both = server.tree.cpu_s(), _ServerAndGenerator(server.tree)
    background = BackgroundLoad(both)
    _wait(loaders, seconds, MIN_REQUESTS_PER_SLOT * concurrency)
    window = loaders.take()
    cpu_s, both.generator_s = server.tree.cpu_s() - before_s, window.cpu_s
    cores = background.cores()
    loaders.halt()
    return sample(window, cpu_s, cores)


def _wait(loaders: Fleet, seconds: float, requests: int) -> None:
    """Wait, and up to LONGER times as long for a number of requests."""
    loaders.wait(seconds)
    if loaders.count() < requests:
        loaders.wait((MAX_EXTENSION - 1) * seconds, requests)


def sample(window: Window, cpu_s: float, background_cores: float) -> tuple[Sample | None, str]:
    """Compute a window's figures. Returns: the figures, if any, and what went wrong, if anything."""
    count = len(window.ends_ns)
    failed = sum(window.errors.values())
    if failed:
        most_frequent_error = max(window.errors, key=window.errors.__getitem__)
        return None, f"{failed} of {failed + count} requests failed: {most_frequent_error}"
    if window.failure or not count:
        return None, window.failure or f"no answer within {window.seconds:.1f} s"
    p50_ns, p99_ns = percentiles_ns(window.latencies_ns, [50, 99])
    return Sample(
        requests=count,
        requests_per_s=count / window.seconds,
        p50_ms=p50_ns / 1e6,
        p99_ms=p99_ns / 1e6,
        cpu_us=cpu_s / count * 1e6,
        generator_cores=window.cpu_s / window.seconds,
        others=background_cores,
    ), ""


@contextlib.contextmanager
def _time_limit(server: Server, patience_s: float) -> Iterator[None]:
    """Kill a server whose turn does not end, so that the clients waiting for it continue."""
    timer = threading.Timer(patience_s, server.tree.end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
