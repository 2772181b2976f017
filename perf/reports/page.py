"""The page: one self-contained HTML file that shows a run and includes its document."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import charts, findings, timelines
from . import document as documents
from .charts import Figure
from .document import Document, Level
from .findings import Goodput, load_words
from .formats import bare_ms, count, digits, ms, share
from .histograms import distribution
from .markup import (
    Markup,
    chart,
    chart_section,
    definition_list,
    element,
    embed_figures,
    embed_json,
    file,
    flatten,
    section,
)
from .tables import composing, levels

KNEE = (
    "The knee is the level where throughput divided by mean latency is greatest (Kleinrock's power): up to it more "
    "load buys throughput, beyond it mostly waiting."
)


def write(document: Document, path: Path, target_ms: float | None = None) -> None:
    """Write the page of a run. Raises: OSError, MissingExtraError, HistogramError."""
    path.write_bytes(page(document, target_ms).encode("utf-8", "replace"))


def page(document: Document, target_ms: float | None = None) -> str:
    """Make the page of a run. `target_ms` overrides the run's. Raises: MissingExtraError, HistogramError."""
    target = findings.target_ms(document, target_ms)
    has_target = target_ms or document.target_ms
    goodput = findings.goodput_of(document.levels, target) if target else None
    figures_shown = _figures(document, target)
    missing = [text for name, text in _MISSING.items() if name not in figures_shown]
    sections = [
        warning_box(findings.cautions(document)),
        _cards(document, goodput, bool(has_target)),
        _curve(document, figures_shown),
        _goodput(figures_shown, goodput, bool(has_target)),
        element("div", *_captioned_sections(figures_shown, ("by-load", "tails", "split", "batches")), class_="pair"),
        *_captioned_sections(figures_shown, ("windows", "trace")),
        element("div", *(element("p", text) for text in missing), class_="missing") if missing else Markup(),
        levels(document),
        composing(document),
        _command_section(document),
        _setup_section(document),
    ]
    section_places = [
        section_place for section_place in _SECTIONS if any(f'id="{section_place[0]}"' in each for each in sections)
    ]
    top = [_header(document), navigation(section_places, save=True), Markup("<main>")]
    body = [*top, *sections, Markup("</main>"), footer(document.made_at)]
    carrying = [
        embed_figures(list(figures_shown.values())),
        embed_json("spreads", _spreads(document)),
        embed_json("document", documents.text(document)),
    ]
    return file(f"{document.model.name}: penstock perf", body, carrying)


_SECTIONS = (
    ("curve", "Curve"), ("goodput", "Goodput"), ("latency", "Latency"), ("time", "Over time"), ("levels", "Levels"),
    ("again", "Again"), ("setting", "Setting"),
)  # fmt: skip
_CAPTIONS = {
    "by-load": ("Percentiles by load", "Of the answers of each level.", "latency"),
    "tails": (
        "The tail of each level",
        "The axis is stretched towards 100%, as HdrHistogram draws it: each nine has the same room.",
        "",
    ),
    "split": (
        "Where the time goes",
        """Means of a request: what the server says of itself, and beside it network and client, the rest of the latency
        that the generator saw.""",
        "",
    ),
    "batches": ("Batches", "The share of executions that had so many rows.", ""),
    "windows": (
        "Windows",
        """Each measurement window in its order. Filled ones make up their level's figures, hollow ones came before
        the load had settled.""",
        "time",
    ),
    "trace": ("GPU and CPU", "Sampled while each level was measured; the levels are laid end to end.", ""),
}
"""Each figure's title, its explanation, and its anchor."""
_MISSING = {
    "curve": "No level has an answer: there is no curve to draw.",
    "split": "The server gave no statistics: where its time went is not known.",
    "batches": "The server did not say which batches it ran.",
    "trace": "Nothing was sampled of GPUs and CPUs.",
}
"""Shown instead of a figure if there is nothing to draw."""


def _figures(document: Document, target: float | None) -> dict[str, Figure]:
    figures = [
        charts.latency_curve(document, target),
        charts.goodput_by_level(document, target) if target else None,
        charts.goodput_by_target(document, target) if target else None,
        charts.by_load(document),
        charts.latency_tails(document),
        charts.time_split(document),
        charts.batches(document),
        timelines.sample_timelines(document),
        timelines.windows(document),
    ]
    return {each.name: each for each in figures if each}


def _spreads(document: Document) -> list[dict[str, Any]]:
    """Return the histograms of the sound levels for page.js: each bucket's lowest ns as a step from the previous."""
    spreads = []
    for level in findings.sound(document.levels):
        spread = distribution(level.client.histogram)
        if spread.total:
            steps = [int(spread.lowest_ns[0]), *(spread.lowest_ns[1:] - spread.lowest_ns[:-1]).tolist()]
            spreads.append({
                "words": load_words(level.offered), "rate": level.client.rows_per_s, "steps": steps,
                "counts": spread.counts.tolist(),
            })  # fmt: skip
    return spreads


