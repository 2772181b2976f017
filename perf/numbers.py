"""Number types for argparse, which reject by name what is not a number or is out of range."""

from __future__ import annotations

import argparse
import math


def at_least_one(word: str) -> int:
    """Parse a whole number above 0. Raises: argparse.ArgumentTypeError."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number above 0")
    return int(word)


def above_zero(word: str) -> float:
    """Parse a number above 0. Raises: argparse.ArgumentTypeError."""
    number = _finite(word)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not above 0")
    return number


def not_negative(word: str) -> float:
    """Parse a number that is 0 or more. Raises: argparse.ArgumentTypeError."""
    number = _finite(word)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{word!r} is not 0 or more")
    return number


def share(word: str) -> float:
    """Parse a number above 0 and at most 1. Raises: argparse.ArgumentTypeError."""
    number = _finite(word)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{word!r} is not above 0 and at most 1")
    return number


def _finite(word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number")
    return number
