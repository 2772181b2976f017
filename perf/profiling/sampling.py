"""Sampling: observes the server during the load, about once a second and at both ends of every window.

It reads the server's statistics and metrics page, the machine, the server's processes and the GPUs, as far as each is
available. What is not is None in the document, with a line that says why.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.batching.devices.memory import meminfo
from penstock.perf import processes
from penstock.perf.generator.orders import Target
from penstock.perf.processes import PROC
from penstock.perf.reports.document import Level

from . import energy, environment, server_side
from .control import Control, ControlError
from .model import ModelDescription
from .options import Options
from .sampling_metrics import MetricsPage
from .sampling_processes import NotFoundError, ServerProcesses, addresses
from .sampling_readers import READ_TIMEOUT_S, PendingRead, Source, SourceReader
from .sampling_series import Reading, counter_growth, devices, gpus, known, samples

_FIRST_READ_TIMEOUT_S = 5.0
"""Starting NVML takes seconds if nothing else keeps the driver loaded."""
_QUIET = ("NVML",)
"""Sources whose absence is not reported."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What was read between two windows."""

    reading: Reading
    statistics: server_side.Answer


class Watch:
    """Samples for the duration of the block. For each level: `begin`, a `mark` at each end of each window, `record_in`.

    No method raises. Threads: one, besides its own.
    """

    def __init__(
        self, control: Control, described: ModelDescription, target: Target, options: Options, proc: Path = PROC
    ) -> None:
        self._control = control
        self._model = described
        self._wants_metrics_page = options.collect_metrics
        self._interval_s = max(options.metrics_interval_ms, 1) / 1e3
        own_addresses = addresses(target.host)
        self._no_process_reason = "" if own_addresses else f"{target.host} is another machine"
        self._family = self._find_processes(target, own_addresses, proc)
        self._nvml = energy.Nvml(lambda: self._family.living if self._family else ())
        self._source_reader = SourceReader(self._sources(bool(own_addresses), options.metrics_url, proc))
        self._caller_figures: dict[str, float] = {}
        self._readings: list[Reading] = []
        self._marks: list[Mark] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample_regularly, name="samples", daemon=True)

    def _find_processes(self, target: Target, own_addresses: set[str], proc: Path) -> ServerProcesses | None:
        try:
            return ServerProcesses(target.port, own_addresses, proc) if own_addresses else None
        except NotFoundError as error:
            self._no_process_reason = str(error)
        return None

    def _sources(self, is_local: bool, url: str, proc: Path) -> dict[str, Source]:
        """Return the sources by name. If two report the same values, the better one is last."""
        sources: dict[str, Source] = {}
        if is_local or self._wants_metrics_page:
            sources["metrics page"] = MetricsPage(url).read
        sources["machine"] = Machine(proc, "" if is_local else "client.").read
        if self._family is not None:
            sources["processes"] = self._family.read
        if is_local:
            sources["NVML"] = self._nvml.read
        return sources

    def __enter__(self) -> Self:
        first_reading = self._source_reader.read_all(_FIRST_READ_TIMEOUT_S)
        if not self._wants_metrics_page and ("NVML" not in self._source_reader.reasons or not devices([first_reading])):
            self._source_reader.drop("metrics page")  # it has nothing that is not read here at less cost to the server
        self._readings = [first_reading]
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join(2 * READ_TIMEOUT_S)

    def begin(self) -> None:
        """Begin a level: samples count from now."""
        self._caller_figures.clear()
        self._readings, self._marks = [self._source_reader.read_all()], []

    def mark(self) -> Mark:
        """Read the counters. Takes some milliseconds, and half a second more when a source begins to hang."""
        pending = PendingRead(
            self._source_reader.read_all
        )  # both at once: a later reading would count requests of the next window
        statistics = self._statistics()
        reading = pending.answer if pending.done(_FIRST_READ_TIMEOUT_S) else None
        mark = Mark(reading or Reading(time.monotonic()), statistics)
        self._marks.append(mark)
        return mark

    def set_figure(self, name: str, value: float) -> None:
        """Add a figure of the caller's to the following samples."""
        self._caller_figures[name] = value

    def sharing(self) -> str:
        """Say whether the server runs on the cores of this process; empty if unknown."""
        cores = self._family.cores() if self._family is not None else set()
        return environment.sharing(os.sched_getaffinity(0), cores) if cores else ""

    def record_in(self, level: Level, first: Mark, last: Mark) -> None:
        """Store in a level what was observed between two marks, and all samples since `begin`."""
        marks = [mark for mark in self._marks if first.reading.at_s <= mark.reading.at_s <= last.reading.at_s]
        sampled = list(self._readings)
        level.samples = samples(sampled) if len(sampled) > 1 else None
        settled_readings = sorted(
            [reading for reading in sampled if first.reading.at_s < reading.at_s < last.reading.at_s]
            + [mark.reading for mark in marks],
            key=lambda reading: reading.at_s,
        )
        described = self._model
        level.server, reason = server_side.statistics_between(
            [mark.statistics for mark in marks], described.name, described.version, described.composing
        )
        level.gpus = gpus(settled_readings)
        self._costs(level, settled_readings)
        level.notes += [note for note in (reason, *self._notes()) if note and note not in level.notes]

    def _costs(self, level: Level, settled_readings: Sequence[Reading]) -> None:
        if len(settled_readings) < 2:
            return
        cpu_s = counter_growth(settled_readings[0], settled_readings[-1], "server.cpu_s")
        if cpu_s is not None and level.client.requests:
            level.server_cpu_s_per_1000 = cpu_s / level.client.requests * 1000
        level.server_rss_bytes = max(known(settled_readings, "server.rss_bytes"), default=None)
        spent_j = energy.joules(settled_readings, self._nvml.used)
        if spent_j is not None and level.client.rows:
            level.energy_j_per_1000 = spent_j / level.client.rows * 1000

    def _notes(self) -> list[str]:
        quiet = {*_QUIET} if self._wants_metrics_page else {*_QUIET, "metrics page"}
        reasons = [f"{name}: {reason}" for name, reason in self._source_reader.reasons.items() if name not in quiet]
        if self._no_process_reason:
            reasons.append(f"CPU and memory of the server are not known: {self._no_process_reason}")
        return reasons

    def _statistics(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        answers = {}
        for name, version in ((self._model.name, self._model.version), *self._model.composing):
            if name not in answers:
                with suppress(ControlError):
                    answers[name] = self._control.statistics(name, version)
        return answers

    def sample(self) -> None:
        """Take a sample now, in addition to the regular ones."""
        readings = self._readings
        reading = self._source_reader.read_all()
        readings.append(Reading(reading.at_s, {**reading.values, **self._caller_figures}))

    def _sample_regularly(self) -> None:
        while not self._end.wait(self._interval_s):
            self.sample()


class Machine:
    """What /proc reports about this machine. `whose`: a prefix for the names."""

    def __init__(self, proc: Path = PROC, prefix: str = "") -> None:
        self._proc = proc
        self._prefix = prefix

    def read(self) -> dict[str, float]:
        """Return the CPU seconds of all cores together, and memory. Raises: OSError if there is no /proc."""
        busy_s, all_s = processes.machine_s(self._proc)
        total, available = meminfo("MemTotal", self._proc), meminfo("MemAvailable", self._proc)
        values = {"cpu.all_s": all_s, "cpu.busy_s": busy_s}
        if total is not None and available is not None:
            values["memory.total_bytes"] = float(total)
            values["memory.used_bytes"] = float(total - available)
        return {f"{self._prefix}{name}": value for name, value in values.items()}
