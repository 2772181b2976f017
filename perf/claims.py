"""Verdicts: the lines in which a benchmark reports whether a claim holds."""

from __future__ import annotations

HOLDS, FAILS = "holds", "DOES NOT HOLD"


def verdict(claim: str, holds: bool) -> str:
    """Format the verdict on one claim."""
    return f"{claim}: {HOLDS if holds else FAILS}"
