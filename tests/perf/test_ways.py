"""Every way in which tensors travel is measured, each with answers that are right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.perf import ways


@pytest.mark.slow
def test_each_way_has_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(ways.main(tmp_path, list(ways.WAYS), [2], 1))

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", 2 a turn")[0] for line in lines] == [way.name for way in ways.WAYS]
    assert all(float(line.split()[-2]) > 0 for line in lines)
