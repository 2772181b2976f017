"""Lead: when an Instance's device becomes free, and how long before that to take the next Batch.

Called by overlap.py, on the Instance's thread. Pure: told the time.
"""

from __future__ import annotations

from penstock.batching.request import Key

WAKE_LATENCY_NS = 100_000
"""How late a sleeping thread may wake."""
AVERAGED_RUNS = 8
"""Gather and run times are averaged over about this many of the latest."""
MAX_RUNS = 1024
"""Device times are kept for this many combinations of Key and size; then they are learned anew."""


class Lead:
    """How long before the device becomes free to take the next Batch.

    Its rows should be there exactly when the device becomes free: what arrives after it was taken waits for a whole run
    more, and what waits is delayed by each moment that the device is idle. The two weigh the same, hence no margin:
    with one of an eighth of a run, requests waited longer than without overlap, at loads below half. Rows are copied
    twice, by the host and then over the bus, which takes about as long again.
    A Batch's cost (costs.py) includes the host's work before and after, so it predicts the free device too late: with a
    simulated encoder, the device was idle a tenth of the time while requests waited. Therefore the time reported by the
    device itself is learned.
    """

    def __init__(self) -> None:
        self._gather_ns = 0.0
        self._runs: dict[tuple[Key, int], float] = {}

    def learn_gather(self, gather_ns: int) -> None:
        """Learn the time from when a Batch was taken until its rows were gathered."""
        before = self._gather_ns or gather_ns
        self._gather_ns = before + (gather_ns - before) / AVERAGED_RUNS

    def learn_run(self, key: Key, rows: int, device_ns: int) -> None:
        """Learn the device time of a run of this many rows; 0 means not reported."""
        if device_ns:
            before = self._runs.get((key, rows))
            if before is None and len(self._runs) >= MAX_RUNS:
                self._runs.clear()
            self._runs[key, rows] = device_ns if before is None else before + (device_ns - before) / AVERAGED_RUNS

    def run_ns(self, key: Key, rows: int, cost_ns: float) -> float:
        """Return the device time of a run of this many rows, or the Batch's cost if unknown."""
        return self._runs.get((key, rows)) or cost_ns

    def take_ns(self, free_ns: float, run_ns: float) -> float:
        """Return when to take the next Batch while one runs that takes `run_ns` and should end at `free_ns`."""
        return free_ns - min(WAKE_LATENCY_NS + 2 * self._gather_ns, run_ns)


def estimate_end_ns(predicted_ns: float, polled_ns: int, returned_ns: int, *, ended: bool) -> float:
    """Return when a run ended that was polled at `polled_ns` and returned at `returned_ns`. `ended`: ended when polled.

    The host learns of the end late, and an error in one prediction would carry over to the next: known times bound it.
    """
    return min(predicted_ns, polled_ns) if ended else min(max(predicted_ns, polled_ns), returned_ns)
