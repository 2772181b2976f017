"""What a driver says of what it has measured: whether what is claimed holds."""

from __future__ import annotations

HOLDS, FAILS = "holds", "DOES NOT HOLD"


def verdict(words: str, holds: bool) -> str:
    """Write one line of what was claimed."""
    return f"{words}: {HOLDS if holds else FAILS}"
