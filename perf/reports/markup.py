"""Markup: the elements that pages are built from, and the file around them, which is self-contained.

Everything from a run is escaped here, in `text`; nowhere else is a run's text put into a page.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .charts import Figure
from .extras import needed
from .formats import size

_BESIDE = Path(__file__).parent
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Makes the browser block every request, whatever the page contains."""
_EARLY = 'document.documentElement.dataset.theme=matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"'


class Markup(str):
    """HTML that needs no escaping. Joined to other text, it becomes text again, which is escaped."""

    __slots__ = ()


def text(words: Any) -> Markup:
    """Escape what is not markup. Control characters and lone surrogates become replacement characters."""
    if isinstance(words, Markup):
        return words
    shown = "".join(each if each.isprintable() or each in "\n\t\u00a0" else "\ufffd" for each in str(words))
    return Markup(html.escape(shown))


def element(name: str, *inside: Any, **attributes: str) -> Markup:
    """Make an element. `class_` and `data_x` stand for class and data-x."""
    words = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{words}>{''.join(map(text, inside))}</{name}>")


def section(title: str, *inside: Any, note: Any = "", anchor: str = "", beside: Any = "", long: bool = False) -> Markup:
    """Make a section: its title, the switches beside it, a note in small type, and its content."""
    head = element("div", element("h2", title), beside, class_="head")
    attributes = ({"id": anchor} if anchor else {}) | ({"class_": "long"} if long else {})
    return element("section", head, element("p", note, class_="note") if note else "", *inside, **attributes)


def chart(figure: Figure) -> Markup:
    """Make a figure's placeholder, in which page.js draws it."""
    place = {"id": f"chart-{figure.name}", "class_": "chart", "style": f"min-height:{figure.height}px"}
    return element("div", role="img", **place)


def switches(figure: Figure) -> Markup:
    """Make the buttons above a figure."""
    buttons = [
        element("button", name, type="button", data_figure=figure.name, aria_pressed="false" if at else "true")
        for at, name in enumerate(figure.switches)
    ]
    return element("span", *buttons, class_="switch") if buttons else Markup()


def charted(title: str, figure: Figure, note: Any = "", *inside: Any, anchor: str = "") -> Markup:
    """Make a section of one figure."""
    return section(title, *inside, chart(figure), note=note, anchor=anchor, beside=switches(figure))


def table(head: Sequence[Any], rows: Sequence[Markup]) -> Markup:
    """Make a table that scrolls sideways if needed."""
    cells = (each if str(each).startswith("<th") else element("th", each, scope="col") for each in head)
    first = element("thead", element("tr", *cells))
    return element("div", element("table", first, element("tbody", *rows)), class_="scroll")


def row(first: Any, cells: Sequence[Any], class_: str = "") -> Markup:
    """Make a row: its name and its cells; cells that are markup must be whole."""
    made = [each if isinstance(each, Markup) and each.startswith("<td") else element("td", each) for each in cells]
    return element("tr", element("th", first, scope="row"), *made, **({"class_": class_} if class_ else {}))


def listed(pairs: Mapping[str, Any]) -> Markup:
    """Make a list of names and values, with nested ones flattened; empty values are left out."""
    told = {name.removesuffix("_bytes").replace("_", " "): value for name, value in flat(pairs).items()}
    return element("dl", *(each for pair in told.items() for each in map(element, ("dt", "dd"), pair)))


def flat(pairs: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested objects and lists of them: {"gpus": [{"name": "H200"}]} is {"gpus 1, name": "H200"}."""
    found: dict[str, str] = {}
    for name, value in pairs.items():
        if isinstance(value, dict):
            found |= {f"{name}, {inner}": each for inner, each in flat(value).items()}
        elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
            found |= flat({f"{name} {at + 1}": each for at, each in enumerate(value)})
        elif isinstance(value, list | tuple):
            found[name] = ", ".join(map(str, value))
        elif value is not None:
            found[name] = _plain(name, value)
    return {name: value for name, value in found.items() if value}


def _plain(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.endswith("bytes"):
        return size(value)
    return str(value)


def carried(name: str, content: Any) -> Markup:
    """Embed JSON in the page for its script. `<` is escaped, so that no text can end the element."""
    words = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"), allow_nan=False)
    safe = words.replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="carried-{name}">{safe}</script>')


def drawn(figures: Sequence[Figure]) -> Markup:
    """Embed figures in the page."""
    return carried(
        "figures",
        {
            each.name: {
                "traces": each.traces, "layout": each.layout, "height": each.height, "switches": each.switches,
            }
            for each in figures
        },
    )  # fmt: skip


def file(title: str, body: Sequence[Markup], carrying: Sequence[Markup]) -> str:
    """Make the file: one style sheet, one script, plotly.js once. Raises: MissingExtraError."""
    plotly = needed("plotly.offline").get_plotlyjs()
    return "\n".join((
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{text(title)}</title>",
        f"<style>{(_BESIDE / 'page.css').read_text('utf-8')}</style>",
        f"<script>{_EARLY}</script>\n</head>\n<body>",
        *body,
        *carrying,
        f"<script>{plotly}</script>",
        f"<script>{(_BESIDE / 'page.js').read_text('utf-8')}</script>",
        "</body>\n</html>\n",
    ))  # fmt: skip
