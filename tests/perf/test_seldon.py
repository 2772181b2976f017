"""What perf/seldon.py sends and says."""

from __future__ import annotations

import json

import pytest

from penstock.perf.load import Load
from penstock.perf.seldon import FLOWER, Line, body, message, report
from penstock.server.seldon import protos

LOAD = Load(requests_per_s=100.0, p50_ms=1.0, p99_ms=2.0, cpu_us=10.0, refused=0, broken=0)


def test_both_wires_carry_the_same_row() -> None:
    sent = protos.message_class("SeldonMessage").FromString(message())

    assert json.loads(body()) == {"data": {"ndarray": [FLOWER]}}
    assert (list(sent.data.tensor.shape), list(sent.data.tensor.values)) == ([1, 4], FLOWER)


@pytest.mark.parametrize(("times", "word"), [(2.0, "holds"), (2.5, "DOES NOT HOLD")])
def test_the_first_side_is_held_against_the_second(times: float, word: str) -> None:
    ours = Load(requests_per_s=200.0, p50_ms=1.0, p99_ms=1.0, cpu_us=5.0, refused=0, broken=0)
    lines = {("REST", "ours"): Line([ours]), ("REST", "theirs"): Line([LOAD])}

    said = list(report(lines, {"REST": times}))[-1]

    assert said.startswith(f"REST: 2.0 times the requests/s, at least {times:g}: {word};")
    assert "a p99 that is lower: holds; 2.0 times less CPU" in said


def test_one_side_alone_is_held_against_nothing() -> None:
    assert len(list(report({("REST", "ours"): Line([LOAD])}, {"REST": 20}))) == 2
