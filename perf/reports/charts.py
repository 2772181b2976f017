"""Figures of one run, for plotly: plain dictionaries of traces and layout. page.js gives them their colors.

A color `var(--name)` is a property of page.css, so one figure works for light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .document import Document, Level
from .findings import fault, goodput, knee, load, load_words, sound
from .formats import count
from .histograms import Distribution, distribution

Trace = dict[str, Any]
PERCENTILES = ("p50", "p90", "p95", "p99", "p99.9")
LABELS = 24
"""The most levels that are labeled on the curve."""
WIDE = 40
"""If the highest p99 is at least this many times the lowest p50, the curve starts with a logarithmic axis."""
_CATEGORY: dict[str, Any] = {"type": "category"}


@dataclass(slots=True)
class Figure:
    """A chart: `height` in px; `name` is its place in the page."""

    name: str
    traces: list[Trace]
    layout: dict[str, Any]
    height: int = 380
    switches: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The choices offered above it, each with its change to the layout; the first is active at the start."""


def scale_color(index: int, count: int) -> str:
    """Return one color of a scale that is legible in light and dark."""
    return f"hsl({200 + 150 * index / max(count - 1, 1):.0f},65%,55%)"


def level_name(level: Level) -> str:
    """Name a level on an axis; a cross marks those that are not part of the curve."""
    return load(level.offered) + (" ✕" if fault(level) else "")


def _ms(us: float | None) -> float | None:
    return us / 1e3 if us is not None and math.isfinite(us) else None


def axis(title: str, **extra_fields: Any) -> dict[str, Any]:
    """Make an axis with its title."""
    return {"title": {"text": title}, **extra_fields}


def latency_curve(document: Document, target_ms: float | None) -> Figure | None:
    """Draw latency against throughput: sound levels are joined, others are crosses."""
    levels = sound(document.levels)
    excluded = [level for level in document.levels if fault(level) and level.client.requests]
    if not levels and not excluded:
        return None
    traces = [percentile_line(levels, name, f"var(--{name})", name) for name in ("p50", "p90", "p95", "p99")]
    traces[2]["visible"] = "legendonly"
    if len(levels) <= LABELS:
        traces[3] |= {"mode": "lines+markers+text", "text": [load(level.offered) for level in levels]}
        traces[3]["textposition"] = "top center"
    if excluded:
        traces.append(_crosses(excluded))
    layout = {
        "xaxis": axis("throughput (inferences/s)", rangemode="tozero"),
        "yaxis": axis("latency (ms)", rangemode="tozero"),
        "hovermode": "closest",
        "shapes": [],
    }
    if knee_level := knee(document.levels):
        _mark(layout, "x", knee_level.client.rows_per_s, "knee")
    if target_ms and target_ms * 1e3 < 1.5 * max(level.client.latency_us.get("p99", 0.0) for level in document.levels):
        _mark(layout, "y", target_ms, f"target {target_ms:g} ms")
    return Figure("curve", traces, layout, 470, _scales(layout, [*levels, *excluded]))


def _scales(layout: dict[str, Any], levels: Sequence[Level]) -> dict[str, dict[str, Any]]:
    """Choose the initial scale: on one with room for all levels, the lowest may be a line on the axis."""
    linear = {"yaxis.type": "linear", "yaxis.rangemode": "tozero"}
    logarithmic = {"yaxis.type": "log", "yaxis.rangemode": "normal"}
    min_ms = min(level.client.latency_us.get("p50", math.inf) for level in levels)
    max_ms = max(level.client.latency_us.get("p99", 0.0) for level in levels)
    if max_ms < WIDE * min_ms:
        return {"linear": linear, "log": logarithmic}
    layout["yaxis"] |= {"type": "log", "rangemode": "normal"}
    return {"log": logarithmic, "linear": linear}


def percentile_line(levels: Sequence[Level], percentile: str, scale_color: str, name: str) -> Trace:
    """Draw one percentile of a run's curve."""
    return {
        "type": "scatter",
        "name": name,
        "mode": "lines+markers",
        "x": [level.client.rows_per_s for level in levels],
        "y": [_ms(level.client.latency_us.get(percentile)) for level in levels],
        "hovertext": [load_words(level.offered) for level in levels],
        "hovertemplate": f"%{{hovertext}}<br>%{{x:,.0f}}/s, {percentile} %{{y:.3~g}} ms<extra>{name}</extra>",
        "line": {"color": scale_color, "width": 2.5 if percentile == "p99" else 2},
        "marker": {"size": 7},
    }


