"""OpenAPI: the document at `/seldon.json`, which describes the URLs of a component server. Pure; made once.

The original serves a file there; this document is Penstock's own, for the same URLs and messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from .pages import encode_json

_TEXT, _INTEGER, _NUMBER, _ANY = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"description": "any JSON"},
)
_PREDICTIONS = ("/api/v1.0/predictions", "/api/v0.1/predictions")
_FEEDBACK = ("/api/v1.0/feedback", "/api/v0.1/feedback")
_CALLS: Mapping[str, tuple[str, str]] = {
    "/predict": ("SeldonMessage", "Predict"),
    "/transform-input": ("SeldonMessage", "Transform the input of a model"),
    "/transform-output": ("SeldonMessage", "Transform the output of a model"),
    "/route": ("SeldonMessage", "Choose the child that receives a request"),
    "/aggregate": ("SeldonMessageList", "Combine several answers into one"),
    "/send-feedback": ("Feedback", "Send the true answer and the reward"),
}
"""The message that each path with both GET and POST takes."""


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _map_of(of: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": of}


def _schemas() -> dict[str, Any]:
    tensor = _object(shape=_list(_INTEGER), values=_list(_NUMBER))
    return {
        "SeldonMessage": {
            **_object(
                status=_ref("Status"), meta=_ref("Meta"), data=_ref("DefaultData"), strData=_TEXT,
                binData={**_TEXT, "format": "byte"}, jsonData=_ANY,
            ),
            "description": "one of data, jsonData, strData and binData",
        },
        "DefaultData": {
            **_object(names=_list(_TEXT), tensor=tensor, ndarray=_list(_ANY), tftensor={"type": "object"}),
            "description": "one of tensor, ndarray and tftensor, TensorFlow's TensorProto",
        },
        "Meta": _object(
            puid=_TEXT, tags=_map_of(_ANY), routing=_map_of(_INTEGER), requestPath=_map_of(_TEXT),
            metrics=_list(_ref("Metric")),
        ),
        "Metric": _object(
            key=_TEXT, type={**_TEXT, "enum": ["COUNTER", "GAUGE", "TIMER"]}, value=_NUMBER, tags=_map_of(_TEXT)
        ),
        "SeldonMessageList": _object(seldonMessages=_list(_ref("SeldonMessage"))),
        "Feedback": _object(
            request=_ref("SeldonMessage"), response=_ref("SeldonMessage"), reward=_NUMBER,
            truth=_ref("SeldonMessage"),
        ),
        "Status": _object(
            code=_INTEGER, info=_TEXT, reason=_TEXT, status={"description": "0 or SUCCESS, 1 or FAILURE"}
        ),
        "Failure": {**_object(status=_ref("Status")), "required": ["status"]},
        "Metadata": _object(
            name=_TEXT, versions=_list(_TEXT), platform=_TEXT, inputs=_list({"type": "object"}),
            outputs=_list({"type": "object"}), custom=_map_of(_TEXT),
        ),
    }  # fmt: skip


def _responses(content_type: str, schema: Any) -> dict[str, Any]:
    failed = {"application/json": {"schema": _ref("Failure")}}
    return {
        "200": {"description": "served", "content": {content_type: {"schema": schema}}},
        "default": {"description": "failed", "content": failed},
    }


def _request_body(name: str) -> dict[str, Any]:
    form = {**_object(json={**_TEXT, "description": f"a {name} as JSON"}), "required": ["json"]}
    content = {"application/json": {"schema": _ref(name)}, "application/x-www-form-urlencoded": {"schema": form}}
    return {"required": True, "content": content}


def _call(path: str, name: str, summary: str, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": method + path.title().replace("/", "").replace("-", "").replace(".", ""),
        "summary": summary,
        "responses": _responses("application/json", _ref("SeldonMessage")),
    }
    if method == "post":
        operation["requestBody"] = _request_body(name)
    else:
        content = {"application/json": {"schema": _ref(name)}}
        operation["parameters"] = [{"name": "json", "in": "query", "required": True, "content": content}]
    return operation


def _page(path: str, summary: str, content_type: str, schema: Any) -> dict[str, Any]:
    operation = _call(path, "", summary, "get")
    del operation["parameters"]
    return {"get": {**operation, "responses": _responses(content_type, schema)}}


def document() -> dict[str, Any]:
    """Make the document."""
    paths: dict[str, Any] = {
        path: {method: _call(path, *call, method) for method in ("get", "post")} for path, call in _CALLS.items()
    }
    for path in _PREDICTIONS:
        paths[path] = {"post": _call(path, *_CALLS["/predict"], "post")}
    for path in _FEEDBACK:
        paths[path] = {"post": _call(path, *_CALLS["/send-feedback"], "post")}
    for path in ("/health/status", "/api/v1.0/health/status"):
        paths[path] = _page(path, "The health of the component", "application/json", _ref("SeldonMessage"))
    for path in ("/metadata", "/api/v1.0/metadata"):
        paths[path] = _page(path, "The metadata of the component", "application/json", _ref("Metadata"))
    paths["/health/ping"] = _page("/health/ping", "Whether the server is running: pong", "text/html", _TEXT)
    paths["/seldon.json"] = _page("/seldon.json", "This document", "application/json", {"type": "object"})
    return {
        "openapi": "3.0.3",
        "info": {"title": "Seldon Core component", "version": "1.0"},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }


@cache
def page() -> bytes:
    """Return the document as it is served."""
    return encode_json(document())
