"""Swagger: the document of a server's API in the original's version of that format, 2.0. Pure.

Source: deepaas 2.6.0, api/v2 and its responses.py, as written by aiohttp-apispec 2.2. It describes every model alike:
predictions are texts and a list of trainings is an object. openapi.py has the accurate document.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .messages import ModelDescription

Json = dict[str, Any]
_JSON, _REF = "application/json", "#/definitions/"
_TEXT: Json = {"type": "string"}


def _object(required: tuple[str, ...] = (), **properties: Json) -> Json:
    return {"type": "object", "properties": properties, **({"required": sorted(required)} if required else {})}


def _said(description: str, **more: Any) -> Json:
    return {"type": "string", **more, "description": description}


def _list_of(name: str) -> Json:
    return {"type": "array", "items": {"$ref": _REF + name}}


_STATUSES = ["running", "error", "completed", "cancelled"]
DEFINITIONS: dict[str, Json] = {
    "Failure": _object(("message",), message=_said("Failure message")),
    "Location": _object(("rel", "href", "type"), rel=_TEXT, href={"type": "string", "format": "url"}, type=_TEXT),
    "ModelMeta": _object(
        ("id", "name", "description"),
        id=_said("Model identifier"), name=_said("Model name"), description=_said("Model description"),
        license=_said("Model license"), author=_said("Model author"), version=_said("Model version"),
        url=_said("Model url"), links=_list_of("Location"),
    ),
    "Prediction": _object(
        ("status", "predictions"),
        status=_said("Response status message"), predictions=_said("String containing predictions"),
    ),
    "Training": _object(
        ("uuid", "date", "status"),
        uuid=_said("Training identifier", format="uuid"), date=_said("Training start time", format="date-time"),
        status=_said("Training status", enum=_STATUSES), message=_said("Optional message explaining status"),
    ),
    "TrainingList": _object(trainings=_list_of("Training")),
    "Version": _object(("version", "id"), version=_TEXT, id=_TEXT, links={"$ref": _REF + "Location"}, type=_TEXT),
    "Versions": _object(versions=_list_of("Version")),
}  # fmt: skip
"""The definitions that all servers have."""
_UUID = {"in": "path", "name": "uuid", "required": True, "type": "string"}


@dataclass
class _Document:
    """A document being written. `definitions` has the names in use, and their definitions."""

    paths: dict[str, Json] = field(default_factory=dict)
    definitions: dict[str, Json] = field(default_factory=dict)

    def add(self, path: str, method: str, summary: str, tag: str, **said: Any) -> None:
        """Describe one method of a path. `said` are members of its operation, in addition to the usual ones."""
        operation = {"parameters": [], "responses": {}, "tags": [tag], "summary": summary, "produces": [_JSON], **said}
        self.paths.setdefault(path, {})[method] = operation

    def own(self, name: str, status: int = 200) -> Json:
        """Describe an answer of a kind that all servers have. Returns: a member of `responses`."""
        self._define(name)
        return {str(status): {"schema": {"$ref": _REF + name}, "description": "Refused" if status == 400 else "Done"}}

    def _define(self, name: str) -> None:
        if name not in self.definitions:
            self.definitions[name] = definition = DEFINITIONS[name]
            for other in _names_in(definition):
                self._define(other)

    def merge(self, definitions: Mapping[str, Json]) -> dict[str, str]:
        """Add the definitions of a model. Returns: new names for those already in use, if any definition differs."""
        taken = [name for name in definitions if name in self.definitions]
        other: dict[str, str] = {}
        if any(self.definitions[name] != definitions[name] for name in taken):
            for name in taken:
                used = {*self.definitions, *definitions, *other.values()}
                other[name] = next(f"{name}{at}" for at in range(1, len(used) + 2) if f"{name}{at}" not in used)
        for name, definition in definitions.items():
            self.definitions[other.get(name, name)] = renamed(definition, other)
        return other


def document(base: str, models: Iterable[tuple[str, ModelDescription]], *, predict: bool, train: bool) -> Json:
    """Make the document. `predict`, `train`: whether these endpoints answer."""
    written, described = _Document(), list(models)
    failure = written.own("Failure", 400)
    written.add(f"{base}/v2/", "get", "The version of the API", "versions", responses=written.own("Version") | failure)
    written.add(
        f"{base}/v2/debug/", "get", "The log of the server, if it shows it", "debug", produces=["text/plain"],
        responses={"200": {"description": "What was logged so far"}, "204": {"description": "It does not show it"}},
    )  # fmt: skip
    written.add(f"{base}/v2/models/", "get", "The models that are served", "models", responses=written.own("ModelMeta"))
    for name, _ in described:
        path = f"{base}/v2/models/{name}/"
        written.add(path, "get", "What the model is", "models", responses=written.own("ModelMeta"))
    written.add(base or "/", "get", "The versions of the API", "versions", responses=written.own("Versions") | failure)
    for name, description in described:
        _add_model(written, f"{base}/v2/models/{name}/", description, predict=predict, train=train)
    return {
        "swagger": "2.0",
        "info": {
            "title": "DEEPaaS models, served by Penstock",
            "version": importlib.metadata.version("penstock"),
            "description": "Metadata, predictions and trainings of the models of this server.",
        },
        "paths": written.paths,
        "definitions": written.definitions,
    }


def _add_model(written: _Document, path: str, said: ModelDescription, *, predict: bool, train: bool) -> None:
    """Describe the endpoints of a model. `path` is that of its metadata."""
    parts = [*((said.train_args,) if train else ()), *((said.predict_args, said.schema) if predict else ())]
    if predict and not said.schema:
        written.own("Prediction")
    if train:
        written.own("TrainingList")
    other = written.merge({name: each for part in parts for name, each in part.get("definitions", {}).items()})
    if train:
        arguments = renamed(said.train_args.get("parameters", []), other)
        written.add(path + "train/", "post", "Begin a training", "models", parameters=arguments)
        written.add(path + "train/", "get", "The trainings", "models", responses=written.own("TrainingList"))
        one, uuid = path + "train/{uuid}", [_UUID]
        written.add(one, "get", "A training", "models", parameters=uuid, responses=written.own("Training"))
        written.add(one, "delete", "End a training, or forget it", "models", parameters=uuid)
    if predict:
        arguments = renamed(said.predict_args.get("parameters", []), other)
        name = said.schema.get("name", "")
        good = {"200": {"schema": {"$ref": _REF + other.get(name, name)}, "description": "Done"}} if name else {}
        written.add(
            path + "predict/", "post", "Make a prediction", "models", parameters=arguments,
            produces=said.predict_args.get("produces", [_JSON]),
            responses=(good or written.own("Prediction")) | written.own("Failure", 400),
        )  # fmt: skip


def renamed(value: Any, names: Mapping[str, str], to: str = _REF) -> Any:
    """Return JSON with the references to definitions renamed, or with another prefix."""
    if isinstance(value, dict):
        return {
            key: to + names.get(each.removeprefix(_REF), each.removeprefix(_REF))
            if key == "$ref" and isinstance(each, str)
            else renamed(each, names, to)
            for key, each in value.items()
        }
    return [renamed(each, names, to) for each in value] if isinstance(value, list) else value


def _names_in(value: Any) -> list[str]:
    """List the definitions to which JSON refers."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str):
            return [reference.removeprefix(_REF)]
        return [name for each in value.values() for name in _names_in(each)]
    return [name for each in value for name in _names_in(each)] if isinstance(value, list) else []
