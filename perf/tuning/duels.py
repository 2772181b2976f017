"""Duels: when a challenger is better than what it challenges by more than noise. Pure.

Both are measured in turns, round after round, in the same minutes. The rule asks nothing of the noise but that rounds
do not depend on each other: a challenger that is the same as the incumbent is ahead in half of them.
So it wins all of the first seven once in 128 times, and by any way through ENOUGH it comes 1.7% of the time; and then
its median must still be GAIN ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median

ENOUGH = (7, 11, 14, 17)
"""So many rounds are enough where none was lost, one, two, three; with a fourth lost it is over."""
GAIN = 1.03
"""What is not better by 3% in the median is not worth a change."""
P99_GROWTH = 1.5
"""How much longer the 99th percentile may be in the median of the rounds, where no latency target says it."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of one setting. `score`: greater is better; 0, and `why`: it cannot be taken.

    `load`: the requests under way or per second that it was measured at. `memory_bytes` None: not known.
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
    """Both, one after the other."""

    incumbent: Measured
    challenger: Measured

    @property
    def ratio(self) -> float:
        """How many times as good the challenger was; infinite where the incumbent was no good at all."""
        if not self.incumbent.score:
            return math.inf if self.challenger.score else 1.0
        return self.challenger.score / self.incumbent.score


class Standing(Enum):
    """How a duel stands."""

    OPEN = "open"
    WON = "won"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How it stands, and in words why."""

    standing: Standing
    says: str


def gain(rounds: Sequence[Round]) -> float:
    """Give the median of the rounds' ratios."""
    return median(each.ratio for each in rounds) if rounds else 1.0


def judged(rounds: Sequence[Round], p99_growth: float = P99_GROWTH) -> Verdict:
    """Judge a duel as it stands. `p99_growth` infinite: the score says all there is to say of latency."""
    if rounds and rounds[-1].challenger.why:
        return Verdict(Standing.LOST, rounds[-1].challenger.why)
    lost = sum(each.ratio <= 1 for each in rounds)
    if lost >= len(ENOUGH) or (lost > 1 and gain(rounds) < GAIN):  # the second: it is not worth more time
        return Verdict(Standing.LOST, f"not better: behind in {lost} of {len(rounds)} rounds")
    if len(rounds) < ENOUGH[lost]:
        return Verdict(Standing.OPEN, f"ahead in {len(rounds) - lost} of {len(rounds)} rounds so far")
    ahead = f"ahead in {len(rounds) - lost} of {len(rounds)} rounds"
    if gain(rounds) < GAIN:
        return Verdict(Standing.LOST, f"{ahead}, but by less than {GAIN - 1:.0%}: not worth a change")
    slower = median(_grown(each) for each in rounds)
    if slower > p99_growth:
        return Verdict(Standing.LOST, f"{ahead}, but p99 is {slower:.1f} times as long")
    return Verdict(Standing.WON, ahead)


def _grown(each: Round) -> float:
    found = each.challenger.p99_us / each.incumbent.p99_us if each.incumbent.p99_us else math.nan
    return found if math.isfinite(found) else 1.0
