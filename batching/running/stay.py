"""Stay: whether a model that is fast as a rule may stay on the event loop. Asked and told by Model.dispatch."""

from __future__ import annotations

LONG_NS = 5_000_000
"""A batch that holds the event loop for longer, and with it all requests of all models, is looked at."""
HELD_NS = 250_000_000
"""A model that has held the event loop for so long runs there no more, where it has used so much CPU time, twice."""
WATCHED_NS = 2_000_000_000
"""For so long after a long batch the thread's CPU time is read before each, for 0.3 to 1.5 us. What is long by the
clock alone says nothing of the model: on a busy machine 40 us may take 20 ms."""
DOUBTED_NS = 600_000_000_000
"""For so long after one of HELD_NS that nobody has watched: the machine may have stood still, or it was the model."""
OWED_NS = 50_000_000
"""With so much CPU time in long batches it leaves the loop, less what time has paid back: a twentieth."""
PAYS_BACK = 20
AWAY_NS = 5_000_000_000
MOST_AWAY_NS = 600_000_000_000
"""It is away for so long at first, and twice as long each time if it is soon sent off again; at most this."""
FOREVER_NS = 1 << 62


class Stay:
    """What is known of a model's long batches on the event loop, and until when it runs on threads for that.

    Most of its batches may be fast, which is what the CostModel tells, and a few so slow that others wait for them: of
    a graph with a loop in it, or large ones. Pure: told the time. Threads: the event loop's.
    """

    def __init__(self) -> None:
        self.away_until_ns = 0
        """The loop runs nothing of it before."""
        self.watched_until_ns = 0
        """Until then the CPU time of its batches is wanted."""
        self._owed_ns = self._owed_at_ns = self._away_ns = 0

    def held(self, held_ns: int, cpu_ns: int | None, now_ns: int) -> str:
        """Note a batch longer than LONG_NS that has ended now. `cpu_ns`: of this thread; None if it was not watched.

        Returns: what is to be said about it, where it leaves the loop.
        """
        self._watch(now_ns + WATCHED_NS)
        held = f"held the event loop for {held_ns / 1e6:.0f} ms"
        if cpu_ns is None:
            if held_ns <= HELD_NS:
                return ""
            said = self._leave(held, now_ns)
            self._watch(now_ns + DOUBTED_NS)
            return said
        if cpu_ns > HELD_NS:
            if self._away_ns == MOST_AWAY_NS and self._is_soon(now_ns):
                self.away_until_ns = FOREVER_NS
                return f"{held}: it runs on threads from now on"
            # once is no proof: where a virtual machine stands still its threads' CPU time may go on
            return self._leave(held, now_ns, MOST_AWAY_NS)
        if cpu_ns <= LONG_NS:
            return ""
        paid_ns = (now_ns - self._owed_at_ns) // PAYS_BACK
        self._owed_ns, self._owed_at_ns = max(self._owed_ns - paid_ns, 0) + cpu_ns, now_ns
        if self._owed_ns <= OWED_NS:
            return ""
        owed_ns, self._owed_ns = self._owed_ns, 0
        return self._leave(f"held the event loop with long batches, for {owed_ns / 1e6:.0f} ms", now_ns)

    def _is_soon(self, now_ns: int) -> bool:
        return now_ns < self.away_until_ns + self._away_ns

    def _leave(self, why: str, now_ns: int, least_ns: int = AWAY_NS) -> str:
        self._away_ns = max(min(2 * self._away_ns, MOST_AWAY_NS) if self._is_soon(now_ns) else 0, least_ns)
        self.away_until_ns = now_ns + self._away_ns
        self._watch(self.away_until_ns + WATCHED_NS)
        return f"{why}: it runs on threads for {self._away_ns / 1e9:.0f} s"

    def _watch(self, until_ns: int) -> None:
        self.watched_until_ns = max(self.watched_until_ns, until_ns)
