"""Energy: what a GPU has used, shared out among the models that ran on it. Pure: it is told the time."""

from __future__ import annotations

MOST_MODELS = 1000
"""Of one GPU: versions come and go, and what the one that ran longest ago has used is then counted with `OTHERS`."""
OTHERS = 'model="(others)",version=""'


class Account:
    """The energy of one GPU since it was asked first.

    What it uses between two readings is shared out by the time that models had it in between. Where those times add up
    to more than has passed, since several ran at once, each has its part of their sum. What is left is `rest_uj`: it
    was idle, or others used it.
    Invariants: `rest_uj` and `models_uj` together are `total_uj`, and none of them ever shrinks; a model that is
    unloaded keeps what it has.
    """

    def __init__(self) -> None:
        self.total_uj = 0
        self.rest_uj = 0
        self.models_uj: dict[str, int] = {}
        self._used_ns: dict[str, int] = {}
        self._before: tuple[int, int] | None = None

    def use(self, model: str, ns: int) -> None:
        """Note for how long a model has had the GPU since the last reading. `model`: its labels."""
        self._used_ns[model] = self._used_ns.get(model, 0) + ns

    def read(self, now_ns: int, energy_mj: int) -> None:
        """Take a reading of the GPU's own counter, which begins anew where its driver does."""
        before = self._before
        if before is not None and energy_mj == before[1]:
            return  # the driver counts by steps, and has not taken one since
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
            self.models_uj[model] = self.models_uj.pop(model, 0) + share_uj  # the last to run is the last of them
        self._fold()

    def _fold(self) -> None:
        while len(self.models_uj) > MOST_MODELS:
            first = next(model for model in self.models_uj if model != OTHERS)
            self.models_uj[OTHERS] = self.models_uj.get(OTHERS, 0) + self.models_uj.pop(first)
