"""Console: the page of the API at /api: the models, forms to try them, and their trainings. Pure.

It loads nothing else, and texts of models and clients are escaped. The script sends a form as the API's document says.
Without scripts, the browser sends all fields as form fields, which is correct for those that are filled in and allowed
in a form; the page says so.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import quote

from .console_parts import SCRIPT, STYLE
from .messages import ModelDescription


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


HEADER_LINES = (
    f"content-security-policy: default-src 'none'; style-src 'sha256-{_hash(STYLE)}'; script-src "
    f"'sha256-{_hash(SCRIPT)}'; connect-src 'self'; img-src blob:; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'\r\n"
).encode()
"""The header lines of the page: a browser runs only the page's own script."""
_METADATA_SHOWN = ("description", "summary", "author", "author-email", "license", "version", "url")
_LOCATIONS = {"query": "query", "formData": "form", "header": "header", "cookie": "cookie"}


@dataclass(frozen=True, slots=True)
class ModelState:
    """One model in its current state. `metadata` and `trainings` are the answers of their URLs."""

    name: str
    description: ModelDescription
    metadata: dict[str, Any] = field(default_factory=dict)
    trainings: Sequence[dict[str, Any]] = ()


def page(base: str, models: Iterable[ModelState], *, predict: bool, train: bool) -> bytes:
    """Make the page. `base` is the prefix of paths; `predict`, `train`: whether these endpoints answer."""
    states = list(models)
    links = "".join(f'<li><a href="#model-{at}">{escape(each.name)}</a></li>' for at, each in enumerate(states))
    sections = "".join(_model(base, at, each, predict=predict, train=train) for at, each in enumerate(states))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>DEEPaaS models</title>'
        f"<style>{STYLE}</style></head><body>"
        f'<header><h1>DEEPaaS models</h1><nav aria-label="Models"><ul>{links}</ul></nav>'
        f'<p>The API as a document: <a href="{escape(base)}/swagger.json">Swagger 2.0</a>, '
        f'<a href="{escape(base)}/openapi3.json">OpenAPI 3</a>. <a href="{escape(base)}/v2/models/">Metadata</a> of '
        "all models.</p><noscript><p>Without scripts, a form sends all its fields, the empty ones as empty texts.</p>"
        f"</noscript></header><main>{sections}</main><script>{SCRIPT}</script></body></html>\n"
    ).encode("utf-8", "replace")  # fmt: skip


def _model(base: str, at: int, model: ModelState, *, predict: bool, train: bool) -> str:
    path, description = f"{base}/v2/models/{quote(model.name, safe='')}/", model.description
    parts = [f'<section id="model-{at}" aria-labelledby="name-{at}"><h2 id="name-{at}">{escape(model.name)}</h2>']
    parts.append(_metadata(path, model.metadata))
    if predict:
        parts.append("<h3>Predict</h3>")
        parts.append(
            _form(f"{path}predict/", f"predict-{at}", description.predict_args, "Predict", exists=description.predicts)
        )
    if train:
        parts.append("<h3>Train</h3>")
        parts.append(
            _form(f"{path}train/", f"train-{at}", description.train_args, "Start a training", exists=description.trains)
        )
        parts.append(_trainings(f"{path}train/", model.trainings))
    return "".join([*parts, "</section>"])


def _metadata(path: str, metadata: dict[str, Any]) -> str:
    rows = [
        f"<dt>{escape(name)}</dt><dd>{_link(str(metadata[name]))}</dd>"
        for name in _METADATA_SHOWN
        if metadata.get(name) not in (None, "")
    ]
    listed = f"<dl>{''.join(rows)}</dl>" if rows else ""
    return f'{listed}<p><a href="{escape(path)}">Metadata</a></p>'


def _link(text: str) -> str:
    """Return a text as HTML, as a link if it is a web URL."""
    shown = escape(text)
    return f'<a href="{shown}" rel="noreferrer">{shown}</a>' if text.startswith(("http://", "https://")) else shown


