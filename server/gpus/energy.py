"""Energy: a GPU's consumption, divided among the models that ran on it. Pure: the time is an argument."""

from __future__ import annotations

MOST_MODELS = 1000
"""The limit per GPU: versions come and go, and the share of the one that ran longest ago is moved to `OTHERS`."""
OTHERS = 'model="(others)",version=""'


class Account:
    """The energy of one GPU since its first reading.

    The energy used between two readings is divided in proportion to the models' times on the GPU. If those add up to
    more than the elapsed time, since several ran at once, each gets its part of their sum. The remainder is `rest_uj`:
    the GPU was idle, or others used it.
    Invariants: `rest_uj` and `models_uj` add up to `total_uj`, and none of them ever shrinks; a model that is unloaded
    keeps its share.
    """

    def __init__(self) -> None:
        self.total_uj = 0
        self.rest_uj = 0
        self.models_uj: dict[str, int] = {}
        self._used_ns: dict[str, int] = {}
        self._before: tuple[int, int] | None = None

    def use(self, model: str, ns: int) -> None:
        """Add a model's time on the GPU since the last reading. `model`: its labels."""
        self._used_ns[model] = self._used_ns.get(model, 0) + ns

    def read(self, now_ns: int, energy_mj: int) -> None:
        """Add a reading of the GPU's own counter, which restarts with its driver."""
        before = self._before
        if before is not None and energy_mj == before[1]:
            return  # the driver counts in steps, and there was none since
        used_ns, self._used_ns = self._used_ns, {}
        self._before = now_ns, energy_mj
        if before is None or energy_mj < before[1]:
            return
        spent_uj = (energy_mj - before[1]) * 1000
        whole_ns = max(now_ns - before[0], sum(used_ns.values()), 1)
        self.total_uj += spent_uj
        self.rest_uj += spent_uj
        for model, ns in used_ns.items():
            share_uj = spent_uj * ns // whole_ns
            self.rest_uj -= share_uj
            self.models_uj[model] = self.models_uj.pop(model, 0) + share_uj  # last: models stay in order of last run
        self._fold()

    def _fold(self) -> None:
        while len(self.models_uj) > MOST_MODELS:
            first = next(model for model in self.models_uj if model != OTHERS)
            self.models_uj[OTHERS] = self.models_uj.get(OTHERS, 0) + self.models_uj.pop(first)
