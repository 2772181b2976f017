"""Duels: decides whether a challenger is better than the incumbent by more than noise. Pure.

Both are measured in turns, round after round, in the same minutes. The rule assumes only that rounds are independent: a
challenger equal to the incumbent is ahead in half of them. It wins all of the first seven once in 128 times, and passes
ENOUGH by any path 1.7% of the time; even then its median must be GAIN ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

ROUNDS_TO_WIN = (7, 11, 14, 17)
"""The number of rounds that suffice with none, one, two or three lost; a fourth loss ends the duel."""
MIN_GAIN = 1.03
"""An improvement of less than 3% in the median is not worth a change."""
MAX_P99_GROWTH = 1.5
"""The most that the 99th percentile may grow, in the median of the rounds, without a latency target."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one setting. `score`: higher is better; 0, with `why`: it is not usable.

    `load`: the concurrent requests, or requests per second, of the measurement. `memory_bytes` None: unknown.
    """

    score: float
    load: float = 0.0
    per_s: float = 0.0
    p50_us: float = math.nan
    p99_us: float = math.nan
    memory_bytes: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """Both measurements, one after the other."""

    incumbent: Measurement
    challenger: Measurement

    @property
    def ratio(self) -> float:
        """The challenger's score relative to the incumbent's; infinite if the incumbent's is 0."""
        if not self.incumbent.score:
            return math.inf if self.challenger.score else 1.0
        return self.challenger.score / self.incumbent.score


class Standing(Enum):
    """The state of a duel."""

    OPEN = "open"
    WON = "won"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The state, and the reason in words."""

    standing: Standing
    reason: str


def median_ratio(rounds: Sequence[Round]) -> float:
    """Return the median of the rounds' ratios."""
    return median(each.ratio for each in rounds) if rounds else 1.0


def judge(rounds: Sequence[Round], p99_growth: float = MAX_P99_GROWTH) -> Verdict:
    """Judge a duel so far. `p99_growth` infinite: the score already accounts for latency."""
    if rounds and rounds[-1].challenger.why:
        return Verdict(Standing.LOST, rounds[-1].challenger.why)
    lost = sum(each.ratio <= 1 for each in rounds)
    if lost >= len(ROUNDS_TO_WIN) or (lost > 1 and median_ratio(rounds) < MIN_GAIN):  # the second: not worth more time
        return Verdict(Standing.LOST, f"not better: behind in {lost} of {len(rounds)} rounds")
    if len(rounds) < ROUNDS_TO_WIN[lost]:
        return Verdict(Standing.OPEN, f"ahead in {len(rounds) - lost} of {len(rounds)} rounds so far")
    score_line = f"ahead in {len(rounds) - lost} of {len(rounds)} rounds"
    if median_ratio(rounds) < MIN_GAIN:
        return Verdict(Standing.LOST, f"{score_line}, but by less than {MIN_GAIN - 1:.0%}: not worth a change")
    p99_ratio = median(_p99_ratio(each) for each in rounds)
    if p99_ratio > p99_growth:
        return Verdict(Standing.LOST, f"{score_line}, but p99 is {p99_ratio:.1f} times as long")
    return Verdict(Standing.WON, score_line)


def _p99_ratio(each: Round) -> float:
    ratio = each.challenger.p99_us / each.incumbent.p99_us if each.incumbent.p99_us else math.nan
    return ratio if math.isfinite(ratio) else 1.0
