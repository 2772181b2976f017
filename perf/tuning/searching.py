"""Searching: which settings are tried, in which order, and what is kept of them. It is told the time and has no server.

Knobs that belong together are an axis. All settings of an axis are looked at once, the best third once more; the best
two duel with what has been best so far, if a look gives any hope. What wins takes its place, and all axes are gone
through again, until nothing changes or the time is up. At the end what was kept duels with the configuration as it is,
from the start: only that comparison is told as the gain, and what does not win it is not kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import mean
from typing import Protocol

from .duels import ENOUGH, P99_GROWTH, Measured, Round, Standing, gain, judged
from .knobs import AS_IT_IS, Axis, Setting, shown

DUELLISTS = 2
"""The most duels of one axis."""
HOPE = 0.98
"""Where the mean of two looks is less than so much of the incumbent's, a duel is not worth its time."""
_AGAIN = 3
_RECENT = 6
_TOO_LITTLE = "the time that is left would not do for another comparison"
_LAST = "against the configuration as it is"


class OverError(Exception):
    """The search ends here, with what it has: the time is up, or a Ctrl-C came."""


class Bench(Protocol):
    """What measures. Raises: OverError; anything else ends the search without a result."""

    def glance(self, setting: Setting, beside: Measured) -> Measured:
        """Look at a setting shortly, at the load that `beside` was measured at; comparable with other glances at it."""
        ...

    def measure(self, setting: Setting, near: Measured | None) -> Measured:
        """Measure a setting, loaded anew; `near`: what is known of one that is like it, or of itself."""
        ...

    def left_s(self) -> float:
        """Say how much time is left."""
        ...


@dataclass(slots=True)
class Trial:
    """What was tried against what, and what came of it. `looks`: means of glances, as shares of the incumbent's."""

    axis: str
    setting: Setting
    against: Setting
    looks: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    verdict: str = ""
    kept: bool = False
    measured: Measured | None = None


@dataclass(slots=True)
class Found:
    """What a search has come to. `kept`: AS_IT_IS where nothing was better; `confirmed`: by the last duel.

    `ended`: why it ended before it was done, or empty; `first`: the configuration as it is, before all else.
    """

    kept: Setting = AS_IT_IS
    confirmed: bool = False
    trials: list[Trial] = field(default_factory=list)
    first: Measured | None = None
    last: Trial | None = None
    ended: str = ""


