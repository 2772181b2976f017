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
from .markup import Markup, carried, chart, charted, drawn, element, file, flat, listed, section
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
    told = target_ms or document.target_ms
    found = findings.goodput_of(document.levels, target) if target else None
    shown = _figures(document, target)
    missing = [words for name, words in _MISSING.items() if name not in shown]
    sections = [
        warned(findings.cautions(document)),
        _cards(document, found, bool(told)),
        _curve(document, shown),
        _goodput(shown, found, bool(told)),
        element("div", *_captioned(shown, ("by-load", "tails", "split", "batches")), class_="pair"),
        *_captioned(shown, ("windows", "trace")),
        element("div", *(element("p", words) for words in missing), class_="missing") if missing else Markup(),
        levels(document),
        composing(document),
        _again(document),
        _setting(document),
    ]
    places = [place for place in _PLACES if any(f'id="{place[0]}"' in each for each in sections)]
    top = [_header(document), navigation(places, save=True), Markup("<main>")]
    body = [*top, *sections, Markup("</main>"), footer(document.made_at)]
    carrying = [
        drawn(list(shown.values())),
        carried("spreads", _spreads(document)),
        carried("document", documents.text(document)),
    ]
    return file(f"{document.model.name}: penstock perf", body, carrying)


_PLACES = (
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
    made = [
        charts.curve(document, target),
        charts.within(document, target) if target else None,
        charts.yields(document, target) if target else None,
        charts.by_load(document),
        charts.tails(document),
        charts.split(document),
        charts.batches(document),
        timelines.traced(document),
        timelines.windows(document),
    ]
    return {each.name: each for each in made if each}


def _spreads(document: Document) -> list[dict[str, Any]]:
    """Return the histograms of the sound levels for page.js: each bucket's lowest ns as a step from the previous."""
    found = []
    for level in findings.sound(document.levels):
        spread = distribution(level.client.histogram)
        if spread.total:
            steps = [int(spread.lowest_ns[0]), *(spread.lowest_ns[1:] - spread.lowest_ns[:-1]).tolist()]
            found.append({
                "words": load_words(level.offered), "rate": level.client.rows_per_s, "steps": steps,
                "counts": spread.counts.tolist(),
            })  # fmt: skip
    return found


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
    first = element("p", element("b", "penstock perf"), element("span", kicker), class_="kicker")
    return element("header", element("div", first, element("h1", title), element("ul", *items, class_="facts")))


def when(made_at: str) -> str:
    """Format an ISO time for display."""
    return made_at.replace("T", " ").replace("+00:00", " UTC")


def navigation(places: Sequence[tuple[str, str]], *, save: bool = False) -> Markup:
    """Make the navigation from anchors and their labels."""
    links = [element("a", words, href=f"#{place}") for place, words in places]
    buttons = [element("button", "Light / dark", type="button", id="theme")]
    if save:
        carried = {"data_save": "document", "data_name": "penstock-perf.json"}
        buttons.insert(0, element("button", "Save JSON", type="button", **carried))
    return element("nav", element("div", *links, element("span", *buttons, class_="right")))


def footer(made_at: str) -> Markup:
    """Make the end of a page."""
    return element(
        "footer", f"Made by penstock perf, {when(made_at)}. This file is whole in itself and fetches nothing."
    )


def warned(said: list[str]) -> Markup:
    """Make the box of warnings, if there are any."""
    if not said:
        return Markup()
    lines = [element("li", each) for each in said]
    return element("section", element("h2", "Before you believe the figures"), element("ul", *lines), class_="cautions")


def card(name: str, figure: str, unit: str, *beside: Any, first: bool = False) -> Markup:
    """Make a headline figure."""
    number = element("div", figure, element("small", unit) if unit else "", class_="figure")
    lines = [element("div", each, class_="beside") for each in beside if each]
    return element("div", element("div", name, class_="name"), number, *lines, class_="card first" if first else "card")


def _cards(document: Document, found: Goodput | None, told: bool) -> Markup:
    best, knee = findings.best(document.levels), findings.knee(document.levels)
    cards = []
    if best:
        latency = best.client.latency_us
        beside = (
            f"inferences at {load_words(best.offered)}",
            f"p50 {ms(latency.get('p50'))}, p99 {ms(latency.get('p99'))}",
        )
        cards.append(card("Greatest throughput", count(best.client.rows_per_s), "/s", *beside, first=True))
    if knee:
        part = f"{share(knee.client.rows_per_s / best.client.rows_per_s)} of the greatest" if best else ""
        beside = f"inferences at {load_words(knee.offered)}, {part}", f"p99 {ms(knee.client.latency_us.get('p99'))}"
        cards.append(card("Knee", count(knee.client.rows_per_s), "/s", *beside))
    if found:
        source = "" if told else "no target was given: this is the knee's p99"
        beside = f"inferences at {load_words(found.at.offered)}", source
        cards.append(card(f"Goodput in {found.target_ms:g} ms", count(found.most), "/s", *beside))
    curve = [level for level in findings.sound(document.levels) if "p50" in level.client.latency_us]
    if least := min(curve, key=lambda level: level.client.latency_us["p50"], default=None):
        beside = f"p50 at {load_words(least.offered)}", f"p99 {ms(least.client.latency_us.get('p99'))}"
        cards.append(card("Least latency", bare_ms(least.client.latency_us["p50"]), "ms", *beside))
    cards += _costs(best) if best else []
    return element("div", *cards, class_="cards") if cards else Markup()


def _costs(best: Level) -> list[Markup]:
    cards = []
    if best.server_cpu_s_per_1000 is not None:
        own = f"generator {digits(best.client.cpu_us_per_request / 1e3)} s"
        beside = f"of server CPU per 1,000 requests ({own})", f"at {load_words(best.offered)}"
        cards.append(card("CPU", digits(best.server_cpu_s_per_1000), "s", *beside))
    if best.energy_j_per_1000 is not None:
        beside = "of the GPUs per 1,000 inferences", f"at {load_words(best.offered)}"
        cards.append(card("Energy", digits(best.energy_j_per_1000), "J", *beside))
    return cards


def _curve(document: Document, shown: dict[str, Figure]) -> Markup:
    if "curve" not in shown:
        return Markup()
    curve, knee = findings.sound(document.levels), findings.knee(document.levels)
    notes = ["Each point is a level, named by its load."]
    if knee:
        notes.append(KNEE)
        if knee is curve[0] or knee is curve[-1]:
            end, way = ("lowest", "below") if knee is curve[0] else ("highest", "above")
            notes.append(f"Here it is the {end} load of the run: the true one may lie {way}.")
    return charted("Latency and throughput", shown["curve"], " ".join(notes), anchor="curve")


def _goodput(shown: dict[str, Figure], found: Goodput | None, told: bool) -> Markup:
    if not found or "yields" not in shown or "within" not in shown:
        return Markup()
    targets = shown["yields"].traces[0]["x"]
    at = f"{math.log10(found.target_ms):.4f}"
    ends = {"min": f"{math.log10(targets[0]):.4f}", "max": f"{math.log10(targets[-1]):.4f}", "step": "any", "value": at}
    controls = element(
        "div",
        element("label", "Target", for_="typed"),
        Markup(f'<span><input type="number" id="typed" min="0" step="any" value="{found.target_ms:g}"> ms</span>'),
        Markup(
            f'<input type="range" id="slider" aria-label="target" {" ".join(f"{k}={v!r}" for k, v in ends.items())}>'
        ),
        element("output", *_said(found)),
        class_="target",
    )
    note = "Goodput is the throughput of those answers that came within the target, counted in each level's histogram."
    if not told:
        note += " No target was given: the one at the start is the knee's p99, rounded up."
    both = element("div", *(chart(shown[name]) for name in ("within", "yields")), class_="two")
    return section("Goodput at a target", controls, both, note=note, anchor="goodput")


def _said(found: Goodput) -> list[Any]:
    within = share(found.most / found.at.client.rows_per_s if found.at.client.rows_per_s else 0.0)
    end = "No level has 99% of its answers within it."
    said: list[Any] = [
        element("b", f"{count(found.most)} inferences/s"),
        f" within {found.target_ms:g} ms at {load_words(found.at.offered)}, {within} of its answers. ",
    ]
    if not found.meeting:
        return [*said, end]
    most = element("b", f"{count(found.meeting.client.rows_per_s)} inferences/s")
    return [*said, f"99% of answers are within it up to {load_words(found.meeting.offered)}: ", most]


def _captioned(shown: dict[str, Figure], names: Sequence[str]) -> list[Markup]:
    return [
        charted(title, shown[name], note, anchor=anchor)
        for name, (title, note, anchor) in _CAPTIONS.items()
        if name in shown and name in names
    ]


def _again(document: Document) -> Markup:
    if not document.command:
        return Markup()
    words = element("pre", element("code", shlex.join(document.command), id="command"))
    button = element("button", "Copy", type="button", data_copy="command")
    return section("Make it again", element("div", words, button, class_="command"), anchor="again")


def _setting(document: Document) -> Markup:
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
    parts = [element("div", element("h3", name), listed(pairs)) for name, pairs in lists.items() if flat(pairs)]
    config = json.dumps(model.config, indent=2, ensure_ascii=False)
    whole = element("details", element("summary", "The model's configuration"), element("pre", element("code", config)))
    inside = element("div", *parts, class_="columns")
    return section("Setting", inside, whole if model.config else "", anchor="setting", long=True)
