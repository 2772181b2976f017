"""Energy: a GPU's consumption, divided among the models that ran on it. Pure: the time is an argument."""

from __future__ import annotations

MAX_MODELS = 1000
"""The limit per GPU: versions come and go, and the share of the one that ran longest ago is moved to `OTHERS`."""
OTHERS = 'model="(others)",version=""'


class EnergyAccount:
    """The energy of one GPU since its first reading.

    The energy used between two readings is divided in proportion to the models' times on the GPU. If those add up to
    more than the elapsed time, since several ran at once, each gets its part of their sum. The remainder is
    `unattributed_uj`: the GPU was idle, or others used it.
    Invariants: `unattributed_uj` and `models_uj` add up to `total_uj`, and none of them ever shrinks; a model that is
    unloaded keeps its share.
    """

    def __init__(self) -> None:
        self.total_uj = 0
        self.unattributed_uj = 0
        self.models_uj: dict[str, int] = {}
        self._pending_ns: dict[str, int] = {}
        self._last_reading: tuple[int, int] | None = None

    def add_run_time(self, model: str, ns: int) -> None:
        """Add a model's time on the GPU since the last reading. `model`: its labels."""
        self._pending_ns[model] = self._pending_ns.get(model, 0) + ns

    def add_reading(self, now_ns: int, energy_mj: int) -> None:
        """Add a reading of the GPU's own counter, which restarts with its driver."""
        last = self._last_reading
        if last is not None and energy_mj == last[1]:
            return  # the driver counts in steps, and there was none since
        used_ns, self._pending_ns = self._pending_ns, {}
        self._last_reading = now_ns, energy_mj
        if last is None or energy_mj < last[1]:
            return
        used_uj = (energy_mj - last[1]) * 1000
        interval_ns = max(now_ns - last[0], sum(used_ns.values()), 1)
        self.total_uj += used_uj
        self.unattributed_uj += used_uj
        for model, ns in used_ns.items():
            share_uj = used_uj * ns // interval_ns
            self.unattributed_uj -= share_uj
            self.models_uj[model] = self.models_uj.pop(model, 0) + share_uj  # last: models stay in order of last run
        self._merge_oldest()

    def _merge_oldest(self) -> None:
        while len(self.models_uj) > MAX_MODELS:
            first = next(model for model in self.models_uj if model != OTHERS)
            self.models_uj[OTHERS] = self.models_uj.get(OTHERS, 0) + self.models_uj.pop(first)
