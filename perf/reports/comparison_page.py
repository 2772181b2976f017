"""The page that compares several runs: first their differences, then their curves, then their ratios."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from . import comparison, findings
from .charts import Figure, Trace, axis, escape_markup, percentile_line
from .comparison import Pair, Run
from .findings import load, load_words
from .formats import NOTHING, count, ms, ratio
from .markup import Markup, chart_section, element, embed_figures, file, row, section, table
from .page import KNEE, footer, header, navigation, warning_box

_MAX_RUNS = 6
"""The number of runs with a color of their own; after that, colors repeat, dashed."""
_MORE_IS_BETTER = {
    "throughput": True,
    "p50": False,
    "p90": False,
    "p99": False,
    "p99.9": False,
    "cpu": False,
    "energy": False,
}
_NEGLIGIBLE = 0.03
"""Ratios closer to 1 than this are shown as no difference."""


def write(compared: Sequence[Run], path: Path, target_ms: float | None = None) -> None:
    """Write the page. Raises: OSError, MissingExtraError, HistogramError."""
    path.write_bytes(page(compared, target_ms).encode("utf-8", "replace"))


def page(compared: Sequence[Run], target_ms: float | None = None) -> str:
    """Make the page of two or more runs; the others are compared with the first."""
    target = target_ms or findings.target_ms(compared[0].document)
    names = list(dict.fromkeys(run.document.model.name for run in compared))
    figures_shown = [each for each in (overlaid_curves(compared), _ratios(compared)) if each]
    charts = {each.name: each for each in figures_shown}
    title = " and ".join(names)
    items = [element("li", _swatch(index), element("b", run.name)) for index, run in enumerate(compared)]
    sections = (
        ("differences", "What differs"),
        ("headlines", "Figures"),
        ("curve", "Curves"),
        ("levels", "Levels"),
        ("again", "Again"),
    )
    curves = f"p99 is a full line, p50 a thin one. {KNEE} It is ringed."
    body = [
        header(title, f"{len(compared)} runs side by side", items),
        navigation(sections),
        Markup("<main>"),
        warning_box(comparison.warnings(compared)),
        _differences(compared),
        _headlines(compared, target),
        chart_section("Latency and throughput", charts["curve"], curves, anchor="curve")
        if "curve" in charts
        else Markup(),
        _levels(compared),
        chart_section("Ratios by load", charts["ratios"], _base(compared)) if "ratios" in charts else Markup(),
        _commands(compared),
        Markup("</main>"),
        footer(max(run.document.made_at for run in compared)),
    ]
    return file(f"{title}: penstock perf, {len(compared)} runs", body, [embed_figures(figures_shown)])


def _base(compared: Sequence[Run]) -> str:
    return f"Of each run to the same load in {compared[0].name}: throughput above 1 is more, latency above 1 is slower."


def _swatch(index: int) -> Markup:
    return element("span", class_="swatch", style=f"background:var(--run-{index % _MAX_RUNS + 1})")


def overlaid_curves(compared: Sequence[Run]) -> Figure | None:
    """Draw the curves of all runs over each other."""
    traces: list[Trace] = []
    for index, run in enumerate(compared):
        levels, name = findings.sound(run.document.levels), escape_markup(run.name)
        if not levels:
            continue
        scale_color = f"var(--run-{index % _MAX_RUNS + 1})"
        tail = percentile_line(levels, "p99", scale_color, f"{name}, p99") | {"legendgroup": str(index)}
        tail |= {"mode": "lines+markers+text", "text": [load(level.offered) for level in levels]}
        tail |= {"textposition": "top center", "textfont": {"size": 10}}
        median = percentile_line(levels, "p50", scale_color, f"{name}, p50") | {"legendgroup": str(index)}
        for trace in (tail, median):
            trace["line"]["dash"] = "dash" if index >= _MAX_RUNS else "solid"
        median["line"]["width"] = 1.2
        median["marker"] = {"size": 4}
        if knee := findings.knee(run.document.levels):
            sizes = [15 if level is knee else 7 for level in levels]
            tail["marker"] = {
                "size": sizes,
                "symbol": ["circle-open-dot" if level is knee else "circle" for level in levels],
            }
        traces += [tail, median]
    if not traces:
        return None
    layout = {"xaxis": axis("throughput (inferences/s)", rangemode="tozero"), "yaxis": axis("latency (ms)", type="log")}
    scales = {"log": {"yaxis.type": "log"}, "linear": {"yaxis.type": "linear", "yaxis.rangemode": "tozero"}}
    return Figure("curve", traces, layout, 480, scales)


def _ratios(compared: Sequence[Run]) -> Figure | None:
    """Draw the ratios of throughput and p99 by load."""
    sound_pairs = [pair for pair in comparison.pairs(compared) if not pair.doubt]
    if not sound_pairs:
        return None
    traces: list[Trace] = []
    for index, run in enumerate(compared[1:], 1):
        own_pairs = [pair for pair in sound_pairs if pair.run is run]
        for figure, dash in (("throughput", "solid"), ("p99", "dot")):
            name = f"{escape_markup(run.name)}, {figure}"
            traces.append({
                "type": "scatter", "mode": "lines+markers", "name": name,
                "x": [load(pair.level.offered) for pair in own_pairs], "y": [pair.ratio(figure) for pair in own_pairs],
                "line": {"color": f"var(--run-{index % _MAX_RUNS + 1})", "dash": dash, "width": 2},
                "hovertemplate": f"%{{x}}: %{{y:.3f}}<extra>{name}</extra>",
            })  # fmt: skip
    line_at_one = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "layer": "below"}
    layout = {
        "xaxis": axis("load", type="category"),
        "yaxis": axis("ratio", rangemode="tozero"),
        "shapes": [line_at_one | {"line": {"color": "var(--soft)", "width": 1.5}}],
    }
    return Figure("ratios", traces, layout, 340)


def _differences(compared: Sequence[Run]) -> Markup:
    differences_found = comparison.differences(compared)
    if not differences_found:
        note = "Nothing: model, configuration, server, machine, versions and options are the same in all runs."
        return section("What differs", note=note, anchor="differences")
    head = ["", *(element("th", _swatch(index), run.name, class_="words") for index, run in enumerate(compared))]
    rows = [
        row(
            ", ".join(filter(None, (each.part, each.name))),
            [element("td", value, class_="words") for value in each.values],
        )
        for each in differences_found
    ]
    note = "All else that the documents say of model, configuration, server, machine, versions and options is the same."
    return section("What differs", table(head, rows), note=note, anchor="differences", long=True)


def _headlines(compared: Sequence[Run], target: float | None) -> Markup:
    head = ["run", "greatest throughput", "at", "its p99", "knee", "at", "its p99"]
    if target:
        head += [f"goodput in {target:g} ms", "at"]
    rows = []
    for index, run in enumerate(compared):
        levels = run.document.levels
        cells: list[str] = []
        for level in (findings.best(levels), findings.knee(levels)):
            latency = level.client.latency_us.get("p99") if level else None
            cells += (
                [f"{count(level.client.rows_per_s)}/s", load_words(level.offered), ms(latency)]
                if level
                else [NOTHING] * 3
            )
        goodput = findings.goodput_of(levels, target) if target else None
        if target:
            cells += [f"{count(goodput.most)}/s", load_words(goodput.at.offered)] if goodput else [NOTHING] * 2
        rows.append(row(element("span", _swatch(index), run.name), cells))
    return section("Figures", table(head, rows), anchor="headlines")


def _levels(compared: Sequence[Run]) -> Markup:
    level_pairs = comparison.pairs(compared)
    if not level_pairs:
        return Markup()
    figures_shown = [
        figure for figure in _MORE_IS_BETTER if any(pair.ratio(figure) is not None for pair in level_pairs)
    ]
    names = {"throughput": "inferences/s", "cpu": "server CPU", "energy": "energy"}
    head = [
        "load",
        "run",
        "inferences/s",
        "p99",
        *(element("span", names.get(figure, figure), element("small", "ratio")) for figure in figures_shown),
    ]
    head.append(element("th", "remarks", class_="words"))
    rows = [_pair_row(pair, figures_shown, compared) for pair in level_pairs]
    base = compared[0].name
    note = f"Ratios to the same load in {base}. Green is better by more than {_NEGLIGIBLE * 100:g}%, red worse."
    return section("Level by level", table(head, rows), note=note, anchor="levels", long=True)


def _pair_row(pair: Pair, figures_shown: Sequence[str], compared: Sequence[Run]) -> Markup:
    run = element("td", _swatch([each is pair.run for each in compared].index(True)), pair.run.name)
    client = pair.level.client
    absolute = [f"{count(client.rows_per_s)}", ms(client.latency_us.get("p99"))]
    cells = [
        _ratio_cell(pair.ratio(figure), _MORE_IS_BETTER[figure] if not pair.doubt else None) for figure in figures_shown
    ]
    remark = element("td", f"not comparable: {pair.doubt}" if pair.doubt else "", class_="words")
    return row(load(pair.level.offered), [run, *absolute, *cells, remark], "outside" if pair.doubt else "")


def _ratio_cell(value: float | None, more_is_better: bool | None) -> Markup:
    if value is None or more_is_better is None or abs(value - 1) < _NEGLIGIBLE:
        return element("td", ratio(value))
    return element("td", ratio(value), class_="up" if (value > 1) is more_is_better else "down")


def _commands(compared: Sequence[Run]) -> Markup:
    parts = []
    for index, run in enumerate(compared):
        name = f"command-{index}"
        command_block = element("pre", element("code", shlex.join(run.document.command), id=name))
        button = element("button", "Copy", type="button", data_copy=name)
        parts.append(element("h3", _swatch(index), run.name) + element("div", command_block, button, class_="command"))
    return section("Make them again", *map(Markup, parts), anchor="again")
