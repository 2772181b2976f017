"""A load is held against a target, and the report says what holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.perf.model_variants import Run
from penstock.perf.open_loop import OpenLoopResult
from penstock.perf.open_loop_sender import BROKEN, RECORD, SKIPPED
from penstock.perf.static_policies import Figures
from penstock.perf.targets import Report, TargetCase, TargetFigures, compare_with_target, median

AIM = TargetCase("deep", 50, 400)
CALM_LOAD = TargetFigures(
    offered_per_s=320, in_time_per_s=319, late=1, refused_per_s=0, unexpected=0, p50_ms=20, p99_ms=45,
    refused_p99_ms=0, cpu_us=2500, load_cpu_us=100, late_p99_ms=0.5, others=0.1,
)  # fmt: skip
OVER = replace(CALM_LOAD, offered_per_s=800, in_time_per_s=390, refused_per_s=405, p99_ms=49, refused_p99_ms=1)


def held(seconds: float, *answers: tuple[int, float]) -> TargetFigures:
    records = np.zeros(len(answers), RECORD)
    records["status"] = [status for status, _ in answers]
    records["took_ns"] = [ms * 1e6 for _, ms in answers]
    return compare_with_target(
        Run(Figures(0, 0, 0, 0), OpenLoopResult(records, 1, 2500, 100), 0.1), seconds, AIM.target_ms
    )


class TestHit:
    def test_the_share_in_time_is_relative_to_all_requests(self) -> None:
        figures = held(2, (200, 49), (200, 51), (503, 1), (200, 50))

        assert (figures.in_time_per_s, figures.late, figures.share_in_time) == (1, 1, 0.5)
        assert (figures.refused_per_s, figures.refused_p99_ms) == (0.5, 1)

    def test_requests_neither_served_nor_rejected_are_unexpected(self) -> None:
        assert held(1, (200, 1), (500, 1), (BROKEN, 0), (SKIPPED, 0)).unexpected == 3

    def test_rounds_are_summarized_by_their_medians(self) -> None:
        figures = median([replace(CALM_LOAD, p99_ms=each) for each in (3, 1, 2)])

        assert figures == replace(CALM_LOAD, p99_ms=2)


def messages_for(calm: dict[str, Any], over: dict[str, Any]) -> list[str]:
    lines = Report(AIM, 400, replace(CALM_LOAD, **calm), replace(OVER, **over)).lines()
    return [line for line in lines if "hold" in line.lower()]


def test_all_claims_may_hold() -> None:
    assert messages_for({}, {}) == [
        "deep: in time at 80%: 99.69%: holds",
        "deep: goodput at 200%: 97.5% of the peak: holds",
        "deep: accepted p99 at 200%: 49.0 of 50 ms: holds",
        "deep: refusals p99: 1.00 ms, under 5: holds",
        "deep: neither 200 nor 503: 0: holds",
    ]


@pytest.mark.parametrize(
    ("calm", "over", "what"),
    [
        ({"in_time_per_s": 316}, {}, "deep: in time at 80%: 98.75%"),
        ({}, {"in_time_per_s": 359}, "deep: goodput at 200%: 89.8%"),
        ({"offered_per_s": 450, "in_time_per_s": 450}, {}, "deep: goodput at 200%: 86.7%"),
        ({}, {"p99_ms": 50.1}, "deep: accepted p99 at 200%: 50.1"),
        ({}, {"refused_p99_ms": 5.0}, "deep: refusals p99: 5.00"),
        ({}, {"refused_per_s": 0, "refused_p99_ms": 0}, "deep: refusals: there were none"),
        ({"unexpected": 1}, {}, "deep: neither 200 nor 503: 1"),
    ],
)
def test_claims_that_do_not_hold_are_reported(calm: dict[str, Any], over: dict[str, Any], what: str) -> None:
    failed = [line for line in messages_for(calm, over) if line.endswith("DOES NOT HOLD")]

    assert [line.startswith(what) for line in failed] == [True]
