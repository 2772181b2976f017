"""Lead: when the device of an Instance is free, and how long before that its next Batch is to be taken.

Called by overlap.py, on the Instance's thread. Pure: told the time.
"""

from __future__ import annotations

from penstock.batching.request import Key

WAKE_NS = 100_000
"""So late a sleeping thread wakes."""
KEPT = 8
"""What a gather and a run take is learned over the latest so many of them, about."""
MOST_RUNS = 1024
"""Of so many Keys and sizes it is known what the device takes; then it is learned anew."""


class Lead:
    """How long before the device is free the next Batch is to be taken.

    So that its rows are there when the device is free, and neither sooner nor later: what comes after it was taken
    waits for a whole run more, as what is there waits for each moment that the device is idle. The two weigh the same,
    hence no margin: with one of an eighth of a run requests waited longer than without overlap, at loads below half.
    Rows are copied twice, by the host and then over the bus, which takes about as long again.

    What a Batch costs (costs.py) has the host's part in it, before and after, so it tells too late when the device is
    free: with a pretended encoder the device was idle for a tenth of the time while requests waited. Therefore it is
    learned what the device itself says that it took.
    """

    def __init__(self) -> None:
        self._gather_ns = 0.0
        self._runs: dict[tuple[Key, int], float] = {}

    def learn(self, gather_ns: int) -> None:
        """Note how long it took from when a Batch was taken until its rows were gathered."""
        before = self._gather_ns or gather_ns
        self._gather_ns = before + (gather_ns - before) / KEPT

    def learn_run(self, key: Key, rows: int, device_ns: int) -> None:
        """Note what the device took for a run of so many rows; 0: it does not tell."""
        if device_ns:
            before = self._runs.get((key, rows))
            if before is None and len(self._runs) >= MOST_RUNS:
                self._runs.clear()
            self._runs[key, rows] = device_ns if before is None else before + (device_ns - before) / KEPT

    def run_ns(self, key: Key, rows: int, cost_ns: float) -> float:
        """Give what the device takes for a run of so many rows; where that is not known what the Batch costs."""
        return self._runs.get((key, rows)) or cost_ns

    def take_ns(self, free_ns: float, run_ns: float) -> float:
        """Give when to take the next, while one runs that takes `run_ns` and is predicted to end at `free_ns`."""
        return free_ns - min(WAKE_NS + 2 * self._gather_ns, run_ns)


def ended_ns(predicted_ns: float, asked_ns: int, told_ns: int, *, over: bool) -> float:
    """Give when a run has ended that was asked for at `asked_ns` and given at `told_ns`. `over`: it had, when asked.

    The host is told late, and what one prediction is wrong by the next would be, too: what is certain bounds it.
    """
    return min(predicted_ns, asked_ns) if over else min(max(predicted_ns, asked_ns), told_ns)
