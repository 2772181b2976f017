from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.profiling.model import Described
from penstock.perf.reports import document as documents
from penstock.perf.reports.document import Client, Level, Offered
from penstock.perf.reports.formats import ratio
from penstock.perf.tuning.arguments import tuning
from penstock.perf.tuning.duels import Measured, Round
from penstock.perf.tuning.evidence import Evidence, conclusion, markdown, told, write
from penstock.perf.tuning.knobs import AS_IT_IS, Setting
from penstock.perf.tuning.searching import Found, Trial

TWO: Setting = (("instance_count", 2),)
SLOW, FAST = Measured(100.0, 8, 100.0, 1e4, 2e4, 2**28), Measured(120.0, 8, 120.0, 8e3, 1e4, 2**29)
LEVEL = Level(Offered("concurrency", 8), True, Client(1, 1, 1.0, 100.0, 100.0, {"p50": 1e4}, ""))


def evidence_of(found: Found, failed: str = "") -> Evidence:
    levels = {AS_IT_IS: [LEVEL], TWO: [LEVEL, LEVEL]}
    configs: dict[Setting, dict[str, Any]] = {
        AS_IT_IS: {"name": "m"},
        TWO: {"name": "m", "instance_group": [{"count": 2}]},
    }
    asked = tuning(["-m", "m", "--out", "found"])
    return Evidence(asked, Described("m", "", "", (), ()), "here:1", {}, "", found, levels, configs, ["a note"], failed)


def duel(against: Setting, rounds: int = 7, *, kept: bool) -> Trial:
    words = f"ahead in {rounds} of {rounds} rounds"
    return Trial("instance_count", TWO, against, [1.2], [Round(SLOW, FAST)] * rounds, words, kept)


def test_what_is_kept_is_told_by_the_last_comparison() -> None:
    found = Found(TWO, True, [duel(AS_IT_IS, kept=True)], SLOW, duel(AS_IT_IS, kept=True))

    assert conclusion(evidence_of(found)) == (
        f"Kept: instance_count 2; {ratio(1.2)} as it was in the median ({ratio(1.2)} to {ratio(1.2)} over 7 rounds),"
        " ahead in 7 of 7 rounds."
    )


@pytest.mark.parametrize(
    ("found", "failed", "says"),
    [
        (Found(trials=[duel(AS_IT_IS, kept=False)]), "", "Nothing was measurably better"),
        (Found(last=duel(AS_IT_IS, kept=False)), "", "won on the way, but not against the configuration as it is"),
        (
            Found(trials=[duel(AS_IT_IS, kept=False)], ended="late"),
            "",
            "late. 1 other setting tried, none of which had won",
        ),
        (Found(first=Measured(0.0, why="too large")), "", "The configuration as it is: too large."),
        (Found(kept=TWO, ended="interrupted"), "", "ended early: interrupted. Best so far, not confirmed"),
        (Found(), "the server died", "It failed: the server died. No other setting was tried."),
    ],
)
def test_what_is_not_so_is_not_told(found: Found, failed: str, says: str) -> None:
    assert says in conclusion(evidence_of(found, failed))


def test_the_terminal_has_a_row_for_each_trial() -> None:
    lost = Trial("instance_count", (("instance_count", 8),), AS_IT_IS, [0.5], verdict="no better at a first look")
    lines = told(evidence_of(Found(trials=[lost], first=SLOW))).splitlines()

    assert [line.split("  ")[1].strip() for line in lines[:3]] == ["setting", "as it is", "instance_count 8"]
    assert "no better at a first look" in lines[2]


def test_every_measurement_is_written_and_can_be_read_by_the_report(tmp_path: Path) -> None:
    unserved = Trial("instance_count", TWO, AS_IT_IS, [math.inf], [Round(Measured(0.0, why="no"), FAST)], "", True)
    write(evidence_of(Found(TWO, True, [unserved], SLOW, duel(AS_IT_IS, kept=True))), tmp_path, "penstock perf tune")

    content = json.loads((tmp_path / "evidence.json").read_text("utf-8"))
    assert content["kept"] == {"instance_count": 2}
    assert content["trials"][0]["looks"] == [None]
    assert [each["setting"] for each in content["documents"]] == [{}, {"instance_count": 2}]
    runs = [documents.read(tmp_path / each["file"]) for each in content["documents"]]
    assert [(len(run.levels), run.model.config.get("instance_group")) for run in runs] == [
        (1, None),
        (2, [{"count": 2}]),
    ]
    page = (tmp_path / "evidence.md").read_text("utf-8")
    assert "To repeat: `penstock perf tune`" in page
    assert "| instance_count 2 | as it is |" in page


def test_what_a_server_says_does_not_break_the_table() -> None:
    odd = Trial("instance_count", TWO, AS_IT_IS, verdict="400: a | b\nc")

    assert "| 400: a / b c |" in markdown(evidence_of(Found(trials=[odd])), "again")
