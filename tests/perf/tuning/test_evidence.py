from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.profiling.model import ModelDescription
from penstock.perf.reports import document as documents
from penstock.perf.reports.document import Client, Level, Offered
from penstock.perf.reports.formats import ratio
from penstock.perf.tuning.arguments import parse_arguments
from penstock.perf.tuning.duels import Measurement, Round
from penstock.perf.tuning.evidence import Evidence, conclusion, markdown, terminal_text, write
from penstock.perf.tuning.knobs import ORIGINAL, Setting
from penstock.perf.tuning.search import SearchResult, Trial

TWO: Setting = (("instance_count", 2),)
SLOW, FAST = Measurement(100.0, 8, 100.0, 1e4, 2e4, 2**28), Measurement(120.0, 8, 120.0, 8e3, 1e4, 2**29)
LEVEL = Level(Offered("concurrency", 8), True, Client(1, 1, 1.0, 100.0, 100.0, {"p50": 1e4}, ""))


def evidence_of(found: SearchResult, failed: str = "") -> Evidence:
    levels = {ORIGINAL: [LEVEL], TWO: [LEVEL, LEVEL]}
    configs: dict[Setting, dict[str, Any]] = {
        ORIGINAL: {"name": "m"},
        TWO: {"name": "m", "instance_group": [{"count": 2}]},
    }
    options = parse_arguments(["-m", "m", "--out", "found"])
    return Evidence(
        options, ModelDescription("m", "", "", (), ()), "here:1", {}, "", found, levels, configs, ["a note"], failed
    )


def duel(against: Setting, rounds: int = 7, *, accepted: bool) -> Trial:
    words = f"ahead in {rounds} of {rounds} rounds"
    return Trial("instance_count", TWO, against, [1.2], [Round(SLOW, FAST)] * rounds, words, accepted)


def test_the_conclusion_states_what_the_last_comparison_showed() -> None:
    found = SearchResult(TWO, True, [duel(ORIGINAL, accepted=True)], SLOW, duel(ORIGINAL, accepted=True))

    assert conclusion(evidence_of(found)) == (
        f"Kept: instance_count 2; {ratio(1.2)} as it was in the median ({ratio(1.2)} to {ratio(1.2)} over 7 rounds),"
        " ahead in 7 of 7 rounds."
    )


@pytest.mark.parametrize(
    ("found", "failed", "message"),
    [
        (SearchResult(trials=[duel(ORIGINAL, accepted=False)]), "", "Nothing was measurably better"),
        (
            SearchResult(final_trial=duel(ORIGINAL, accepted=False)),
            "",
            "won on the way, but not against the configuration as it is",
        ),
        (
            SearchResult(trials=[duel(ORIGINAL, accepted=False)], ended_early="late"),
            "",
            "late. 1 other setting tried, none of which had won",
        ),
        (SearchResult(original=Measurement(0.0, why="too large")), "", "The configuration as it is: too large."),
        (SearchResult(kept=TWO, ended_early="interrupted"), "", "ended early: interrupted. Best so far, not confirmed"),
        (SearchResult(), "the server died", "It failed: the server died. No other setting was tried."),
    ],
)
def test_the_conclusion_states_nothing_that_was_not_measured(found: SearchResult, failed: str, message: str) -> None:
    assert message in conclusion(evidence_of(found, failed))


def test_the_terminal_has_a_row_for_each_trial() -> None:
    lost = Trial("instance_count", (("instance_count", 8),), ORIGINAL, [0.5], verdict="no better at a first look")
    lines = terminal_text(evidence_of(SearchResult(trials=[lost], original=SLOW))).splitlines()

    assert [line.split("  ")[1].strip() for line in lines[:3]] == ["setting", "as it is", "instance_count 8"]
    assert "no better at a first look" in lines[2]


def test_every_measurement_is_written_and_readable_by_the_report_command(tmp_path: Path) -> None:
    unserved = Trial("instance_count", TWO, ORIGINAL, [math.inf], [Round(Measurement(0.0, why="no"), FAST)], "", True)
    write(
        evidence_of(SearchResult(TWO, True, [unserved], SLOW, duel(ORIGINAL, accepted=True))),
        tmp_path,
        "penstock perf tune",
    )

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


def test_text_from_a_server_does_not_break_the_table() -> None:
    odd = Trial("instance_count", TWO, ORIGINAL, verdict="400: a | b\nc")

    assert "| 400: a / b c |" in markdown(evidence_of(SearchResult(trials=[odd])), "again")
