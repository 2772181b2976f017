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

_FOLDER = Path(__file__).parent
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
"""Makes the browser block every request, whatever the page contains."""
_THEME_SCRIPT = (
    'document.documentElement.dataset.theme=matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"'
)


class Markup(str):
    """HTML that needs no escaping. Joined to other text, it becomes text again, which is escaped."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """Escape what is not markup. Control characters and lone surrogates become replacement characters."""
    if isinstance(value, Markup):
        return value
    escaped = "".join(each if each.isprintable() or each in "\n\t\u00a0" else "\ufffd" for each in str(value))
    return Markup(html.escape(escaped))


def element(name: str, *children: Any, **attributes: str) -> Markup:
    """Make an element. `class_` and `data_x` stand for class and data-x."""
    attribute_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{attribute_text}>{''.join(map(text, children))}</{name}>")


def section(
    title: str, *children: Any, note: Any = "", anchor: str = "", switches_markup: Any = "", long: bool = False
) -> Markup:
    """Make a section: its title, the switches beside it, a note in small type, and its content."""
    head = element("div", element("h2", title), switches_markup, class_="head")
    attributes = ({"id": anchor} if anchor else {}) | ({"class_": "long"} if long else {})
    return element("section", head, element("p", note, class_="note") if note else "", *children, **attributes)


def chart(figure: Figure) -> Markup:
    """Make a figure's placeholder, in which page.js draws it."""
    placeholder = {"id": f"chart-{figure.name}", "class_": "chart", "style": f"min-height:{figure.height}px"}
    return element("div", role="img", **placeholder)


def switches(figure: Figure) -> Markup:
    """Make the buttons above a figure."""
    buttons = [
        element("button", name, type="button", data_figure=figure.name, aria_pressed="false" if index else "true")
        for index, name in enumerate(figure.switches)
    ]
    return element("span", *buttons, class_="switch") if buttons else Markup()


def chart_section(title: str, figure: Figure, note: Any = "", *children: Any, anchor: str = "") -> Markup:
    """Make a section of one figure."""
    return section(title, *children, chart(figure), note=note, anchor=anchor, switches_markup=switches(figure))


def table(head: Sequence[Any], rows: Sequence[Markup]) -> Markup:
    """Make a table that scrolls sideways if needed."""
    cells = (each if str(each).startswith("<th") else element("th", each, scope="col") for each in head)
    head_row = element("thead", element("tr", *cells))
    return element("div", element("table", head_row, element("tbody", *rows)), class_="scroll")


def row(name_cell: Any, cells: Sequence[Any], class_: str = "") -> Markup:
    """Make a row: its name and its cells; cells that are markup must be whole."""
    cells_made = [
        each if isinstance(each, Markup) and each.startswith("<td") else element("td", each) for each in cells
    ]
    return element("tr", element("th", name_cell, scope="row"), *cells_made, **({"class_": class_} if class_ else {}))


def definition_list(pairs: Mapping[str, Any]) -> Markup:
    """Make a list of names and values, with nested ones flattened; empty values are left out."""
    values = {name.removesuffix("_bytes").replace("_", " "): value for name, value in flatten(pairs).items()}
    return element("dl", *(each for pair in values.items() for each in map(element, ("dt", "dd"), pair)))


def flatten(pairs: Mapping[str, Any]) -> dict[str, str]:
    """Flatten nested objects and lists of them: {"gpus": [{"name": "H200"}]} is {"gpus 1, name": "H200"}."""
    flattened: dict[str, str] = {}
    for name, value in pairs.items():
        if isinstance(value, dict):
            flattened |= {f"{name}, {inner}": each for inner, each in flatten(value).items()}
        elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
            flattened |= flatten({f"{name} {index + 1}": each for index, each in enumerate(value)})
        elif isinstance(value, list | tuple):
            flattened[name] = ", ".join(map(str, value))
        elif value is not None:
            flattened[name] = _plain(name, value)
    return {name: value for name, value in flattened.items() if value}


def _plain(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and name.endswith("bytes"):
        return size(value)
    return str(value)


def embed_json(name: str, content: Any) -> Markup:
    """Embed JSON in the page for its script. `<` is escaped, so that no text can end the element."""
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"), allow_nan=False)
    safe = text.replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="carried-{name}">{safe}</script>')


def embed_figures(figures: Sequence[Figure]) -> Markup:
    """Embed figures in the page."""
    return embed_json(
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
        f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_SECURITY_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{text(title)}</title>",
        f"<style>{(_FOLDER / 'page.css').read_text('utf-8')}</style>",
        f"<script>{_THEME_SCRIPT}</script>\n</head>\n<body>",
        *body,
        *carrying,
        f"<script>{plotly}</script>",
        f"<script>{(_FOLDER / 'page.js').read_text('utf-8')}</script>",
        "</body>\n</html>\n",
    ))  # fmt: skip
