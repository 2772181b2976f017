"""What happens around a run: `model_warmup`, `response_cache`, `model_transaction_policy`."""

from __future__ import annotations

from .notes import Notes

HONOURED: tuple[str, ...] = ()
REFUSED = ("model_warmup", "model_transaction_policy.decoupled", "response_cache.enable")


def read(notes: Notes) -> None:
    """Read them."""
