"""Figures over time: each level's measurement windows, and the samples of GPUs and CPUs while they ran."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from .charts import LABELS, Figure, Trace, axis, escape_markup, level_name
from .document import Document, Level, Samples
from .findings import fault, load
from .formats import count

_COLORS = ("--accent", "--queue", "--good", "--inference", "--output", "--input")
_GIB = 2.0**30
PANEL = 150
"""Height of one panel, px."""

Panel = tuple[str, Callable[[str], bool], float]
PANELS: tuple[Panel, ...] = (
    ("utilization (%)", lambda name: name.endswith(".utilization"), 100.0),
    ("power (W)", lambda name: name.endswith(".power_w"), 1.0),
    ("GPU memory (GiB)", lambda name: name.startswith("gpu.") and name.endswith(".memory_bytes"), 1 / _GIB),
    ("server cores", lambda name: name == "server.cores", 1.0),
    ("server memory (GiB)", lambda name: name == "server.rss_bytes", 1 / _GIB),
    ("throughput (answers/s)", lambda name: name == "throughput", 1.0),
)
"""What is drawn together: the title of the axis, the series, and the factor that converts them to its unit."""


def sample_timelines(document: Document) -> Figure | None:
    """Draw the samples of the run, with the levels end to end."""
    levels = [level for level in document.levels if level.samples and level.samples.at_s]
    samples = [level.samples for level in levels if level.samples]
    names = sorted(
        {name for each in samples for name, values in each.series.items() if any(v is not None for v in values)}
    )
    panels = [panel for panel in PANELS if any(panel[1](name) for name in names)]
    if not panels:
        return None
    starts = [0.0]
    for each in samples:
        starts.append(starts[-1] + max(each.at_s))
    layout: dict[str, Any] = {"xaxis": axis("seconds of measurement"), "hovermode": "x"}
    traces: list[Trace] = []
    for index, (title, is_shown, scale) in enumerate(panels):
        _stack_axis(layout, index, len(panels), title)
        series = [name for name in names if is_shown(name)]
        for number, name in enumerate(series):
            traces.append(_series(name, samples, starts, scale, index))
            traces[-1]["line"]["color"] = f"var({_COLORS[number % len(_COLORS)]})"
            traces[-1]["showlegend"] = len(series) > 1
    layout["xaxis"]["anchor"] = _axis("y", len(panels) - 1)
    _level_bounds(layout, levels, starts)
    return Figure("trace", traces, layout, PANEL * len(panels) + 110)


def _axis(letter: str, index: int) -> str:
    return letter if not index else f"{letter}{index + 1}"


def _stack_axis(layout: dict[str, Any], index: int, count: int, title: str) -> None:
    gap = 0.16 / count
    height = (1 - gap * (count - 1)) / count
    top = 1 - index * (height + gap)
    bottom = max(top - height, 0.0)
    layout[_axis("y", index).replace("y", "yaxis")] = axis(title, domain=[bottom, top], rangemode="tozero", nticks=4)


def _series(name: str, samples: Sequence[Samples], starts: Sequence[float], scale: float, index: int) -> Trace:
    x: list[float | None] = []
    y: list[float | None] = []
    for each, start in zip(samples, starts, strict=False):
        values = each.series.get(name, [])
        x += [start + second for second, _ in zip(each.at_s, values, strict=False)]
        y += [None if value is None else value * scale for value in values[: len(each.at_s)]]
        x.append(x[-1] if x else start)
        y.append(None)  # the time between two levels is unknown
    label = _series_name(name)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": label,
        "x": x,
        "y": y,
        "yaxis": _axis("y", index),
        "line": {"width": 2},
        "hovertemplate": f"{label} %{{y:.3~g}}<extra></extra>",
    }


def _series_name(name: str) -> str:
    """Name a series: gpu.GPU-5d1c7f0a-....power_w is GPU 5d1c7f0a, power."""
    owner_kind, _, rest = name.partition(".")
    quantity = escape_markup(name.rpartition(".")[2].removesuffix("_w").removesuffix("_bytes").replace("_", " "))
    if owner_kind == "gpu":
        return f"GPU {escape_markup(rest.removeprefix('GPU-').split('.')[0][:8])}, {quantity}"
    owner = {"cpu": "CPU", "client": "client"}.get(owner_kind, escape_markup(owner_kind))
    return owner if owner == quantity else f"{owner}, {'memory' if quantity == 'rss' else quantity}"


def _level_bounds(layout: dict[str, Any], levels: Sequence[Level], edges: Sequence[float]) -> None:
    """Shade every other level, and name each above it."""
    layout["shapes"], layout["annotations"] = [], []
    for index, (level, (start, end)) in enumerate(zip(levels, pairwise(edges), strict=True)):
        if index % 2:
            layout["shapes"].append({
                "type": "rect", "x0": start, "x1": end, "y0": 0, "y1": 1, "yref": "paper", "layer": "below",
                "fillcolor": "var(--band)", "line": {"width": 0},
            })  # fmt: skip
        if len(levels) <= LABELS:
            scale_color = "var(--bad)" if fault(level) else "var(--soft)"
            layout["annotations"].append({
                "text": level_name(level), "x": (start + end) / 2, "y": 1, "yref": "paper", "yanchor": "bottom",
                "showarrow": False, "font": {"size": 11, "color": scale_color},
            })  # fmt: skip


def windows(document: Document) -> Figure | None:
    """Draw each window's throughput and median, filled if it is part of its level's figures."""
    levels = [level for level in document.levels if level.windows]
    if sum(len(level.windows) for level in levels) < 2:
        return None
    edges = [0.5]
    traces: list[Trace] = []
    for level in levels:
        traces += _window_strip(level, edges[-1] + 0.5)
        edges.append(edges[-1] + len(level.windows))
    layout: dict[str, Any] = {
        "xaxis": axis(
            "windows, level by level", anchor="y2", showgrid=False, showticklabels=False, range=[0.5, edges[-1]]
        ),
        "showlegend": False,
    }
    _stack_axis(layout, 0, 2, "inferences/s")
    _stack_axis(layout, 1, 2, "p50 (ms)")
    _level_bounds(layout, levels, edges)
    return Figure("windows", traces, layout, 400)


def _window_strip(level: Level, first_index: float) -> list[Trace]:
    positions = [first_index + index for index in range(len(level.windows))]
    is_settled = [index >= len(level.windows) - level.settled for index in range(len(level.windows))]
    marker = {
        "size": 8,
        "symbol": ["circle" if each else "circle-open" for each in is_settled],
        "color": "var(--accent)",
        "line": {"width": 1.5, "color": "var(--accent)"},
    }
    hover_texts = [
        f"load {load(level.offered)}, window {index + 1}: {count(each.requests)} requests in {each.seconds:.3g} s"
        + ("" if settled_flag else ", not counted")
        for index, (each, settled_flag) in enumerate(zip(level.windows, is_settled, strict=True))
    ]
    values: tuple[list[float | None], ...] = (
        [each.rows_per_s for each in level.windows],
        [each.latency_us["p50"] / 1e3 if "p50" in each.latency_us else None for each in level.windows],
    )
    return [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": positions,
            "y": each,
            "yaxis": _axis("y", index),
            "cliponaxis": False,
            "line": {"color": "var(--accent)", "width": 1},
            "marker": marker,
            "hovertext": hover_texts,
            "hovertemplate": "%{hovertext}<br>%{y:,.4~g}<extra></extra>",
        }
        for index, each in enumerate(values)
    ]
