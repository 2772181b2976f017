"""`penstock perf tune`: from its arguments to a configuration with its evidence, and its exit status."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from penstock.perf.generator.fleet import FleetError, fleet
from penstock.perf.generator.orders import Target
from penstock.perf.payloads.preparing import InputError, prepared
from penstock.perf.profiling.command import Interrupts
from penstock.perf.profiling.control import Control, ControlError, control_for
from penstock.perf.profiling.flags import UsageError
from penstock.perf.profiling.model import Described, DescriptionError, described
from penstock.perf.profiling.sampling import Watch
from penstock.perf.profiling.sampling_processes import is_here
from penstock.perf.profiling.session import SessionError, slots, target
from penstock.perf.reports.extras import MissingExtraError, needed

from . import knobs, writing
from .arguments import Tuning, tuning
from .bench import LiveBench, World
from .duels import P99_GROWTH
from .evidence import Evidence, told, write
from .knobs import AS_IT_IS, Bounds
from .searching import Found, OverError, Search
from .serving import Served, ServingError, kept_as_it_was

DONE, FAILED, USAGE = 0, 1, 2
_EXPECTED = (
    ServingError, SessionError, ControlError, DescriptionError, InputError, FleetError, MissingExtraError, OSError,
    ValueError,
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Run a command line. Returns: the exit status: 0 done, even if nothing was better; 1 failed; 2 wrong usage."""
    try:
        asked = tuning(words, say)
    except UsageError as error:
        say(f"Error: {error}")
        return USAGE
    except SystemExit as ended:
        return int(ended.code or 0)
    try:
        with Interrupts(say) as interrupts:  # SIGTERM too: the server must not be left with a setting on trial
            return _Run(asked, interrupts.stopped).run()
    except _EXPECTED as error:
        say(f"error: {error}")
    except KeyboardInterrupt:
        say("ended")
    return FAILED


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


class _Run:
    """One run of the command."""

    def __init__(self, asked: Tuning, stopped: Callable[[], bool]) -> None:
        self._asked = asked
        self._stopped = stopped
        self._applied = False
        self._failed = ""
        self._notes: list[str] = []

    def run(self) -> int:
        asked, options = self._asked, self._asked.options
        needed("hdrh.histogram")
        asked.out.mkdir(parents=True, exist_ok=True)
        aimed = target(options)
        control = control_for(aimed, dict(options.headers))
        end_s = time.monotonic() + asked.budget_s
        model = described(control, options.model, options.version, options.composing)
        served = Served(control, model.name)
        with ExitStack() as stack:
            stack.enter_context(kept_as_it_was(served, lambda: self._applied, say))
            ready = stack.enter_context(
                prepared(model, options.input, aimed, control, headers=options.headers, slots=_slots(asked))
            )
            running = stack.enter_context(fleet(aimed, ready.payloads, max(options.processes, 1)))
            watch = stack.enter_context(Watch(control, model, aimed, options))
            for line in ready.notes:
                self._note(line)
            world = World(asked, served, control, model, running, watch, self._stopped, end_s)
            bench = LiveBench(world)
            found = self._searched(bench, served, aimed)
            evidence = self._evidence(world, bench, aimed, found)
            print(told(evidence))
            self._write(evidence, served, ours=_is_penstock(control, model))
        return FAILED if self._failed else DONE

    def _searched(self, bench: LiveBench, served: Served, aimed: Target) -> Found:
        """Search. A failure ends the search, not the run: the results so far are written."""
        asked, config = self._asked, served.config
        bounds = Bounds(
            cores=asked.cores or len(os.sched_getaffinity(0)),
            rows=asked.options.input.batch,
            target_us=(asked.target_ms or 0.0) * 1e3,
        )
        if not asked.cores and not is_here(aimed.host):
            self._note(
                f"The server is elsewhere: taken to have {bounds.cores} cores, as this machine; --cores says else"
            )
        for knob, why in knobs.unable(config).items():
            if knob in asked.over:
                self._note(f"{knob} is left alone: {why}")
        found = Found()
        search: Search | None = None
        try:
            self._note(bench.prepare())
            if asked.closed and asked.target_ms is None:
                self._note(f"Closed loop with {bench.concurrency} requests under way")
                bounds = Bounds(bounds.cores, bounds.rows, bench.concurrency * bounds.rows, bounds.target_us)
            by_score = asked.target_ms is not None or not asked.closed
            search = Search(
                bench,
                lambda at: knobs.axes(config, asked.over, bounds, at),
                say,
                math.inf if by_score else P99_GROWTH,
            )
            found = search.run()
        except OverError as over:
            found.ended = str(over)
        except (ServingError, ControlError, FleetError, OSError) as error:
            self._failed = str(error)
            found = search.found if search is not None else found
        return found

    def _note(self, line: str) -> None:
        if line:
            self._notes.append(line)
            say(line)

    def _evidence(self, world: World, bench: LiveBench, aimed: Target, found: Found) -> Evidence:
        try:
            server = world.control.server()
        except ControlError:
            server = {}
        return Evidence(
            tuning=self._asked,
            model=world.model,
            url=f"{aimed.host}:{aimed.port}",
            server=server,
            sharing=world.watch.sharing(),
            found=found,
            levels=bench.levels,
            configs={setting: world.served.written(setting) for setting in bench.levels},
            notes=self._notes,
            failed=self._failed,
        )

    def _write(self, evidence: Evidence, served: Served, *, ours: bool) -> None:
        folder, kept = self._asked.out, evidence.found.kept
        command = shlex.join(self._asked.options.command)
        for name in ("config.pbtxt", "penstock.toml"):
            (folder / name).unlink(missing_ok=True)  # files of an earlier run would not match the new evidence
        if kept != AS_IT_IS:
            text = writing.pbtxt(served.written(kept), f"{knobs.shown(kept)}: see evidence.md\n{command}")
            (folder / "config.pbtxt").write_text(text, "utf-8")
            if ours:
                (folder / "penstock.toml").write_text(knobs.native(kept), "utf-8")
            why = served.accepts(writing.read(text))
            if why:
                self._failed = f"config.pbtxt as it was written is not taken: {why}"
                self._note(self._failed)
            else:
                self._note("config.pbtxt as it was written was loaded, and taken")
                self._applied = self._asked.apply
        write(evidence, folder, command)
        say(f"written: {folder}")


def _slots(asked: Tuning) -> int:
    return slots(asked.options) if asked.ranged and asked.closed else 0


def _is_penstock(control: Control, model: Described) -> bool:
    """Return whether the server reads penstock.toml: Penstock's statistics have figures of its own."""
    try:
        return any("run_times" in each for each in control.statistics(model.name))
    except ControlError:
        return False
