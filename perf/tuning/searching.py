"""Searching: which settings are tried, in what order, and which are kept. It has no clock or server.

Knobs that belong together are an axis. All settings of an axis are glanced at once, the best third once more; the best
two duel with the best so far, if their glances are promising. A winner takes its place, and all axes are gone through
again, until nothing changes or the time is up. At the end, what was kept duels with the original configuration: only
that comparison is reported as the gain, and if it is not won, nothing is kept.
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
"""If the mean of two glances is below this fraction of the incumbent's, a duel is not worth its time."""
_AGAIN = 3
_RECENT = 6
_TOO_LITTLE = "the time that is left would not do for another comparison"
_LAST = "against the configuration as it is"


class OverError(Exception):
    """The search ends here with its current result: the time is up, or Ctrl-C was pressed."""


class Bench(Protocol):
    """Measures settings. Raises: OverError; any other exception ends the search without a result."""

    def glance(self, setting: Setting, beside: Measured) -> Measured:
        """Measure a setting briefly, at the load of `beside`; comparable with other glances at that load."""
        ...

    def measure(self, setting: Setting, near: Measured | None) -> Measured:
        """Measure a setting, after reloading. `near`: an earlier result of it or of a similar one."""
        ...

    def left_s(self) -> float:
        """Return how much time is left."""
        ...


@dataclass(slots=True)
class Trial:
    """One comparison and its result. `looks`: glances, as fractions of the incumbent's."""

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
    """The result of a search. `kept`: AS_IT_IS if nothing was better; `confirmed`: by the last duel.

    `ended`: why it ended early, or empty; `first`: the original configuration, measured first.
    """

    kept: Setting = AS_IT_IS
    confirmed: bool = False
    trials: list[Trial] = field(default_factory=list)
    first: Measured | None = None
    last: Trial | None = None
    ended: str = ""


class Search:
    """One search. `axes` returns what to try next; `say` receives a line for each step."""

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
        """The result so far."""

    def run(self) -> Found:
        """Search until nothing is better, or the time is up."""
        try:
            self._measured(AS_IT_IS)  # with no similar result to start from, this one may take long
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
        """Go through all axes. Returns: whether anything was better and there is time for more."""
        before = self._best
        for axis in tuple(self._axes(self._best)):
            settings = [each for each in axis.settings if each not in self._tried]
            if settings and not self._try(axis.name, settings):
                return False
            if self._best != before:  # the other axes depend on it
                return True
        return False

    def _try(self, axis: str, settings: list[Setting]) -> bool:
        """Try the settings of an axis. Returns: whether there was time for it."""
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
        """Glance at all of them once, and at the best once more, each time with the incumbent before and after."""
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
        """Measure both in turns until it is decided. The order alternates, so that drift favors neither."""
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
        """Return the mean cost of recent ones, without the very first if there are others."""
        spent_s = self._spent_s.get(kind) or self._spent_s.get("measure") or [0.0]
        return mean(spent_s[1:][-_RECENT:] or spent_s)

    def _reserve_s(self) -> float:
        """Return the time for a duel won in the fewest rounds, plus the last duel with one lost round."""
        return 2 * (ENOUGH[0] + ENOUGH[1]) * self._cost_s("measure")


def _hope(trial: Trial) -> float:
    return sum(trial.looks) / len(trial.looks) if trial.looks else 0.0
