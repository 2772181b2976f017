from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.perf.profiling import measuring
from penstock.perf.profiling.export import Export
from penstock.perf.reports.document import Offered
from tests.perf.profiling.scripted import SECOND_NS, window


def written(export: Export, folder: Path) -> Any:
    export.write(folder / "profile.json")
    return json.loads((folder / "profile.json").read_text("utf-8"))


def test_requests_of_each_level_are_in_the_format_of_perf_analyzer(tmp_path: Path) -> None:
    now_ns = time.monotonic_ns()
    export = Export(wall_ns=lambda: now_ns)
    for offered in (Offered("concurrency", 2), Offered("rate", 2.5)):
        export.on_level_start(offered)
        for begin_s in (0, 1):
            part = window([100], begin_s)
            export.on_window(part, measuring.client(part))
    exported = written(export, tmp_path)

    assert [each["experiment"] for each in exported["experiments"]] == [
        {"mode": "concurrency", "value": 2},
        {"mode": "request_rate", "value": 2.5},
    ]
    assert (exported["version"], exported["service_kind"], exported["endpoint"]) == ("2.47.0", "triton", "")
    first = exported["experiments"][0]
    request = first["requests"][0]
    assert request.keys() == {"timestamp", "request_inputs", "response_timestamps", "response_outputs"}
    assert request["response_timestamps"][0] - request["timestamp"] == 100_000
    bounds = first["window_boundaries"]
    assert [bound - bounds[0] for bound in bounds] == [0, SECOND_NS, 2 * SECOND_NS]
    assert request["response_timestamps"] == [bounds[1]]


def test_each_response_of_a_decoupled_model_has_its_time(tmp_path: Path) -> None:
    export = Export()
    export.on_level_start(Offered("concurrency", 1))
    part = window([100, 200], earlier_counts=np.array([2, 0], np.int64), responses=2)
    part.earlier_ns = part.starts_ns[0] + np.array([10, 20], np.int64)
    export.on_window(part, measuring.client(part))

    requests = written(export, tmp_path)["experiments"][0]["requests"]

    since = [[at - each["timestamp"] for at in each["response_timestamps"]] for each in requests]
    assert since == [[10, 20, 100_000], [200_000]]


@pytest.mark.parametrize("levels", [0, 1])
def test_a_run_without_requests_is_written(tmp_path: Path, levels: int) -> None:
    export = Export()
    for _ in range(levels):
        export.on_level_start(Offered("concurrency", 1))

    assert len(written(export, tmp_path)["experiments"]) == levels
