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

from .duels import MAX_P99_GROWTH, ROUNDS_TO_WIN, Measurement, Round, Standing, judge, median_ratio
from .knobs import ORIGINAL, Axis, Setting, describe

MAX_DUELS = 2
"""The most duels of one axis."""
MIN_PROSPECT = 0.98
"""If the mean of two glances is below this fraction of the incumbent's, a duel is not worth its time."""
_SCREENED_AGAIN = 3
_RECENT = 6
_NO_TIME = "the time that is left would not do for another comparison"
_FINAL_COMPARISON = "against the configuration as it is"


class SearchEndedError(Exception):
    """The search ends here with its current result: the time is up, or Ctrl-C was pressed."""


class Bench(Protocol):
    """Measures settings. Raises: SearchEndedError; any other exception ends the search without a result."""

    def screen(self, setting: Setting, reference: Measurement) -> Measurement:
        """Measure a setting briefly, at the load of `reference`; comparable with other glances at that load."""
        ...

    def measure(self, setting: Setting, similar: Measurement | None) -> Measurement:
        """Measure a setting, after reloading. `similar`: an earlier result of it or of a similar one."""
        ...

    def remaining_s(self) -> float:
        """Return how much time is left."""
        ...


@dataclass(slots=True)
class Trial:
    """One comparison and its result. `screening_ratios`: glances, as fractions of the incumbent's."""

    axis: str
    setting: Setting
    incumbent: Setting
    screening_ratios: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    verdict: str = ""
    kept: bool = False
    measurement: Measurement | None = None


@dataclass(slots=True)
class SearchResult:
    """The result of a search. `kept`: ORIGINAL if nothing was better; `confirmed`: by the last duel.

    `ended_early`: why it ended early, or empty; `original`: the original configuration, measured first.
    """

    kept: Setting = ORIGINAL
    confirmed: bool = False
    trials: list[Trial] = field(default_factory=list)
    original: Measurement | None = None
    final_trial: Trial | None = None
    ended_early: str = ""


