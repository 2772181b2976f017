"""The profile export: when each request of each level began and ended, in perf_analyzer's format.

Source: perf_analyzer's profile_data_exporter.cc. Times are nanoseconds of the wall clock. Inputs and outputs of
requests are not kept: their entries are empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice, repeat
from pathlib import Path
from typing import TextIO

from penstock.perf.generator.orders import Window
from penstock.perf.reports.document import Client, Offered

from .session import Listener

VERSION = "2.47.0"
"""The perf_analyzer version whose format it is."""


@dataclass(slots=True)
class _Experiment:
    offered: Offered
    windows: list[Window] = field(default_factory=list)


class Export(Listener):
    """Keeps every window of a run until it is written.

    Units: `offset_ns` is the wall clock minus the monotonic one.
    """

    def __init__(self, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._offset_ns = wall_ns() - time.monotonic_ns()
        self._experiments: list[_Experiment] = []

    def on_level_start(self, load: Offered) -> None:
        self._experiments.append(_Experiment(load))

    def on_window(self, window: Window, client: Client) -> None:
        self._experiments[-1].windows.append(window)

    def write(self, path: Path) -> None:
        """Write the export. Raises: OSError."""
        with path.open("w", encoding="utf-8") as file:
            file.write('{"experiments":[')
            for number, experiment in enumerate(self._experiments):
                file.write("," * bool(number))
                self._write(file, experiment)
            file.write(f'],"version":"{VERSION}","service_kind":"triton","endpoint":""}}')

    def _write(self, file: TextIO, experiment: _Experiment) -> None:
        offered = experiment.offered
        concurrency = offered.kind == "concurrency"
        experiment_fields = {
            "mode": "concurrency" if concurrency else "request_rate",
            "value": int(offered.value) if concurrency else float(offered.value),
        }
        file.write(f'{{"experiment":{json.dumps(experiment_fields, separators=(",", ":"))},"requests":[')
        file.write(",".join(self._requests(experiment)))
        bounds = [window.end_ns for window in experiment.windows]
        if bounds:
            bounds.insert(0, experiment.windows[0].begin_ns)
        file.write(f'],"window_boundaries":{json.dumps([each + self._offset_ns for each in bounds])}}}')

    def _requests(self, experiment: _Experiment) -> Iterator[str]:
        for window in experiment.windows:
            starts = (window.starts_ns + self._offset_ns).tolist()
            ends = (window.ends_ns + self._offset_ns).tolist()
            earlier = iter((window.earlier_ns + self._offset_ns).tolist())
            counts = window.earlier_counts.tolist() or repeat(0, len(ends))
            for start, end, count in zip(starts, ends, counts, strict=True):
                responses = ",".join(map(str, (*islice(earlier, count), end)))
                yield (
                    f'{{"timestamp":{start},"request_inputs":{{}},"response_timestamps":[{responses}],'
                    '"response_outputs":[]}'
                )