def _form(action: str, prefix: str, arguments: dict[str, Any], button: str, *, exists: bool) -> str:
    if not exists:
        return "<p>The model has no such method; calls return 501.</p>"
    fields = "".join(
        _field(f"{prefix}-{at}", parameter) for at, parameter in enumerate(_flat(arguments.get("parameters", ())))
    )
    fields = fields or "<p>No arguments.</p>"
    return (
        f'<form method="post" enctype="multipart/form-data" action="{escape(action)}">{fields}'
        f'<button>{button}</button><output aria-live="polite" hidden></output></form>'
    )


def _flat(parameters: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield single arguments: those of a JSON body are described together."""
    for parameter in parameters:
        if parameter.get("in") != "body":
            yield parameter
            continue
        schema = parameter.get("schema", {})
        needed = schema.get("required", ())
        for name, each in schema.get("properties", {}).items():
            yield {**each, "name": name, "in": "json", "required": name in needed}


def _field(identifier: str, parameter: dict[str, Any]) -> str:
    """Make the field of one argument: its name, its meaning, and its control."""
    name, location = str(parameter["name"]), _LOCATIONS.get(parameter.get("in", ""), "json")
    required = bool(parameter.get("required"))
    kind = parameter.get("type", "")
    if kind == "file" and location == "query":
        location = "form"  # its field does not name a location, and forms are searched too
    notes = [escape(str(kind))] if kind else []
    notes += ["required"] if required else []
    notes += [f"default <code>{escape(json.dumps(parameter['default']))}</code>"] if "default" in parameter else []
    notes += ["one value per line"] if kind == "array" else []
    notes += ["a cookie, which this page cannot send"] if location == "cookie" else []
    about = escape(str(parameter.get("description", "")))
    about += f" ({'; '.join(notes)})" if notes else ""
    return (
        f'<div class="field"><label for="{identifier}">{escape(name)}</label>'
        f"{_control(identifier, name, location, parameter)}"
        f'<small id="{identifier}-about">{about}</small></div>'
    )


def _control(identifier: str, name: str, location: str, parameter: dict[str, Any]) -> str:
    kind = parameter.get("type", "")
    attributes = (
        f'id="{identifier}" name="{escape(name)}" data-in="{location}" data-kind="{escape(str(kind))}" '
        f'aria-describedby="{identifier}-about"'
    )
    attributes += " required" if parameter.get("required") else ""
    attributes += " disabled" if location == "cookie" else ""
    choices = parameter.get("enum")
    if kind == "boolean":
        options = "".join(f"<option>{each}</option>" for each in ("", "true", "false"))
        return f"<select {attributes}>{options}</select>"
    if kind in ("array", "object", "") and not choices:
        return f'<textarea {attributes} rows="2"></textarea>'
    if kind == "file":
        return f'<input {attributes} type="file">'
    entered = {"integer": ' type="number" step="1"', "number": ' type="number" step="any"'}.get(kind, ' type="text"')
    if not isinstance(choices, list):
        return f"<input {attributes}{entered}>"
    options = "".join(f'<option value="{escape(str(each))}"></option>' for each in choices)
    listed = f'<datalist id="{identifier}-choices">{options}</datalist>'
    return f'<input {attributes} type="text" list="{identifier}-choices">{listed}'


def _trainings(path: str, trainings: Sequence[dict[str, Any]]) -> str:
    if not trainings:
        return "<p>No trainings.</p>"
    rows = "".join(_training(path, training) for training in trainings)
    return (
        '<table><caption>Trainings</caption><thead><tr><th scope="col">Begun</th><th scope="col">Status</th>'
        f'<th scope="col">Training</th><th scope="col">End</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _training(path: str, training: dict[str, Any]) -> str:
    uuid, status = escape(str(training.get("uuid"))), escape(str(training.get("status")))
    one = escape(path) + uuid
    return (
        f"<tr><td>{escape(str(training.get('date')))}</td><td>{status}</td>"
        f'<td><a href="{one}/page">{uuid}</a> (<a href="{one}">record</a>, <a href="{one}/log">log</a>)</td>'
        f'<td><button type="button" data-end="{one}">{"Cancel" if status == "running" else "Forget"}</button></td></tr>'
    )