class Search:
    """One search. `axes` returns what to try next; `say` receives a line for each step."""

    def __init__(
        self,
        bench: Bench,
        axes: Callable[[Setting], Iterable[Axis]],
        report_progress: Callable[[str], None] = lambda line: None,
        p99_growth: float = MAX_P99_GROWTH,
    ) -> None:
        self._bench = bench
        self._axes = axes
        self._report_progress = report_progress
        self._p99_growth = p99_growth
        self._best = ORIGINAL
        self._measurements: dict[Setting, Measurement] = {}
        self._tried: set[Setting] = {ORIGINAL}
        self._durations_s: dict[str, list[float]] = {}
        self.result = SearchResult()
        """The result so far."""

    def run(self) -> SearchResult:
        """Search until nothing is better, or the time is up."""
        try:
            self._measure(ORIGINAL)  # with no similar result to start from, this one may take long
            self.result.original = self._measure(ORIGINAL)
            while self._improve():
                pass
            self._confirm()
        except SearchEndedError as over:
            self.result.ended_early = str(over)
            self.result.kept = self.result.kept or self._best
        for trial in self.result.trials:
            trial.verdict = trial.verdict or "undecided when the search ended"
        return self.result

    def _improve(self) -> bool:
        """Go through all axes. Returns: whether anything was better and there is time for more."""
        before = self._best
        for axis in tuple(self._axes(self._best)):
            settings = [each for each in axis.settings if each not in self._tried]
            if settings and not self._try_axis(axis.name, settings):
                return False
            if self._best != before:  # the other axes depend on it
                return True
        return False

    def _try_axis(self, axis: str, settings: list[Setting]) -> bool:
        """Try the settings of an axis. Returns: whether there was time for it."""
        remaining_s = self._bench.remaining_s() - self._reserve_s()
        affordable = int(remaining_s / self._cost_s("glance") - 2) if self._cost_s("glance") else len(settings)
        if affordable < min(len(settings), 2):
            self.result.ended_early = _NO_TIME
            return False
        if affordable < len(settings):
            self._report_progress(f"{axis}: there is time for {affordable} of {len(settings)} settings")
        trials = self._screen_all(axis, settings[:affordable])
        promising = sorted((each for each in trials if _prospect(each) > MIN_PROSPECT), key=_prospect, reverse=True)
        for trial in promising[:MAX_DUELS]:
            if self._bench.remaining_s() < self._reserve_s():
                trial.verdict = "no time for a duel"
                self.result.ended_early = _NO_TIME
                return False
            self._duel(trial)
            if trial.kept:
                self._best = trial.setting
                break
        for trial in promising:
            trial.verdict = trial.verdict or "others of its kind looked better"
        return True

    def _screen_all(self, axis: str, settings: list[Setting]) -> list[Trial]:
        """Glance at all of them once, and at the best once more, each time with the incumbent before and after."""
        trials = [Trial(axis, each, self._best) for each in settings]
        self.result.trials += trials
        self._tried.update(settings)
        screened = trials
        for _ in range(2):
            if not screened:
                break
            incumbent_scores = [self._screen(self._best).score]
            scores = []
            for trial in screened:
                trial.measurement = self._screen(trial.setting)
                trial.verdict = trial.measurement.why
                scores.append(trial.measurement.score)
            incumbent_scores.append(self._screen(self._best).score)
            incumbent_score = sum(incumbent_scores) / len(incumbent_scores)
            for trial, score in zip(screened, scores, strict=True):
                trial.screening_ratios.append(
                    score / incumbent_score if incumbent_score else math.inf if score else 0.0
                )
            usable = [each for each in screened if not each.verdict]
            screened = sorted(usable, key=_prospect, reverse=True)[
                : max(math.ceil(len(trials) / _SCREENED_AGAIN), MAX_DUELS)
            ]
        for trial in trials:
            if not trial.verdict and _prospect(trial) <= MIN_PROSPECT:
                trial.verdict = "no better at a first look"
            self._report_progress(
                f"{describe(trial.setting)}: {_prospect(trial):.2f} at first looks  {trial.verdict}".rstrip()
            )
        return trials

    def _duel(self, trial: Trial) -> None:
        """Measure both in turns until it is decided. The order alternates, so that drift favors neither."""
        self._report_progress(f"{trial.axis}: {describe(trial.setting)} against {describe(trial.incumbent)}")
        verdict = judge(trial.rounds, self._p99_growth)
        while verdict.standing is Standing.OPEN:
            if len(trial.rounds) % 2:
                challenger, incumbent = self._measure(trial.setting), self._measure(trial.incumbent)
            else:
                incumbent, challenger = self._measure(trial.incumbent), self._measure(trial.setting)
            trial.rounds.append(Round(incumbent, challenger))
            trial.measurement = challenger
            verdict = judge(trial.rounds, self._p99_growth)
            trial.verdict = verdict.reason
            self._report_progress(f"  round {len(trial.rounds)}: {trial.rounds[-1].ratio:.3f}  {verdict.reason}")
        trial.kept = verdict.standing is Standing.WON
        self._report_progress(
            f"  {'kept' if trial.kept else 'not kept'}: {median_ratio(trial.rounds):.2f} in the median"
        )

    def _confirm(self) -> None:
        if self._best == ORIGINAL:
            return
        last = Trial(_FINAL_COMPARISON, self._best, ORIGINAL)
        self.result.final_trial = last
        self._duel(last)
        self.result.confirmed = last.kept
        self.result.kept = self._best if last.kept else ORIGINAL

    def _screen(self, setting: Setting) -> Measurement:
        return self._timed("glance", lambda: self._bench.screen(setting, self._measurements[self._best]))

    def _measure(self, setting: Setting) -> Measurement:
        similar = self._measurements.get(setting) or self._measurements.get(self._best)
        measurement = self._timed("measure", lambda: self._bench.measure(setting, similar))
        if measurement.score:
            self._measurements[setting] = measurement
        else:
            self._measurements.setdefault(setting, measurement)
        return measurement

    def _timed(self, kind: str, work: Callable[[], Measurement]) -> Measurement:
        before_s = self._bench.remaining_s()
        if before_s <= 0:
            raise SearchEndedError("the time is up")
        result = work()
        self._durations_s.setdefault(kind, []).append(before_s - self._bench.remaining_s())
        return result

    def _cost_s(self, kind: str) -> float:
        """Return the mean cost of recent ones, without the very first if there are others."""
        spent_s = self._durations_s.get(kind) or self._durations_s.get("measure") or [0.0]
        return mean(spent_s[1:][-_RECENT:] or spent_s)

    def _reserve_s(self) -> float:
        """Return the time for a duel won in the fewest rounds, plus the last duel with one lost round."""
        return 2 * (ROUNDS_TO_WIN[0] + ROUNDS_TO_WIN[1]) * self._cost_s("measure")


def _prospect(trial: Trial) -> float:
    return sum(trial.screening_ratios) / len(trial.screening_ratios) if trial.screening_ratios else 0.0