def _crosses(levels: Sequence[Level]) -> Trace:
    return {
        "type": "scatter",
        "name": "not part of the curve (p99)",
        "mode": "markers+text",
        "x": [level.client.rows_per_s for level in levels],
        "y": [_ms(level.client.latency_us.get("p99")) for level in levels],
        "text": [load(level.offered) for level in levels],
        "textposition": "top center",
        "textfont": {"color": "var(--bad)"},
        # text from a server may be anything: plotly would read it as markup
        "hovertext": [f"{load_words(level.offered)}: {escape_markup(fault(level))}" for level in levels],
        "hovertemplate": "%{hovertext}<br>%{x:,.0f}/s, p99 %{y:.3~g} ms<extra></extra>",
        "marker": {"symbol": "x-thin", "size": 10, "line": {"width": 2.5, "color": "var(--bad)"}},
    }


def escape_markup(text: str) -> str:
    """Escape what plotly would read as markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _mark(layout: dict[str, Any], axis: str, value: float, label: str) -> None:
    other_axis = "y" if axis == "x" else "x"
    layout["shapes"].append({
        "type": "line", "line": {"color": "var(--accent)", "width": 1.5, "dash": "dot"}, "layer": "below",
        f"{axis}0": value, f"{axis}1": value, f"{other_axis}0": 0, f"{other_axis}1": 1, f"{other_axis}ref": "paper",
        "label": {"text": label, "textposition": "end", "textangle": 0, "padding": 7,
                  "font": {"color": "var(--accent)"},
                  "xanchor": "left" if axis == "x" else "right", "yanchor": "top" if axis == "x" else "bottom"},
    })  # fmt: skip


def by_load(document: Document) -> Figure | None:
    """Draw each percentile from level to level."""
    levels = [level for level in document.levels if level.client.requests]
    if not levels:
        return None
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [level_name(level) for level in levels],
            "y": [_ms(level.client.latency_us.get(name)) for level in levels],
            "hovertemplate": f"%{{x}}: {name} %{{y:.3~g}} ms<extra></extra>",
            "line": {"color": f"var(--{name.replace('.', '-')})", "dash": "dot" if name == "max" else "solid"},
        }
        for name in (*PERCENTILES, "max")
    ]
    layout = {"xaxis": axis("load", **_CATEGORY), "yaxis": axis("latency (ms)", type="log")}
    return Figure("by-load", traces, layout, 420, {"log": {"yaxis.type": "log"}, "linear": {"yaxis.type": "linear"}})


def latency_tails(document: Document) -> Figure | None:
    """Draw latency by percentile, with the axis stretched towards 100 as HdrHistogram plots it: a line per level."""
    distributions = [
        (level, distribution(level.client.histogram)) for level in document.levels if level.client.histogram
    ]
    if not distributions:
        return None
    traces = []
    for index, (level, spread) in enumerate(distributions):
        nines = _tail_points(spread)
        traces.append({
            "type": "scatter",
            "mode": "lines",
            "name": level_name(level),
            "x": nines,
            "y": [spread.percentile_us(100 - 100 / each) / 1e3 for each in nines],
            "text": [f"{100 - 100 / each:.6g}%" for each in nines],
            "hovertemplate": f"{level_name(level)}: %{{text}} within %{{y:.3~g}} ms<extra></extra>",
            "line": {
                "color": scale_color(index, len(distributions)),
                "width": 2,
                "dash": "dot" if fault(level) else "solid",
            },
        })  # fmt: skip
    max_nines = max(math.ceil(math.log10(max(spread.total, 10))) for _, spread in distributions)
    ticks = [1, 2, *(10**power for power in range(1, max_nines + 1))]
    layout = {
        "xaxis": axis(
            "percentile", type="log", tickvals=ticks, ticktext=[f"{100 - 100 / tick:.{max_nines}g}%" for tick in ticks]
        ),
        "yaxis": axis("latency (ms)", type="log"),
        "legend": {"title": {"text": "load"}},
    }
    return Figure("tails", traces, layout, 420, {"log": {"yaxis.type": "log"}, "linear": {"yaxis.type": "linear"}})


def _tail_points(spread: Distribution) -> list[float]:
    """Return 1 / (1 - percentile) for the points of a line, as far as the number of requests supports it."""
    steps = int(12 * math.log10(max(spread.total, 2)))
    return [10 ** (step / 12) for step in range(steps + 1)]


def time_split(document: Document) -> Figure | None:
    """Draw where the mean request spends its time, stacked, level by level."""
    levels = [level for level in document.levels if level.server and level.client.requests]
    if not levels:
        return None
    names = ("network and client", "queue", "input", "inference", "output", "overhead")
    parts: dict[str, list[float | None]] = {name: [] for name in names}
    for level in levels:
        if side := level.server:
            compute_us = (
                side.queue_us,
                side.compute_input_us,
                side.compute_infer_us,
                side.compute_output_us,
                side.overhead_us,
            )
            network_us = max(level.client.latency_us.get("mean", 0.0) - sum(compute_us), 0.0)
            for name, us in zip(parts, (network_us, *compute_us), strict=True):
                parts[name].append(_ms(us))
    loads = [level_name(level) for level in levels]
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": name,
            "x": loads,
            "y": values,
            "marker": {"color": f"var(--{name.split()[0]})"},
            "hovertemplate": f"%{{x}}: {name} %{{y:.3~g}}<extra></extra>",
        }
        for name, values in parts.items()
    ]
    layout = {
        "barmode": "stack",
        "barnorm": "",
        "bargap": 0.35,
        "xaxis": axis("load", **_CATEGORY),
        "yaxis": axis("mean time (ms)"),
    }
    relative = {"barnorm": "percent", "yaxis.title.text": "share of the mean latency (%)"}
    absolute = {"barnorm": "", "yaxis.title.text": "mean time (ms)"}
    return Figure("split", traces, layout, 380, {"ms": absolute, "share": relative})


def batches(document: Document) -> Figure | None:
    """Draw the sizes of the batches run: the share of a level's executions by rows."""
    levels = [level for level in document.levels if level.server and level.server.batches]
    counts_by_level = [
        {int(rows): executions for rows, executions in level.server.batches.items()} for level in levels if level.server
    ]
    sizes = sorted({rows for each in counts_by_level for rows, executions in each.items() if executions})
    if not sizes:
        return None
    totals = [max(sum(each.values()), 1) for each in counts_by_level]
    fractions = [
        [
            each[size] / total * 100 if size in each else None
            for each, total in zip(counts_by_level, totals, strict=True)
        ]
        for size in sizes
    ]
    heat: Trace = {
        "type": "heatmap",
        "x": [level_name(level) for level in levels],
        "y": [str(size) for size in sizes],
        "z": fractions,
        "zmin": 0,
        "zmax": 100,
        "xgap": 2,
        "ygap": 2,
        "colorscale": [[0, "var(--cold)"], [1, "var(--hot)"]],
        "colorbar": {"ticksuffix": "%", "thickness": 10, "outlinewidth": 0},
        "customdata": [[count(each.get(size, 0)) for each in counts_by_level] for size in sizes],
        "hovertemplate": "load %{x}: %{z:.1f}% of executions had %{y} rows (%{customdata})<extra></extra>",
        "hoverongaps": False,
    }
    if len(levels) <= 16:
        heat |= {"text": [["" if each is None else f"{each:.3g}%" for each in line] for line in fractions]}
        heat["texttemplate"] = "%{text}"
    layout = {"xaxis": axis("load", **_CATEGORY), "yaxis": axis("rows in a batch", **_CATEGORY, showgrid=False)}
    layout["xaxis"]["showgrid"] = False
    return Figure("batches", [heat], layout, min(max(380, 120 + 24 * len(sizes)), 620))


