"""Attempts: when an Instance whose device was lost has its model loaded there again, and when no more.

Called by instance.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .batch import Batch

FIRST_RETRY_NS = 1_000_000_000
LAST_RETRY_NS = 60_000_000_000
"""How long a device that was lost is left alone before the model is loaded on it again: doubled with each failure."""
NEVER_NS = 1 << 62
MOST_LOSSES = 5
"""A device that was lost more often, with no run between that went well, is left alone: it is not the requests."""
FAULT_S = 1.0
"""A thread whose own code has failed goes on after so long: at once it might only fail again."""


class Attempts:
    """How often one Instance has lost its device since a run went well. `retry_ns`: when it may try again."""

    def __init__(self) -> None:
        self.losses = 0
        self.retry_ns = 0
        self._wait_ns = FIRST_RETRY_NS

    @property
    def left(self) -> bool:
        """Whether the requests may still be what the device is lost by."""
        return self.losses < MOST_LOSSES

    def went_well(self) -> None:
        """Note that a run has."""
        self.losses, self._wait_ns = 0, FIRST_RETRY_NS

    def forgiven(self, ran: list[Batch]) -> list[Batch]:
        """Forget the losses if any of some runs after them has gone well. Returns: the runs."""
        if any(batch.requests[0].error is None for batch in ran):
            self.losses = 0
        return ran

    def failed(self, now_ns: int) -> int:
        """Note that loading has. Returns: how long to wait before the next time, in nanoseconds."""
        wait_ns = self._wait_ns
        self.retry_ns = now_ns + wait_ns
        self._wait_ns = min(2 * wait_ns, LAST_RETRY_NS)
        return wait_ns

    def end(self) -> None:
        """Try never again."""
        self.retry_ns = NEVER_NS
