"""LoopGuard: whether a usually fast model may stay on the event loop. Used by Model.dispatch."""

from __future__ import annotations

LONG_BATCH_NS = 5_000_000
"""A batch that holds the event loop, and with it all requests of all models, for longer is examined."""
MAX_HOLD_NS = 250_000_000
"""A model that holds the event loop for this long, with as much CPU time used, twice, never runs there again."""
WATCH_NS = 2_000_000_000
"""For this long after a long batch, the thread's CPU time is read before each batch, for 0.3 to 1.5 us. A long time by
the clock alone says nothing about the model: on a busy machine 40 us may take 20 ms."""
SAMPLE_INTERVAL_NS = 50_000_000
"""Otherwise CPU time is read at this interval: precise enough to tell what an unwatched batch of MAX_HOLD_NS used."""
MAX_DEBT_NS = 50_000_000
"""With this much CPU time in long batches, a model leaves the loop. Elapsed time pays back a twentieth."""
REPAYMENT_DIVISOR = 20
MIN_OFF_LOOP_NS = 5_000_000_000
MAX_OFF_LOOP_NS = 600_000_000_000
"""How long it leaves at first; twice as long each time it leaves again soon; at most this."""
FOREVER_NS = 1 << 62


class LoopGuard:
    """What is known of a model's long batches on the event loop, and until when it runs on threads because of them.

    Most of its batches may be fast, which is what the CostModel shows, and a few so slow that other requests wait for
    them: those of a graph with a loop, or large ones. Pure: told the time. Threads: the event loop's.
    """

    def __init__(self) -> None:
        self.off_loop_until_ns = 0
        """The loop does not run the model before this time."""
        self.next_sample_ns = 0
        """From this time on, the thread's CPU time is read before a batch."""
        self._watch_until_ns = self._sampled_ns = self._sampled_cpu_ns = 0
        self._debt_ns = self._debt_updated_ns = self._off_loop_ns = 0

    def sample_cpu(self, cpu_ns: int, now_ns: int) -> None:
        """Record the CPU time that the thread has used so far."""
        self._sampled_ns, self._sampled_cpu_ns = now_ns, cpu_ns
        self.next_sample_ns = now_ns if now_ns < self._watch_until_ns else now_ns + SAMPLE_INTERVAL_NS

    def record_long_batch(self, held_ns: int, thread_cpu_ns: int, now_ns: int) -> str:
        """Record a batch longer than LONG_BATCH_NS that has just ended. `thread_cpu_ns`: the thread's CPU time so far.

        Returns: the text to log if the model leaves the loop, otherwise "".
        """
        unsampled_ns = now_ns - held_ns - self._sampled_ns
        # assume that the loop was computing all the time since CPU time was last read
        cpu_ns = thread_cpu_ns - self._sampled_cpu_ns - unsampled_ns
        self._watch_until(now_ns + WATCH_NS)
        if unsampled_ns and held_ns <= MAX_HOLD_NS:
            return ""
        description = f"held the event loop for {held_ns / 1e6:.0f} ms"
        if cpu_ns > MAX_HOLD_NS:
            if self._off_loop_ns == MAX_OFF_LOOP_NS and self._is_soon(now_ns):
                self.off_loop_until_ns = FOREVER_NS
                return f"{description}: it runs on a thread from now on"
            # once is no proof: while a virtual machine is suspended, its threads' CPU time may advance
            return self._move_off_loop(description, now_ns, MAX_OFF_LOOP_NS)
        if cpu_ns <= LONG_BATCH_NS:
            return ""
        repaid_ns = (now_ns - self._debt_updated_ns) // REPAYMENT_DIVISOR
        self._debt_ns, self._debt_updated_ns = max(self._debt_ns - repaid_ns, 0) + cpu_ns, now_ns
        if self._debt_ns <= MAX_DEBT_NS:
            return ""
        debt_ns, self._debt_ns = self._debt_ns, 0
        return self._move_off_loop(f"held the event loop with long batches for {debt_ns / 1e6:.0f} ms", now_ns)

    def _is_soon(self, now_ns: int) -> bool:
        return now_ns < self.off_loop_until_ns + self._off_loop_ns

    def _move_off_loop(self, reason: str, now_ns: int, min_ns: int = MIN_OFF_LOOP_NS) -> str:
        self._off_loop_ns = max(min(2 * self._off_loop_ns, MAX_OFF_LOOP_NS) if self._is_soon(now_ns) else 0, min_ns)
        self.off_loop_until_ns = now_ns + self._off_loop_ns
        self._watch_until(self.off_loop_until_ns + WATCH_NS)
        return f"{reason}: it runs on a thread for {self._off_loop_ns / 1e9:.0f} s"

    def _watch_until(self, until_ns: int) -> None:
        self._watch_until_ns = max(self._watch_until_ns, until_ns)
        self.next_sample_ns = 0