def _header(document: Document) -> Markup:
    model = document.model
    facts = {
        "server": document.server.get("name", ""),
        "at": document.url,
        "over": {"http": "HTTP", "grpc": "gRPC"}.get(document.protocol, document.protocol),
        "platform": model.platform,
        "version": model.version,
        "client batch": str(document.batch),
        "configuration": model.fingerprint[:12],
    }
    items = [element("li", name, " ", element("b", value)) for name, value in facts.items() if value]
    return header(model.name, f"A run of {when(document.made_at)}", items)


def header(title: str, kicker: str, items: list[Markup]) -> Markup:
    """Make the top of a page."""
    kicker_line = element("p", element("b", "penstock perf"), element("span", kicker), class_="kicker")
    return element("header", element("div", kicker_line, element("h1", title), element("ul", *items, class_="facts")))


def when(made_at: str) -> str:
    """Format an ISO time for display."""
    return made_at.replace("T", " ").replace("+00:00", " UTC")


def navigation(places: Sequence[tuple[str, str]], *, save: bool = False) -> Markup:
    """Make the navigation from anchors and their labels."""
    links = [element("a", label, href=f"#{anchor}") for anchor, label in places]
    buttons = [element("button", "Light / dark", type="button", id="theme")]
    if save:
        embed_json = {"data_save": "document", "data_name": "penstock-perf.json"}
        buttons.insert(0, element("button", "Save JSON", type="button", **embed_json))
    return element("nav", element("div", *links, element("span", *buttons, class_="right")))


def footer(made_at: str) -> Markup:
    """Make the end of a page."""
    return element(
        "footer", f"Made by penstock perf, {when(made_at)}. This file is whole in itself and fetches nothing."
    )


def warning_box(warnings: list[str]) -> Markup:
    """Make the box of warnings, if there are any."""
    if not warnings:
        return Markup()
    lines = [element("li", each) for each in warnings]
    return element("section", element("h2", "Before you believe the figures"), element("ul", *lines), class_="cautions")


def headline_card(name: str, figure: str, unit: str, *details: Any, is_first: bool = False) -> Markup:
    """Make a headline figure."""
    number = element("div", figure, element("small", unit) if unit else "", class_="figure")
    lines = [element("div", each, class_="beside") for each in details if each]
    return element(
        "div", element("div", name, class_="name"), number, *lines, class_="card first" if is_first else "card"
    )


def _cards(document: Document, goodput: Goodput | None, has_target: bool) -> Markup:
    best, knee = findings.best(document.levels), findings.knee(document.levels)
    cards = []
    if best:
        latency = best.client.latency_us
        details = (
            f"inferences at {load_words(best.offered)}",
            f"p50 {ms(latency.get('p50'))}, p99 {ms(latency.get('p99'))}",
        )
        cards.append(headline_card("Greatest throughput", count(best.client.rows_per_s), "/s", *details, is_first=True))
    if knee:
        share_text = f"{share(knee.client.rows_per_s / best.client.rows_per_s)} of the greatest" if best else ""
        details = (
            f"inferences at {load_words(knee.offered)}, {share_text}",
            f"p99 {ms(knee.client.latency_us.get('p99'))}",
        )
        cards.append(headline_card("Knee", count(knee.client.rows_per_s), "/s", *details))
    if goodput:
        source = "" if has_target else "no target was given: this is the knee's p99"
        details = f"inferences at {load_words(goodput.at.offered)}", source
        cards.append(headline_card(f"Goodput in {goodput.target_ms:g} ms", count(goodput.most), "/s", *details))
    latency_curve = [level for level in findings.sound(document.levels) if "p50" in level.client.latency_us]
    if lowest_latency_level := min(latency_curve, key=lambda level: level.client.latency_us["p50"], default=None):
        details = (
            f"p50 at {load_words(lowest_latency_level.offered)}",
            f"p99 {ms(lowest_latency_level.client.latency_us.get('p99'))}",
        )
        cards.append(
            headline_card("Least latency", bare_ms(lowest_latency_level.client.latency_us["p50"]), "ms", *details)
        )
    cards += _costs(best) if best else []
    return element("div", *cards, class_="cards") if cards else Markup()


