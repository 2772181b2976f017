"""What a hit costs is measured on requests as they travel, and held against its budget."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.perf import cache, micro


@pytest.mark.slow
def test_trips_are_measured_in_both_encodings_with_and_without_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(micro, "ROUNDS", 1)
    monkeypatch.setattr(cache, "WIDTHS", {"iris": 4})
    cache.write(tmp_path)

    dearest_us = asyncio.run(cache.trips(tmp_path, (2,)))

    encodings = [line.split(",")[1].strip() for line in capsys.readouterr().out.splitlines()]
    assert encodings == ["iris json", "iris_cached json", "iris binary", "iris_cached binary"]
    assert dearest_us > 0


def test_the_verdict_states_whether_the_budget_holds() -> None:
    assert cache.verdict(14.9) == "a hit: 14.9 us, at most 15: holds"
    assert cache.verdict(15.1) == "a hit: 15.1 us, at most 15: DOES NOT HOLD"
