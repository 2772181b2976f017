"""Tables: the results for a terminal and, as the generated part of a page, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from .results import FIGURES, OURS, Cell, Figure, Results
from .wires import KINDS

BEGIN, END = "<!-- peers: made by `penstock perf peers` -->", "<!-- peers: end -->"
WIN = "*"
_HEADS = ("at once", "server", "wire", *(figure.title for figure in FIGURES), "to Penstock")
_NAMES = 3
_LEGEND = (
    f"{WIN}: better than Penstock under the same load. to Penstock: requests/s, Penstock's = 1. "
    "CPU is that of the server and all processes that it started; memory is their total (PSS)."
)


def sections(results: Results) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a heading and its rows for each model and kind of wire. A cell without figures has its error."""

    def place(cell: Cell) -> tuple[str, int]:
        return cell.model, KINDS.index(cell.kind)

    order = list(dict.fromkeys(cell.model for cell in results.cells))
    cells = sorted(results.cells, key=lambda cell: (order.index(cell.model), KINDS.index(cell.kind), cell.concurrency))
    for (model, kind), group in groupby(cells, key=place):
        yield f"{model}, {KINDS[kind]}", [_row(results, cell) for cell in group]


def _row(results: Results, cell: Cell) -> list[str]:
    start = [str(cell.concurrency), cell.peer, cell.says]
    if not cell.measured:
        return [*start, cell.error or "not measured"]
    wins = {figure for figure, _ in results.wins(cell)}
    figures = [words(figure, cell) + WIN * (figure in wins) for figure in FIGURES]
    ratio = results.ratio(cell)
    return [*start, *figures, "" if ratio is None else f"{ratio:.3g}"]


def words(figure: Figure, cell: Cell) -> str:
    """Format one figure of a cell."""
    return format(cell.median(figure.name), figure.form)


def verdicts(results: Results) -> Iterator[str]:
    """Yield sentences about which server is better where: each cell that a peer wins, and the totals."""
    ratios = [ratio for cell in results.cells if cell.peer != OURS and (ratio := results.ratio(cell)) is not None]
    if ratios:
        even = ratios.count(1)
        yield (
            f"Penstock answers more requests/s than the peer in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} "
            f"comparisons, a peer in {sum(ratio > 1 for ratio in ratios)}{f', {even} even' if even else ''}."
        )
    for cell in results.cells:
        figure_list = ", ".join(
            f"{figure.title} {words(figure, cell)} ({times:.2f} times Penstock's)"
            for figure, times in results.wins(cell)
        )
        if figure_list:
            yield f"{cell.peer} is better: {cell.model}, {cell.says}, {cell.concurrency} at once: {figure_list}."


def notes(results: Results) -> Iterator[str]:
    """Yield remarks: peers not measured, disturbances, and what is missing."""
    for name, reason in results.failed.items():
        yield f"Not measured: {name}: {reason}."
    disturbed = results.disturbed()
    if disturbed:
        max_cores = max(cell.median("others") for cell in disturbed)
        yield f"Other processes used the machine in {len(disturbed)} cells, up to {max_cores:.2f} cores: repeat these."
    if results.interrupted:
        yield "Interrupted: not all rounds were run."


def terminal(results: Results) -> Iterator[str]:
    """Format the table as plain text."""
    for heading, rows in sections(results):
        full_rows = [list(_HEADS), *(row for row in rows if len(row) == len(_HEADS))]
        widths = [
            max(len(row[column]) for row in (full_rows if column >= _NAMES else [*full_rows, *rows]))
            for column in range(len(_HEADS))
        ]
        yield ""
        yield heading
        for row in [list(_HEADS), *rows]:
            names = [cell_text.ljust(width) for cell_text, width in zip(row[:_NAMES], widths, strict=False)]
            if len(row) == len(_HEADS):
                names += [
                    cell_text.rjust(width) for cell_text, width in zip(row[_NAMES:], widths[_NAMES:], strict=True)
                ]
            else:
                names += row[_NAMES:]
            yield "  " + "  ".join(names)
    yield ""
    yield _LEGEND
    yield from verdicts(results)
    yield from notes(results)


def markdown(results: Results) -> str:
    """Format the generated part of the page, with its two markers."""
    lines = [BEGIN, "", *_heading(results)]
    for heading, rows in sections(results):
        lines += ["", f"### {heading}", "", "| " + " | ".join(_HEADS) + " |", "|--:|:--|:--" + "|--:" * 6 + "|"]
        for row in rows:
            cells = [f"**{cell_text[:-1]}** {WIN}" if cell_text.endswith(WIN) else cell_text for cell_text in row]
            lines.append(
                "| "
                + " | ".join(_escaped(cell_text) for cell_text in [*cells, *[""] * (len(_HEADS) - len(row))])
                + " |"
            )
    lines += ["", _LEGEND.replace(WIN, f"`{WIN}`", 1), ""]
    lines += [f"- {_escaped(line)}" for line in (*verdicts(results), *notes(results))]
    return "\n".join([*lines, "", END, ""])


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _heading(results: Results) -> Iterator[str]:
    yield (
        f"Made {results.made_at} in {results.took_s / 60:.0f} minutes by `{results.command}`; medians of "
        f"{results.rounds} interleaved rounds of {results.seconds:g} s."
    )
    yield ""
    yield f"Machine: {', '.join(machine(results.machine))}. The generator and the servers share its cores."
    yield ""
    yield "| server | versions | configuration |"
    yield "|:--|:--|:--|"
    for peer, configuration in results.configurations.items():
        versions = ", ".join(f"{name} {version}" for name, version in results.versions.get(peer, {}).items())
        yield f"| {peer} | {versions or results.failed.get(peer, '')} | {configuration} |"


def machine(description: Mapping[str, Any]) -> Iterator[str]:
    """Describe the result of `environment.machine`."""
    yield str(description.get("cpu", "unknown CPU"))
    yield f"{description.get('usable_cores', description.get('cores', '?'))} cores"
    if "memory_bytes" in description:
        yield f"{description['memory_bytes'] / (1 << 30):.0f} GiB"
    yield from (str(description[name]) for name in ("kernel", "python") if name in description)


def place(page: str, generated: str) -> str:
    """Insert a generated part into a page, replacing the previous one, or at the end."""
    before, begin, rest = page.partition(BEGIN)
    if not begin:
        return f"{page.rstrip()}\n\n{generated}" if page.strip() else generated
    return before + generated.rstrip("\n") + rest.partition(END)[2]


def write_markdown(results: Results, path: Path) -> None:
    """Write the generated part into a page and keep the rest."""
    page = path.read_text("utf-8") if path.exists() else ""
    path.write_text(place(page, markdown(results)), "utf-8")