def _costs(best: Level) -> list[Markup]:
    cards = []
    if best.server_cpu_s_per_1000 is not None:
        generator_text = f"generator {digits(best.client.cpu_us_per_request / 1e3)} s"
        details = f"of server CPU per 1,000 requests ({generator_text})", f"at {load_words(best.offered)}"
        cards.append(headline_card("CPU", digits(best.server_cpu_s_per_1000), "s", *details))
    if best.energy_j_per_1000 is not None:
        details = "of the GPUs per 1,000 inferences", f"at {load_words(best.offered)}"
        cards.append(headline_card("Energy", digits(best.energy_j_per_1000), "J", *details))
    return cards


def _curve(document: Document, figures_shown: dict[str, Figure]) -> Markup:
    if "curve" not in figures_shown:
        return Markup()
    latency_curve, knee = findings.sound(document.levels), findings.knee(document.levels)
    notes = ["Each point is a level, named by its load."]
    if knee:
        notes.append(KNEE)
        if knee is latency_curve[0] or knee is latency_curve[-1]:
            end, direction = ("lowest", "below") if knee is latency_curve[0] else ("highest", "above")
            notes.append(f"Here it is the {end} load of the run: the true one may lie {direction}.")
    return chart_section("Latency and throughput", figures_shown["curve"], " ".join(notes), anchor="curve")


def _goodput(figures_shown: dict[str, Figure], goodput: Goodput | None, has_target: bool) -> Markup:
    if not goodput or "yields" not in figures_shown or "within" not in figures_shown:
        return Markup()
    targets = figures_shown["yields"].traces[0]["x"]
    position = f"{math.log10(goodput.target_ms):.4f}"
    ends = {
        "min": f"{math.log10(targets[0]):.4f}",
        "max": f"{math.log10(targets[-1]):.4f}",
        "step": "any",
        "value": position,
    }
    controls = element(
        "div",
        element("label", "Target", for_="typed"),
        Markup(f'<span><input type="number" id="typed" min="0" step="any" value="{goodput.target_ms:g}"> ms</span>'),
        Markup(
            f'<input type="range" id="slider" aria-label="target" {" ".join(f"{k}={v!r}" for k, v in ends.items())}>'
        ),
        element("output", *_goodput_sentence(goodput)),
        class_="target",
    )
    note = "Goodput is the throughput of those answers that came within the target, counted in each level's histogram."
    if not has_target:
        note += " No target was given: the one at the start is the knee's p99, rounded up."
    both = element("div", *(chart(figures_shown[name]) for name in ("within", "yields")), class_="two")
    return section("Goodput at a target", controls, both, note=note, anchor="goodput")


def _goodput_sentence(goodput: Goodput) -> list[Any]:
    goodput_by_level = share(goodput.most / goodput.at.client.rows_per_s if goodput.at.client.rows_per_s else 0.0)
    end = "No level has 99% of its answers within it."
    parts: list[Any] = [
        element("b", f"{count(goodput.most)} inferences/s"),
        f" within {goodput.target_ms:g} ms at {load_words(goodput.at.offered)}, {goodput_by_level} of its answers. ",
    ]
    if not goodput.meeting:
        return [*parts, end]
    best_text = element("b", f"{count(goodput.meeting.client.rows_per_s)} inferences/s")
    return [*parts, f"99% of answers are within it up to {load_words(goodput.meeting.offered)}: ", best_text]


def _captioned_sections(figures_shown: dict[str, Figure], names: Sequence[str]) -> list[Markup]:
    return [
        chart_section(title, figures_shown[name], note, anchor=anchor)
        for name, (title, note, anchor) in _CAPTIONS.items()
        if name in figures_shown and name in names
    ]


def _command_section(document: Document) -> Markup:
    if not document.command:
        return Markup()
    command_block = element("pre", element("code", shlex.join(document.command), id="command"))
    button = element("button", "Copy", type="button", data_copy="command")
    return section("Make it again", element("div", command_block, button, class_="command"), anchor="again")


def _setup_section(document: Document) -> Markup:
    model = document.model
    tensors = [
        {each.get("name", "?"): f"{each.get('datatype', '')} {each.get('shape', '')}" for each in side}
        for side in (model.inputs, model.outputs)
    ]
    lists = {
        "Machine": document.machine,
        "Versions": document.versions,
        "Options": document.options,
        "Server": document.server,
        "Model": {
            "name": model.name, "version": model.version, "platform": model.platform,
            "max batch size": model.max_batch_size, "fingerprint of its configuration": model.fingerprint,
            "input": tensors[0], "output": tensors[1],
        },
    }  # fmt: skip
    parts = [
        element("div", element("h3", name), definition_list(pairs)) for name, pairs in lists.items() if flatten(pairs)
    ]
    config = json.dumps(model.config, indent=2, ensure_ascii=False)
    config_details = element(
        "details", element("summary", "The model's configuration"), element("pre", element("code", config))
    )
    columns = element("div", *parts, class_="columns")
    return section("Setting", columns, config_details if model.config else "", anchor="setting", long=True)
