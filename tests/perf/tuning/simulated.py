"""A simulated server: a score for every setting, drawn with noise, and a clock that each measurement moves on."""

from __future__ import annotations

import random
from collections.abc import Callable

from penstock.perf.tuning.duels import Measurement
from penstock.perf.tuning.knobs import Setting
from penstock.perf.tuning.search import SearchEndedError

COST_S = 1.0


class SimulatedBench:
    """Measures `worth` of a setting, times e to the power of a normal draw. Every measurement takes a second."""

    def __init__(
        self, worth: Callable[[dict[str, int]], float], noise: float = 0.0, budget_s: float = 1e9, seed: int = 0
    ) -> None:
        self._worth = worth
        self._noise = noise
        self._random = random.Random(seed)
        self._remaining_s = budget_s
        self.interrupted_at_s = -1.0
        self.measured: list[Setting] = []

    def screen(self, setting: Setting, reference: Measurement) -> Measurement:
        assert reference.load
        return self.measure(setting, reference)

    def measure(self, setting: Setting, near: Measurement | None) -> Measurement:
        self._remaining_s -= COST_S
        if self._remaining_s < self.interrupted_at_s:
            raise SearchEndedError("interrupted")
        self.measured.append(setting)
        worth = self._worth(dict(setting))
        if worth < 0:
            return Measurement(0.0, 8.0, why="the server does not take it")
        score = worth * 2.718281828 ** self._random.gauss(0, self._noise)
        return Measurement(score, 8.0, score, 1e6 / score, 2e6 / score)

    def remaining_s(self) -> float:
        return self._remaining_s
