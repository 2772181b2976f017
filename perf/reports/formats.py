"""Formats: how figures are printed, on the page and in the terminal. What is not a number is a dash."""

from __future__ import annotations

import math

NOTHING = "–"  # noqa: RUF001 (the dash that tables use)


def digits(value: float | None) -> str:
    """Format three significant digits, or more before the point: 0.0123, 1.23, 12.3, 1,234."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if not value:
        return "0"
    decimals = max(2 - math.floor(math.log10(abs(value))), 0)
    return f"{value:,.{decimals}f}"


def count(value: float | None) -> str:
    """Format a whole number."""
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else NOTHING


def per_s(value: float | None) -> str:
    """Format a rate per second."""
    return f"{count(value) if value is None or not abs(value) < 100 else digits(value)}/s"


def ms(us: float | None) -> str:
    """Format microseconds as milliseconds, with the unit."""
    return f"{digits(us / 1e3)} ms" if us is not None and math.isfinite(us) else NOTHING


def bare_ms(us: float | None) -> str:
    """Format microseconds as milliseconds, without the unit."""
    return digits(us / 1e3) if us is not None and math.isfinite(us) else NOTHING


def share(value: float | None) -> str:
    """Format a fraction as a percentage."""
    return f"{value * 100:.3g}%" if value is not None and math.isfinite(value) else NOTHING


def size(nbytes: float | None) -> str:
    """Format a size in bytes."""
    if nbytes is None or not math.isfinite(nbytes):
        return NOTHING
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{digits(nbytes)} {unit}"
        nbytes /= 1024
    return f"{digits(nbytes)} GiB"


def ratio(value: float | None) -> str:
    """Format a ratio."""
    return f"{value:.2f}×" if value is not None and math.isfinite(value) else NOTHING  # noqa: RUF001
