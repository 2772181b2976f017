"""Exposition: labels and numbers in Prometheus' text format, for all writers of metrics page lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence


def label_value(text: str) -> str:
    r"""Escape a label's value: backslash, double quote and newline.

    Source: the Prometheus text exposition format.
    """
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    """Format a number, without a decimal point if it is whole."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def decimal(value: int, digits: int) -> str:
    """Return `value` divided by ten to the power `digits`, exactly and never in exponent form."""
    integer_part, fraction = divmod(value, 10**digits)
    return f"{integer_part}.{fraction:0{digits}d}".rstrip("0").rstrip(".") if fraction else str(integer_part)


def histogram_lines(name: str, labels: str, edges: Sequence[str], counts: Sequence[int], total: str) -> Iterator[str]:
    """Yield the lines of a histogram. `counts` are not cumulative; there is one more than edges, for larger values."""
    cumulative, prefix = 0, f"{labels}," if labels else ""
    for edge, count in zip((*edges, "+Inf"), counts, strict=True):
        cumulative += count
        yield f'{name}_bucket{{{prefix}le="{edge}"}} {cumulative}'
    braces = f"{{{labels}}}" if labels else ""
    yield f"{name}_sum{braces} {total}"
    yield f"{name}_count{braces} {cumulative}"
