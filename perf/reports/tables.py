"""Tables of a page: every level with every figure, and the models of an ensemble."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .document import Document, Level
from .findings import best, failures, fault, knee, load
from .formats import bare_ms, count, digits, share, size
from .markup import Markup, element, row, section, table


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a level: its heading, its unit, and its format; None if it was not measured."""

    name: str
    unit: str
    shown: Callable[[Level], str | None]


def _latency(name: str) -> Column:
    return Column(name, "ms", lambda level: _format_unless_none(bare_ms, level.client.latency_us.get(name)))


def _server(name: str, field: str) -> Column:
    return Column(
        name, "ms", lambda level: _format_unless_none(bare_ms, getattr(level.server, field)) if level.server else None
    )


def _format_unless_none(format_value: Callable[[float], str], value: float | None) -> str | None:
    return None if value is None else format_value(value)


COLUMNS = (
    Column("requests", "/s", lambda level: count(level.client.requests_per_s)),
    Column("inferences", "/s", lambda level: count(level.client.rows_per_s)),
    *map(_latency, ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")),
    Column("errors", "", lambda level: count(failures(level)) if failures(level) else None),
    Column("windows", "counted", lambda level: f"{level.settled} of {len(level.windows)}" if level.windows else None),
    Column("late p99", "ms", lambda level: _format_unless_none(bare_ms, (level.client.late_us or {}).get("p99"))),
    _server("queue", "queue_us"),
    _server("inference", "compute_infer_us"),
    Column("rows", "per batch", lambda level: digits(level.server.rows_per_batch) if level.server else None),
    Column("server CPU", "s per 1,000", lambda level: _format_unless_none(digits, level.server_cpu_s_per_1000)),
    Column("server memory", "", lambda level: _format_unless_none(size, level.server_rss_bytes)),
    Column("energy", "J per 1,000", lambda level: _format_unless_none(digits, level.energy_j_per_1000)),
    Column(
        "generator", "us a request", lambda level: _format_unless_none(digits, level.client.cpu_us_per_request or None)
    ),
    Column("generator", "cores", lambda level: _format_unless_none(digits, level.client.cores or None)),
)


def levels(document: Document) -> Markup:
    """Make the table of all levels, without figures that no level has."""
    if not document.levels:
        return Markup()
    columns = [each for each in COLUMNS if any(each.shown(level) is not None for level in document.levels)]
    if document.batch == 1:
        columns = [each for each in columns if each.name != "requests"]
    has_remarks = any(fault(level) or level.ended or level.notes or level.client.errors for level in document.levels)
    tags = {
        id(level): name for level, name in ((best(document.levels), "best"), (knee(document.levels), "knee")) if level
    }
    head = ["load", *(element("span", each.name, element("small", each.unit or "\u00a0")) for each in columns)]
    rows = []
    for level in document.levels:
        first_cell = element("span", load(level.offered)), _tag(tags.get(id(level), ""))
        cells = [each.shown(level) or "–" for each in columns]  # noqa: RUF001
        if has_remarks:
            cells.append(element("td", _remarks(level), class_="words"))
        rows.append(row(Markup("".join(first_cell)), cells, "outside" if fault(level) else ""))
    note = "All figures are of answers that came well, of the windows that counted."
    return section(
        "All levels",
        table([*head, *([element("th", "remarks", class_="words")] if has_remarks else [])], rows),
        note=note,
        anchor="levels",
        long=True,
    )


def _tag(text: str) -> Markup:
    return element("span", text, class_="tag") if text else Markup()


def _remarks(level: Level) -> str:
    errors = [f"{count(times)} times {error_text}" for error_text, times in level.client.errors.items()]
    remarks = [fault(level), level.ended, *errors, *level.notes]
    return "; ".join(dict.fromkeys(each for each in remarks if each and each != "unstable"))


def composing(document: Document) -> Markup:
    """Make the table of an ensemble's models at the level with the highest throughput; empty if it is not one."""
    level = best(document.levels)
    if not level or not level.server or not level.server.composing:
        return Markup()
    head = [
        "model",
        "inferences",
        "executions",
        "rows per batch",
        "queue ms",
        "input ms",
        "inference ms",
        "output ms",
        "cache hits",
    ]
    rows = [
        row(
            name,
            [
                count(side.inferences),
                count(side.executions),
                digits(side.rows_per_batch),
                *map(bare_ms, (side.queue_us, side.compute_input_us, side.compute_infer_us, side.compute_output_us)),
                share(side.cache_hits / side.requests) if side.requests else "–",  # noqa: RUF001
            ],
        )
        for name, side in level.server.composing.items()
    ]
    note = f"Means of a request at load {load(level.offered)}, the greatest throughput."
    return section("Models that it is composed of", table(head, rows), note=note)
