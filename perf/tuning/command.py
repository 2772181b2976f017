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
from penstock.perf.payloads.preparing import InputError, prepare_payloads
from penstock.perf.profiling.command import Interrupts
from penstock.perf.profiling.control import Control, ControlError, control_for
from penstock.perf.profiling.flags import UsageError
from penstock.perf.profiling.model import DescriptionError, ModelDescription, describe_model
from penstock.perf.profiling.sampling import Watch
from penstock.perf.profiling.sampling_processes import is_local_host
from penstock.perf.profiling.session import SessionError, slots, target
from penstock.perf.reports.extras import MissingExtraError, needed

from . import knobs, pbtxt
from .arguments import TuneOptions, parse_arguments
from .duels import MAX_P99_GROWTH
from .evidence import Evidence, terminal_text, write
from .knobs import ORIGINAL, Bounds
from .live_bench import BenchContext, LiveBench
from .search import Search, SearchEndedError, SearchResult
from .served_model import ServedModel, ServingError, restored_afterwards

DONE, FAILED, USAGE = 0, 1, 2
_EXPECTED = (
    ServingError, SessionError, ControlError, DescriptionError, InputError, FleetError, MissingExtraError, OSError,
    ValueError,
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run a command line. Returns: the exit status: 0 done, even if nothing was better; 1 failed; 2 wrong usage."""
    try:
        options = parse_arguments(arguments, say)
    except UsageError as error:
        say(f"Error: {error}")
        return USAGE
    except SystemExit as ended:
        return int(ended.code or 0)
    try:
        with Interrupts(say) as interrupts:  # SIGTERM too: the server must not be left with a setting on trial
            return _Run(options, interrupts.is_interrupted).run()
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

    def __init__(self, options: TuneOptions, stopped: Callable[[], bool]) -> None:
        self._options = options
        self._is_interrupted = stopped
        self._applied = False
        self._error = ""
        self._notes: list[str] = []

    def run(self) -> int:
        options, perf_options = self._options, self._options.options
        needed("hdrh.histogram")
        options.output_folder.mkdir(parents=True, exist_ok=True)
        endpoint = target(perf_options)
        control = control_for(endpoint, dict(perf_options.headers))
        end_s = time.monotonic() + options.budget_s
        model = describe_model(control, perf_options.model, perf_options.version, perf_options.composing)
        served = ServedModel(control, model.name)
        with ExitStack() as stack:
            stack.enter_context(restored_afterwards(served, lambda: self._applied, say))
            ready = stack.enter_context(
                prepare_payloads(
                    model, perf_options.input, endpoint, control, headers=perf_options.headers, slots=_slots(options)
                )
            )
            running = stack.enter_context(fleet(endpoint, ready.payloads, max(perf_options.processes, 1)))
            watch = stack.enter_context(Watch(control, model, endpoint, perf_options))
            for line in ready.notes:
                self._add_note(line)
            context = BenchContext(options, served, control, model, running, watch, self._is_interrupted, end_s)
            bench = LiveBench(context)
            result = self._search(bench, served, endpoint)
            evidence = self._make_evidence(context, bench, endpoint, result)
            print(terminal_text(evidence))
            self._write(evidence, served, is_penstock=_is_penstock(control, model))
        return FAILED if self._error else DONE

    def _search(self, bench: LiveBench, served: ServedModel, endpoint: Target) -> SearchResult:
        """Search. A failure ends the search, not the run: the results so far are written."""
        options, config = self._options, served.config
        bounds = Bounds(
            cores=options.cores or len(os.sched_getaffinity(0)),
            rows=options.options.input.batch,
            target_us=(options.target_ms or 0.0) * 1e3,
        )
        if not options.cores and not is_local_host(endpoint.host):
            self._add_note(
                f"The server is elsewhere: taken to have {bounds.cores} cores, as this machine; --cores says else"
            )
        for knob, reason in knobs.unavailable_knobs(config).items():
            if knob in options.knobs:
                self._add_note(f"{knob} is left alone: {reason}")
        result = SearchResult()
        search: Search | None = None
        try:
            self._add_note(bench.find_concurrency())
            if options.closed_loop and options.target_ms is None:
                self._add_note(f"Closed loop with {bench.concurrency} requests under way")
                bounds = Bounds(bounds.cores, bounds.rows, bench.concurrency * bounds.rows, bounds.target_us)
            by_score = options.target_ms is not None or not options.closed_loop
            search = Search(
                bench,
                lambda at: knobs.axes(config, options.knobs, bounds, at),
                say,
                math.inf if by_score else MAX_P99_GROWTH,
            )
            result = search.run()
        except SearchEndedError as ended:
            result.ended_early = str(ended)
        except (ServingError, ControlError, FleetError, OSError) as error:
            self._error = str(error)
            result = search.result if search is not None else result
        return result

    def _add_note(self, line: str) -> None:
        if line:
            self._notes.append(line)
            say(line)

    def _make_evidence(
        self, context: BenchContext, bench: LiveBench, endpoint: Target, result: SearchResult
    ) -> Evidence:
        try:
            server = context.control.server()
        except ControlError:
            server = {}
        return Evidence(
            options=self._options,
            model=context.model,
            url=f"{endpoint.host}:{endpoint.port}",
            server=server,
            sharing=context.watch.sharing(),
            found=result,
            levels=bench.levels,
            configs={setting: context.served.config_of(setting) for setting in bench.levels},
            notes=self._notes,
            error=self._error,
        )

    def _write(self, evidence: Evidence, served: ServedModel, *, is_penstock: bool) -> None:
        folder, kept_setting = self._options.output_folder, evidence.found.kept
        command = shlex.join(self._options.options.command)
        for name in ("config.pbtxt", "penstock.toml"):
            (folder / name).unlink(missing_ok=True)  # files of an earlier run would not match the new evidence
        if kept_setting != ORIGINAL:
            text = pbtxt.to_pbtxt(
                served.config_of(kept_setting), f"{knobs.describe(kept_setting)}: see evidence.md\n{command}"
            )
            (folder / "config.pbtxt").write_text(text, "utf-8")
            if is_penstock:
                (folder / "penstock.toml").write_text(knobs.to_penstock_toml(kept_setting), "utf-8")
            reason = served.try_config(pbtxt.parse_pbtxt(text))
            if reason:
                self._error = f"config.pbtxt as it was written is not taken: {reason}"
                self._add_note(self._error)
            else:
                self._add_note("config.pbtxt as it was written was loaded, and taken")
                self._applied = self._options.apply
        write(evidence, folder, command)
        say(f"written: {folder}")


def _slots(options: TuneOptions) -> int:
    return slots(options.options) if options.has_range and options.closed_loop else 0


def _is_penstock(control: Control, model: ModelDescription) -> bool:
    """Return whether the server reads penstock.toml: Penstock's statistics have figures of its own."""
    try:
        return any("run_times" in each for each in control.statistics(model.name))
    except ControlError:
        return False
