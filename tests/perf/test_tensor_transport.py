"""Every way in which tensors travel is measured, each with answers that are right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.perf import tensor_transport


@pytest.mark.slow
def test_each_transport_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(tensor_transport.main(tmp_path, list(tensor_transport.TRANSPORTS), [2], 1))

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(", 2 a turn")[0] for line in lines] == [
        transport.name for transport in tensor_transport.TRANSPORTS
    ]
    assert all(float(line.split()[-2]) > 0 for line in lines)
