"""The terminal output of `penstock perf report`: for one run, and for a comparison of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import comparison, findings
from .comparison import Run
from .document import Document, Level
from .findings import fault, load, load_words
from .formats import NOTHING, bare_ms, count, ms, ratio


def lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Format a table: the first column left-aligned, the last too if its heading is empty, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        cells[-1] = cells[-1] if rows[0][-1] else row[-1]
        yield "  " + "  ".join(cells).rstrip()


def describe_run(document: Document, target_ms: float | None = None) -> str:
    """Describe one run."""
    model, levels = document.model, document.levels
    lines_out = [f"{model.name} at {document.url} over {document.protocol}, {document.made_at}"]
    lines_out += [f"! {each}" for each in findings.cautions(document)]
    table: list[tuple[str, ...]] = [("load", "inferences/s", "mean ms", "p50 ms", "p90 ms", "p99 ms", "errors", "")]
    for level in levels:
        latency = [bare_ms(level.client.latency_us.get(name)) for name in ("mean", "p50", "p90", "p99")]
        mark = "not part of the curve" if fault(level) else _mark(document, level)
        failed = findings.failures(level)
        table.append((load(level.offered), count(level.client.rows_per_s), *latency, count(failed), mark))
    lines_out += lines(table) if levels else []
    if knee := findings.knee(levels):
        lines_out.append(f"Knee (greatest throughput / mean latency): {_place(knee)}")
    target = findings.target_ms(document, target_ms)
    goodput = findings.goodput_of(levels, target) if target else None
    if goodput:
        lines_out.append(
            f"Goodput in {goodput.target_ms:g} ms: {count(goodput.most)} inferences/s "
            f"at {load_words(goodput.at.offered)}"
        )
    return _printable(lines_out)


def _mark(document: Document, level: Level) -> str:
    names = {"best": findings.best(document.levels), "knee": findings.knee(document.levels)}
    return ", ".join(name for name, each in names.items() if each is level)


def _place(level: Level) -> str:
    p99 = ms(level.client.latency_us.get("p99"))
    return f"{count(level.client.rows_per_s)} inferences/s at {load_words(level.offered)}, p99 {p99}"


def describe_comparison(compared: Sequence[Run], target_ms: float | None = None) -> str:
    """Compare runs, their differences first."""
    lines_out = [f"! {each}" for each in comparison.warnings(compared)]
    differences_found = comparison.differences(compared)
    lines_out.append("What differs:" if differences_found else "Nothing differs but the figures.")
    names = [run.name for run in compared]
    if differences_found:
        difference_rows = [
            (", ".join(filter(None, (each.part, each.name))), *map(_shorten, each.values)) for each in differences_found
        ]
        lines_out += lines([("", *names), *difference_rows])
    target = target_ms or findings.target_ms(compared[0].document)
    table = [("", *names)]
    table.append(("greatest inferences/s", *(_rate(findings.best(run.document.levels)) for run in compared)))
    table.append(("inferences/s at the knee", *(_rate(findings.knee(run.document.levels)) for run in compared)))
    if target:
        goodputs = [findings.goodput_of(run.document.levels, target) for run in compared]
        table.append(
            (f"goodput in {target:g} ms", *(count(goodput.most) if goodput else NOTHING for goodput in goodputs))
        )
    lines_out += ["Figures:", *lines(table)]
    pairs = comparison.pairs(compared)
    if pairs:
        lines_out.append(f"Ratios to {names[0]}:")
        head = ("load", "run", "inferences/s", "p50", "p99", "server CPU", "")
        body = [
            (
                load(pair.level.offered),
                pair.run.name,
                *(ratio(pair.ratio(figure)) for figure in ("throughput", "p50", "p99", "cpu")),
                f"! {pair.doubt}" if pair.doubt else "",
            )
            for pair in pairs
        ]
        lines_out += lines([head, *body])
    return _printable(lines_out)


def _printable(lines_in: Sequence[str]) -> str:
    """Join lines. Text from a server must not move the cursor."""
    return "\n".join("".join(each if each.isprintable() else "?" for each in line) for line in lines_in)


def _rate(level: Level | None) -> str:
    return f"{count(level.client.rows_per_s)} ({load(level.offered)})" if level else NOTHING


def _shorten(text: str) -> str:
    return text if len(text) <= 48 else text[:45] + "..."
