"""Rows: the findings of a part of the check, one figure or one verdict each, and the table that they make.

A Row travels between processes as a line of JSON, and has the same form in gpu_check.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.perf.claims import FAILS, HOLDS

_DIGITS = 4
_WHOLE_FROM = 1000


@dataclass(frozen=True, slots=True)
class Row:
    """One finding. `part`: who found it; `what`: its name, the same in every run, by which others look it up.

    `wanted` is the text of what `value` is held against; `held` is None if nothing is. `note`: what a reader should
    know.
    """

    part: str
    what: str
    value: float | str
    unit: str = ""
    wanted: str = ""
    held: bool | None = None
    note: str = ""

    def line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))


def parse_row(line: str) -> Row | None:
    """Parse a line that `Row.line` wrote; None for any other line, such as a library's output."""
    try:
        fields: dict[str, Any] = json.loads(line)
        texts = all(isinstance(fields.get(name, ""), str) for name in ("part", "what", "unit", "wanted", "note"))
        fine = texts and isinstance(fields["value"], float | int | str) and fields.get("held") in {None, True, False}
        return Row(**fields) if fine else None
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def at_least(part: str, what: str, value: float, minimum: float, unit: str = "", note: str = "") -> Row:
    """Make a Row that requires a figure to be at least so much."""
    return Row(part, what, value, unit, f">= {figure(minimum)}", value >= minimum, note)


def at_most(part: str, what: str, value: float, maximum: float, unit: str = "", note: str = "") -> Row:
    """Make a Row that requires a figure to be at most so much; NaN fails."""
    return Row(part, what, value, unit, f"<= {figure(maximum)}", value <= maximum, note)


def failed(part: str, what: str, error: BaseException | str) -> Row:
    """Make a Row for something that could not be found out; the reason goes on one line."""
    reason = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return Row(part, what, "failed", held=False, note=" ".join(reason.split())[:300])


def figure(value: float | str) -> str:
    """Format a number for a reader: whole from a thousand on, four digits below."""
    if isinstance(value, str):
        return value
    if abs(value) >= _WHOLE_FROM:
        return f"{value:,.0f}"
    return f"{value:.{_DIGITS}g}"


def table(title: str, rows: Sequence[Row], description: Mapping[str, Any]) -> str:
    """Format the Markdown table, with the machine's description above it, and how many rows hold below."""
    lines = [f"## {title}", "", *(f"- {name}: {value}" for name, value in description.items()), ""]
    lines += ["| part | what | found | wanted | |", "| --- | --- | --- | --- | --- |"]
    for row in rows:
        verdict = "" if row.held is None else HOLDS if row.held else f"**{FAILS}**"
        figure_text = " ".join(word for word in (figure(row.value), row.unit) if word)
        last = "; ".join(word for word in (verdict, row.note) if word)
        lines.append("| " + " | ".join(map(_cell, (row.part, row.what, figure_text, row.wanted, last))) + " |")
    return "\n".join([*lines, "", summary(rows), ""])


def summary(rows: Iterable[Row]) -> str:
    """Count."""
    judged = [row for row in rows if row.held is not None]
    failing = [row for row in judged if not row.held]
    return f"{len(judged) - len(failing)} of {len(judged)} rows hold." + (
        f" Not: {'; '.join(f'{row.part}: {row.what}' for row in failing)}." if failing else ""
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
