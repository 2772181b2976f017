"""ReloadBackoff: when an Instance whose device was lost may reload its model, and when it gives up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import Batch

MIN_RETRY_NS = 1_000_000_000
MAX_RETRY_NS = 60_000_000_000
"""How long a lost device is left alone before the model is reloaded on it; doubles with each failure."""
NEVER_NS = 1 << 62
MAX_LOSSES = 5
"""After this many losses with no successful run in between, the device is left alone: requests are not the
cause."""
FAULT_RETRY_S = 1.0
"""A thread whose own code failed continues after this long; at once, it might only fail again."""


class ReloadBackoff:
    """How often one Instance has lost its device since a run succeeded. `retry_ns`: when it may try again."""

    def __init__(self) -> None:
        self.losses = 0
        self.retry_ns = 0
        self._wait_ns = MIN_RETRY_NS

    @property
    def may_retry(self) -> bool:
        """Whether the requests may still be what causes the device to be lost."""
        return self.losses < MAX_LOSSES

    def record_success(self) -> None:
        """Record a successful run."""
        self.losses, self._wait_ns = 0, MIN_RETRY_NS

    def reset_if_successful(self, ran: list[Batch]) -> list[Batch]:
        """Forget the losses if any of these runs, made after them, succeeded. Returns: the runs."""
        if any(batch.requests[0].error is None for batch in ran):
            self.losses = 0
        return ran

    def record_failure(self, now_ns: int) -> int:
        """Record that loading failed. Returns: how long to wait before the next attempt, in nanoseconds."""
        wait_ns = self._wait_ns
        self.retry_ns = now_ns + wait_ns
        self._wait_ns = min(2 * wait_ns, MAX_RETRY_NS)
        return wait_ns

    def stop_retrying(self) -> None:
        """Never try again."""
        self.retry_ns = NEVER_NS
