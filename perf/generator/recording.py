"""Recording: what ended since the last mark, in flat arrays. Nothing is computed while the load runs."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from .orders import Times, Window

_MAX_KINDS = 100
_OTHERS = "other errors"


class Recorder:
    """One process's finished requests, 24 bytes each until they are taken. Threads: its loop's.

    `last_answer_ns`: when the server last answered; `failure`: why the load cannot continue, which is passed to
    `on_failure` once.
    """

    def __init__(self, on_failure: Callable[[str], None] = lambda reason: None) -> None:
        self.starts = array("q")
        self.ends = array("q")
        self.late = array("q")
        self.earlier_counts = array("q")
        self.earlier_ns = array("q")
        self.responses = 0
        self.errors: Counter[str] = Counter()
        self.waited_for_connection = 0
        self.last_answer_ns = 0
        self.failure = ""
        self._failed_ns = 0
        self.on_failure = on_failure
        self._begin_ns = time.monotonic_ns()
        self._cpu_s = time.process_time()

    def on_responses(self, earlier_ns: Sequence[int], count: int) -> None:
        """Record the responses of the next good end."""
        self.responses += count
        self.earlier_counts.append(len(earlier_ns))
        self.earlier_ns.extend(earlier_ns)

    def fail(self, error: str) -> None:
        """Count a failed request. Kinds of errors beyond the first hundred are counted as one."""
        is_counted_alone = error in self.errors or len(self.errors) < _MAX_KINDS
        self.errors[error if is_counted_alone else _OTHERS] += 1

    def abort(self, reason: str) -> None:
        """Record that the load cannot continue."""
        if not self.failure:
            self.failure, self._failed_ns = reason, time.monotonic_ns()
            self.on_failure(reason)

    def reset(self) -> None:
        """Reset `failure` for another load."""
        self.failure, self._failed_ns = "", 0

    @property
    def ended(self) -> int:
        """How many have ended since the last `take`, successfully or not."""
        return len(self.ends) + self.errors.total()

    def take(self, in_flight: int = 0, behind_ns: int = 0) -> Window:
        """Return what ended since the last call, and start over."""
        now_ns, cpu_s = time.monotonic_ns(), time.process_time()
        window = Window(
            begin_ns=self._begin_ns,
            end_ns=now_ns,
            starts_ns=_times(self.starts),
            ends_ns=_times(self.ends),
            late_ns=_times(self.late),
            errors=self.errors,
            failure=self.failure,
            cpu_s=cpu_s - self._cpu_s,
            in_flight=in_flight,
            failed_ns=self._failed_ns,
            waited_for_connection=self.waited_for_connection,
            behind_ns=behind_ns,
            responses=self.responses,
            earlier_counts=_times(self.earlier_counts),
            earlier_ns=_times(self.earlier_ns),
        )
        self.starts, self.ends, self.late = array("q"), array("q"), array("q")
        self.earlier_counts, self.earlier_ns, self.responses = array("q"), array("q"), 0
        self.errors, self.waited_for_connection, self._begin_ns, self._cpu_s = Counter(), 0, now_ns, cpu_s
        return window


def _times(stamps: array[int]) -> Times:
    """Return an array's own memory, without a copy."""
    return np.frombuffer(stamps, np.int64) if stamps else np.empty(0, np.int64)
