"""Number types for argparse, which reject by name what is not a number or is out of range."""

from __future__ import annotations

import argparse
import math


def positive_int(text: str) -> int:
    """Parse a whole number above 0. Raises: argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def positive_float(text: str) -> float:
    """Parse a number above 0. Raises: argparse.ArgumentTypeError."""
    number = _finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return number


def non_negative_float(text: str) -> float:
    """Parse a number that is 0 or more. Raises: argparse.ArgumentTypeError."""
    number = _finite(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 or more")
    return number


def share(text: str) -> float:
    """Parse a number above 0 and at most 1. Raises: argparse.ArgumentTypeError."""
    number = _finite(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return number


def _finite(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return number
