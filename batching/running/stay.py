"""Stay: whether a usually fast model may stay on the event loop. Used by Model.dispatch."""

from __future__ import annotations

LONG_NS = 5_000_000
"""A batch that holds the event loop, and with it all requests of all models, for longer is examined."""
HELD_NS = 250_000_000
"""A model that holds the event loop for this long, with as much CPU time used, twice, never runs there again."""
WATCHED_NS = 2_000_000_000
"""For this long after a long batch, the thread's CPU time is read before each batch, for 0.3 to 1.5 us. A long time by
the clock alone says nothing about the model: on a busy machine 40 us may take 20 ms."""
LOOK_NS = 50_000_000
"""Otherwise CPU time is read at this interval: precise enough to tell what an unwatched batch of HELD_NS used."""
OWED_NS = 50_000_000
"""With this much CPU time in long batches, a model leaves the loop. Elapsed time pays back a twentieth."""
PAYS_BACK = 20
AWAY_NS = 5_000_000_000
MOST_AWAY_NS = 600_000_000_000
"""How long it leaves at first; twice as long each time it leaves again soon; at most this."""
FOREVER_NS = 1 << 62


class Stay:
    """What is known of a model's long batches on the event loop, and until when it runs on threads because of them.

    Most of its batches may be fast, which is what the CostModel shows, and a few so slow that other requests wait for
    them: those of a graph with a loop, or large ones. Pure: told the time. Threads: the event loop's.
    """

    def __init__(self) -> None:
        self.away_until_ns = 0
        """The loop does not run the model before this time."""
        self.look_ns = 0
        """From this time on, the thread's CPU time is read before a batch."""
        self._watched_until_ns = self._looked_ns = self._looked_cpu_ns = 0
        self._owed_ns = self._owed_at_ns = self._away_ns = 0

    def looked(self, cpu_ns: int, now_ns: int) -> None:
        """Record the CPU time that the thread has used so far."""
        self._looked_ns, self._looked_cpu_ns = now_ns, cpu_ns
        self.look_ns = now_ns if now_ns < self._watched_until_ns else now_ns + LOOK_NS

    def held(self, held_ns: int, used_ns: int, now_ns: int) -> str:
        """Record a batch longer than LONG_NS that has just ended. `used_ns`: the thread's CPU time so far.

        Returns: the text to log if the model leaves the loop, otherwise "".
        """
        before_ns = now_ns - held_ns - self._looked_ns
        # assume that the loop was computing all the time since CPU time was last read
        cpu_ns = used_ns - self._looked_cpu_ns - before_ns
        self._watch(now_ns + WATCHED_NS)
        if before_ns and held_ns <= HELD_NS:
            return ""
        held = f"held the event loop for {held_ns / 1e6:.0f} ms"
        if cpu_ns > HELD_NS:
            if self._away_ns == MOST_AWAY_NS and self._is_soon(now_ns):
                self.away_until_ns = FOREVER_NS
                return f"{held}: it runs on a thread from now on"
            # once is no proof: while a virtual machine is suspended, its threads' CPU time may advance
            return self._leave(held, now_ns, MOST_AWAY_NS)
        if cpu_ns <= LONG_NS:
            return ""
        paid_ns = (now_ns - self._owed_at_ns) // PAYS_BACK
        self._owed_ns, self._owed_at_ns = max(self._owed_ns - paid_ns, 0) + cpu_ns, now_ns
        if self._owed_ns <= OWED_NS:
            return ""
        owed_ns, self._owed_ns = self._owed_ns, 0
        return self._leave(f"held the event loop with long batches for {owed_ns / 1e6:.0f} ms", now_ns)

    def _is_soon(self, now_ns: int) -> bool:
        return now_ns < self.away_until_ns + self._away_ns

    def _leave(self, why: str, now_ns: int, least_ns: int = AWAY_NS) -> str:
        self._away_ns = max(min(2 * self._away_ns, MOST_AWAY_NS) if self._is_soon(now_ns) else 0, least_ns)
        self.away_until_ns = now_ns + self._away_ns
        self._watch(self.away_until_ns + WATCHED_NS)
        return f"{why}: it runs on a thread for {self._away_ns / 1e9:.0f} s"

    def _watch(self, until_ns: int) -> None:
        self._watched_until_ns = max(self._watched_until_ns, until_ns)
        self.look_ns = 0
