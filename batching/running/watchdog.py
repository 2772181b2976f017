"""Watchdog: ends runs that take longer than their model allows (`BatchPolicy.run_limit_us`).

One per Engine, for all its models. isolation.py and overlap.py report each run of a model that has a limit.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress

from penstock.backends.backend import Binding

logger = logging.getLogger("penstock.batching")

POLL_NS = 250_000_000
"""The polling interval while anything runs. A poll that is later than this shows that the whole process stood still."""
RESTOP_NS = 100_000_000
"""A stopped run that continues is stopped again after this long: runtimes check between two operators."""


class Runs:
    """The current runs that have a limit, and when each exceeds it. Pure: told the time."""

    def __init__(self) -> None:
        self._deadlines_ns: dict[Binding, int] = {}
        self._started_ns: dict[Binding, int] = {}

    def begin(self, binding: Binding, deadline_ns: int, now_ns: int = 0) -> None:
        """Record that a Binding runs, until `deadline_ns` at most."""
        self._deadlines_ns[binding] = deadline_ns
        self._started_ns[binding] = now_ns

    def end(self, binding: Binding) -> None:
        """Record that a Binding no longer runs, if it did."""
        self._deadlines_ns.pop(binding, None)
        self._started_ns.pop(binding, None)

    def overdue(self, now_ns: int) -> list[Binding]:
        """Return the Bindings to stop now; each is due again later in case it does not stop."""
        overdue = [binding for binding, deadline_ns in self._deadlines_ns.items() if deadline_ns <= now_ns]
        for binding in overdue:
            self._deadlines_ns[binding] = now_ns + RESTOP_NS
        return overdue

    def extend(self, ns: int, since_ns: int) -> None:
        """Extend the limits by a time in which nothing ran."""
        for binding in self._deadlines_ns:
            if self._started_ns[binding] <= since_ns:
                self._deadlines_ns[binding] += ns

    def next_deadline_ns(self) -> int:
        """When the next run is overdue; 0 if nothing runs."""
        return min(self._deadlines_ns.values(), default=0)


class Watchdog:
    """A thread that stops overdue runs. It polls while anything runs, and otherwise sleeps.

    Threads: all methods may be called on any. A Binding is stopped only between its `begin` and its `end`, so no later
    run of it is hit. The thread starts with the first `begin`.
    """

    def __init__(self) -> None:
        self._runs = Runs()
        self._logged: set[Binding] = set()
        self._changed = threading.Condition()
        self._wake_ns = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    def begin(self, binding: Binding, limit_ns: int, now_ns: int) -> None:
        """Record that a Binding runs from now on, for `limit_ns` at most."""
        deadline_ns = now_ns + limit_ns
        with self._changed:
            self._runs.begin(binding, deadline_ns, now_ns)
            if not self._wake_ns or deadline_ns < self._wake_ns:
                self._wake_ns = deadline_ns
                self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                with suppress(RuntimeError):  # no thread can be started now: a later run tries again
                    thread.start()
                    self._thread = thread

    def end(self, binding: Binding) -> None:
        """Record that its run has ended."""
        with self._changed:
            self._runs.end(binding)
            if self._logged:
                self._logged.discard(binding)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _stop_run(self, binding: Binding) -> None:
        try:
            binding.stop()
        except Exception:  # other runs, current and future, have limits too
            if binding not in self._logged:
                self._logged.add(binding)
                logger.exception("a run that exceeded its limit could not be stopped, trying again")

    def _run(self) -> None:
        with self._changed:
            while not self._stopping:
                now_ns = time.monotonic_ns()
                for binding in self._runs.overdue(now_ns):
                    self._stop_run(binding)
                now_ns = time.monotonic_ns()  # a stop may have taken long
                due_ns = self._wake_ns = min(self._runs.next_deadline_ns(), now_ns + POLL_NS)
                cpu_ns = time.process_time_ns()
                self._changed.wait((due_ns - now_ns) / 1e9 if due_ns else None)
                late_ns = time.monotonic_ns() - max(due_ns, now_ns)
                # if the process used its CPUs meanwhile, only this thread was kept from the GIL
                if due_ns and late_ns > max(POLL_NS, 2 * (time.process_time_ns() - cpu_ns)):
                    self._runs.extend(late_ns, due_ns)