def goodput_by_level(document: Document, target_ms: float) -> Figure | None:
    """Draw throughput within a target and beyond it, level by level. page.js redraws it for another target."""
    levels = sound(document.levels)
    if not levels:
        return None
    goodputs = [goodput(level, target_ms) for level in levels]
    names = [load(level.offered) for level in levels]
    late_per_s = [level.client.rows_per_s - each for level, each in zip(levels, goodputs, strict=True)]
    hover = "%{x}: %{y:,.0f}/s "
    traces: list[Trace] = [
        {"type": "bar", "name": "within the target", "x": names, "y": goodputs, "marker": {"color": "var(--good)"},
         "hovertemplate": hover + "within the target<extra></extra>"},
        {"type": "bar", "name": "later", "x": names, "y": late_per_s, "marker": {"color": "var(--late)"},
         "hovertemplate": hover + "later<extra></extra>"},
    ]  # fmt: skip
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": axis("load", **_CATEGORY),
        "yaxis": axis("inferences/s", rangemode="tozero"),
    }
    return Figure("within", traces, layout, 340)


def goodput_by_target(document: Document, target_ms: float) -> Figure | None:
    """Draw the highest goodput of the run for every target."""
    spreads = [
        (level, distribution(level.client.histogram)) for level in sound(document.levels) if level.client.histogram
    ]
    if not spreads:
        return None
    min_ms = min(float(spread.lowest_ns[0]) for _, spread in spreads) / 1e6
    max_ms = max(float(spread.highest_ns[-1]) for _, spread in spreads) / 1e6
    targets = [min_ms * (max_ms / min_ms) ** (step / 160) for step in range(161)]
    goods = [
        max(level.client.rows_per_s * spread.share_within(each * 1e3) for level, spread in spreads) for each in targets
    ]
    line: Trace = {
        "type": "scatter",
        "mode": "lines",
        "x": targets,
        "y": goods,
        "fill": "tozeroy",
        "fillcolor": "var(--wash)",
        "line": {"color": "var(--good)", "width": 2.5},
        "hovertemplate": "target %{x:.3~g} ms: %{y:,.0f}/s<extra></extra>",
    }
    layout: dict[str, Any] = {
        "xaxis": axis("target (ms)", type="log"),
        "yaxis": axis("most inferences/s within it", rangemode="tozero"),
        "showlegend": False,
        "shapes": [],
    }
    _mark(layout, "x", target_ms, "")
    return Figure("yields", [line], layout, 340)
