"""The OpenAPI descriptions of parameters, bodies and answers, and the page itself, which needs no CDN."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

_COUNTED = {"type": "object", "properties": {"count": {"type": "integer"}, "ns": {"type": "integer"}}}
_TENSOR = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "datatype": {"type": "string", "examples": ["FP32"]},
        "shape": {"type": "array", "items": {"type": "integer"}},
    },
}
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


_TEXT = {"type": "string"}
_INTEGER = {"type": "integer"}
_PARAMETERS = {"type": "object", "additionalProperties": True}

SERVER = _object(name=_TEXT, version=_TEXT, extensions=_list(_TEXT))
MODEL = _object(name=_TEXT, versions=_list(_TEXT), platform=_TEXT, inputs=_list(_TENSOR), outputs=_list(_TENSOR))
CONFIG = {"type": "object", "description": "Triton's ModelConfig, in snake_case"}
INDEX = _list(_object(name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT))
INDEX_REQUEST = _object(ready={"type": "boolean", "default": False})
LOAD_REQUEST = _object(
    parameters={
        "type": "object",
        "properties": {"config": {**_TEXT, "description": "a ModelConfig as JSON"}},
        "additionalProperties": {**_TEXT, "description": "file:<path in the model's folder>: its content in base64"},
    }
)
UNLOAD_REQUEST = _object(parameters=_object(unload_dependents={"type": "boolean", "default": False}))
STATISTICS = _object(
    model_stats=_list(
        _object(
            name=_TEXT,
            version=_TEXT,
            last_inference={**_INTEGER, "description": "milliseconds since the epoch"},
            inference_count=_INTEGER,
            execution_count=_INTEGER,
            inference_stats={"type": "object", "additionalProperties": _COUNTED},
            response_stats={"type": "object"},
            batch_stats=_list(
                _object(batch_size=_INTEGER, compute_input=_COUNTED, compute_infer=_COUNTED, compute_output=_COUNTED)
            ),
            memory_usage=_list({"type": "object"}),
            run_times=_list(
                _object(
                    shapes={**_list({"type": ["array", "null"]}), "description": "of the inputs, without rows"},
                    rows=_INTEGER,
                    runs=_INTEGER,
                    mean_ns=_INTEGER,
                    p95_ns=_INTEGER,
                )
            ),
        )
    )
)
INFER_REQUEST = {
    **_object(
        id=_TEXT,
        parameters=_PARAMETERS,
        inputs=_list({**_TENSOR, "properties": {**_TENSOR["properties"], "parameters": _PARAMETERS, "data": {}}}),  # type: ignore[dict-item]
        outputs=_list(_object(name=_TEXT, parameters=_PARAMETERS)),
    ),
    "required": ["inputs"],
}
INFER_RESPONSE = _object(
    id=_TEXT,
    model_name=_TEXT,
    model_version=_TEXT,
    parameters=_PARAMETERS,
    outputs=_list({**_TENSOR, "properties": {**_TENSOR["properties"], "parameters": _PARAMETERS, "data": {}}}),  # type: ignore[dict-item]
)
ANYTHING: dict[str, Any] = {"description": "any JSON"}


def describe_request(path: str, body: Any = None, *, binary: bool = False) -> dict[str, Any]:
    """Return a route's `openapi_extra`: its path parameters, and its request body if it has one."""
    extra: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ]
    }
    if body is not None:
        content: dict[str, Any] = {"application/json": {"schema": body}}
        if binary:
            text = "the same JSON, Inference-Header-Content-Length bytes of it, then the binary inputs in their order"
            content["application/octet-stream"] = {
                "schema": {"type": "string", "format": "binary", "description": text}
            }
        extra["requestBody"] = {"content": content}
    return extra


def describe_answers(schema: Any, content_type: str, statuses: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Return a route's `responses`. `schema` is None if the answer has no body."""
    served: dict[str, Any] = {"description": "served"}
    if schema is not None:
        served["content"] = {content_type: {"schema": schema}}
    refused = {"content": {"application/json": {"schema": _ERROR}}}
    return {200: served, **{status: {"description": text, **refused} for status, text in statuses.items()}}


def page(document: Mapping[str, Any]) -> str:
    """Render an OpenAPI document as one HTML page that needs no script, style sheet or other host."""
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    style = "body{font:16px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}summary{cursor:pointer}"
    style += "code{font-weight:bold}pre{background:#8882;padding:.5em;overflow:auto;font-size:13px}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
        f'<h1>{title}</h1><p>The same as a document: <a href="openapi.json">openapi.json</a></p>'
        + "".join(_operations(document))
        + "</html>"
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            detail = {key: operation[key] for key in ("parameters", "requestBody", "responses") if key in operation}
            text = html.escape(orjson.dumps(detail, option=orjson.OPT_INDENT_2).decode())
            head = f"<code>{method.upper()} {html.escape(path)}</code> {html.escape(operation.get('summary', ''))}"
            yield f"<details><summary>{head}</summary><pre>{text}</pre></details>"