class Search:
    """One search. `axes` gives what to try where it stands; `say` takes a line of each step."""

    def __init__(
        self,
        bench: Bench,
        axes: Callable[[Setting], Iterable[Axis]],
        say: Callable[[str], None] = lambda line: None,
        p99_growth: float = P99_GROWTH,
    ) -> None:
        self._bench = bench
        self._axes = axes
        self._say = say
        self._p99_growth = p99_growth
        self._best = AS_IT_IS
        self._near: dict[Setting, Measured] = {}
        self._tried: set[Setting] = {AS_IT_IS}
        self._spent_s: dict[str, list[float]] = {}
        self.found = Found()
        """What is known at any time."""

    def run(self) -> Found:
        """Search until nothing more is better, or the time is up."""
        try:
            self._measured(AS_IT_IS)  # nothing is known that is like it: this one may take long
            self.found.first = self._measured(AS_IT_IS)
            while self._went_through():
                pass
            self._compare_at_last()
        except OverError as over:
            self.found.ended = str(over)
            self.found.kept = self.found.kept or self._best
        for trial in self.found.trials:
            trial.verdict = trial.verdict or "undecided when the search ended"
        return self.found

    def _went_through(self) -> bool:
        """Go through all axes; say whether anything was better, and there is time for more."""
        before = self._best
        for axis in tuple(self._axes(self._best)):
            settings = [each for each in axis.settings if each not in self._tried]
            if settings and not self._try(axis.name, settings):
                return False
            if self._best != before:  # the other axes look otherwise from here
                return True
        return False

    def _try(self, axis: str, settings: list[Setting]) -> bool:
        """Try the settings of an axis; say whether there was time for it."""
        left = self._bench.left_s() - self._reserve_s()
        fits = int(left / self._cost_s("glance") - 2) if self._cost_s("glance") else len(settings)
        if fits < min(len(settings), 2):
            self.found.ended = _TOO_LITTLE
            return False
        if fits < len(settings):
            self._say(f"{axis}: there is time for {fits} of {len(settings)} settings")
        trials = self._looked(axis, settings[:fits])
        hopeful = sorted((each for each in trials if _hope(each) > HOPE), key=_hope, reverse=True)
        for trial in hopeful[:DUELLISTS]:
            if self._bench.left_s() < self._reserve_s():
                trial.verdict = "no time for a duel"
                self.found.ended = _TOO_LITTLE
                return False
            self._duel(trial)
            if trial.kept:
                self._best = trial.setting
                break
        for trial in hopeful:
            trial.verdict = trial.verdict or "others of its kind looked better"
        return True

    def _looked(self, axis: str, settings: list[Setting]) -> list[Trial]:
        """Look at all of them once, and at the best once more, the incumbent before and after."""
        trials = [Trial(axis, each, self._best) for each in settings]
        self.found.trials += trials
        self._tried.update(settings)
        seen = trials
        for _ in range(2):
            if not seen:
                break
            marks = [self._glanced(self._best).score]
            scores = []
            for trial in seen:
                trial.measured = self._glanced(trial.setting)
                trial.verdict = trial.measured.why
                scores.append(trial.measured.score)
            marks.append(self._glanced(self._best).score)
            mark = sum(marks) / len(marks)
            for trial, score in zip(seen, scores, strict=True):
                trial.looks.append(score / mark if mark else math.inf if score else 0.0)
            able = [each for each in seen if not each.verdict]
            seen = sorted(able, key=_hope, reverse=True)[: max(math.ceil(len(trials) / _AGAIN), DUELLISTS)]
        for trial in trials:
            if not trial.verdict and _hope(trial) <= HOPE:
                trial.verdict = "no better at a first look"
            self._say(f"{shown(trial.setting)}: {_hope(trial):.2f} at first looks  {trial.verdict}".rstrip())
        return trials

    def _duel(self, trial: Trial) -> None:
        """Measure both in turns until it is decided. Who begins a round changes, so that a drift favours neither."""
        self._say(f"{trial.axis}: {shown(trial.setting)} against {shown(trial.against)}")
        judgement = judged(trial.rounds, self._p99_growth)
        while judgement.standing is Standing.OPEN:
            if len(trial.rounds) % 2:
                challenger, incumbent = self._measured(trial.setting), self._measured(trial.against)
            else:
                incumbent, challenger = self._measured(trial.against), self._measured(trial.setting)
            trial.rounds.append(Round(incumbent, challenger))
            trial.measured = challenger
            judgement = judged(trial.rounds, self._p99_growth)
            trial.verdict = judgement.says
            self._say(f"  round {len(trial.rounds)}: {trial.rounds[-1].ratio:.3f}  {judgement.says}")
        trial.kept = judgement.standing is Standing.WON
        self._say(f"  {'kept' if trial.kept else 'not kept'}: {gain(trial.rounds):.2f} in the median")

    def _compare_at_last(self) -> None:
        if self._best == AS_IT_IS:
            return
        last = Trial(_LAST, self._best, AS_IT_IS)
        self.found.last = last
        self._duel(last)
        self.found.confirmed = last.kept
        self.found.kept = self._best if last.kept else AS_IT_IS

    def _glanced(self, setting: Setting) -> Measured:
        return self._timed("glance", lambda: self._bench.glance(setting, self._near[self._best]))

    def _measured(self, setting: Setting) -> Measured:
        near = self._near.get(setting) or self._near.get(self._best)
        found = self._timed("measure", lambda: self._bench.measure(setting, near))
        if found.score:
            self._near[setting] = found
        else:
            self._near.setdefault(setting, found)
        return found

    def _timed(self, kind: str, work: Callable[[], Measured]) -> Measured:
        before_s = self._bench.left_s()
        if before_s <= 0:
            raise OverError("the time is up")
        found = work()
        self._spent_s.setdefault(kind, []).append(before_s - self._bench.left_s())
        return found

    def _cost_s(self, kind: str) -> float:
        """Say what one takes, from the last ones: the first one of all does not count, if there were others."""
        spent_s = self._spent_s.get(kind) or self._spent_s.get("measure") or [0.0]
        return mean(spent_s[1:][-_RECENT:] or spent_s)

    def _reserve_s(self) -> float:
        """Say what a duel takes that is won in the fewest rounds, and after it the last one, which may lose one."""
        return 2 * (ENOUGH[0] + ENOUGH[1]) * self._cost_s("measure")


def _hope(trial: Trial) -> float:
    return sum(trial.looks) / len(trial.looks) if trial.looks else 0.0
