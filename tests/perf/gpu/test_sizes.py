"""What the first run of a size costs, beside later ones, on a clock that is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.perf.gpu import sizes
from penstock.perf.gpu.context import CheckContext
from penstock.perf.gpu.sizes import SIZES


def test_the_first_run_of_each_size_is_compared_with_the_median_of_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {rows: iter((10.0 * rows, rows, 100.0 * rows, rows / 2, 7.0)) for rows in SIZES} | {1: iter((1000.0,))}
    monkeypatch.setattr(sizes, "_took_ms", lambda binding, feed, rows: next(took[rows]))
    monkeypatch.setattr(sizes, "SETTINGS", (("encoder", ""),))
    took[13] = iter((130.0, 1.0, 1.0, 1.0, 7.0))
    *each, total, again = sizes.report(CheckContext("cpu", tmp_path, quick=True))

    assert [row.value for row in each] == [10.0 * rows for rows in SIZES]
    assert each[0].note == "then 3.00 ms: 10.0 times"
    assert total.value == 10.0 * sum(SIZES)
    assert total.note == "10 sizes; at worst 130 times a later run, at 13 rows"
    assert again.value == 7.0 * len(SIZES)


def test_each_setting_runs_in_all_sizes(tmp_path: Path) -> None:
    rows = list(sizes.report(CheckContext("cpu", tmp_path, quick=True)))

    assert len(rows) == len(sizes.SETTINGS) * (len(SIZES) + 2)
    assert all(isinstance(row.value, float) and row.value > 0 for row in rows)
