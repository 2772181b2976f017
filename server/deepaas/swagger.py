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


def _string(description: str, **keys: Any) -> Json:
    return {"type": "string", **keys, "description": description}


def _array_of(name: str) -> Json:
    return {"type": "array", "items": {"$ref": _REF + name}}


_STATUSES = ["running", "error", "completed", "cancelled"]
DEFINITIONS: dict[str, Json] = {
    "Failure": _object(("message",), message=_string("Failure message")),
    "Location": _object(("rel", "href", "type"), rel=_TEXT, href={"type": "string", "format": "url"}, type=_TEXT),
    "ModelMeta": _object(
        ("id", "name", "description"),
        id=_string("Model identifier"), name=_string("Model name"), description=_string("Model description"),
        license=_string("Model license"), author=_string("Model author"), version=_string("Model version"),
        url=_string("Model url"), links=_array_of("Location"),
    ),
    "Prediction": _object(
        ("status", "predictions"),
        status=_string("Response status message"), predictions=_string("String containing predictions"),
    ),
    "Training": _object(
        ("uuid", "date", "status"),
        uuid=_string("Training identifier", format="uuid"), date=_string("Training start time", format="date-time"),
        status=_string("Training status", enum=_STATUSES), message=_string("Optional message explaining status"),
    ),
    "TrainingList": _object(trainings=_array_of("Training")),
    "Version": _object(("version", "id"), version=_TEXT, id=_TEXT, links={"$ref": _REF + "Location"}, type=_TEXT),
    "Versions": _object(versions=_array_of("Version")),
}  # fmt: skip
"""The definitions that all servers have."""
_UUID = {"in": "path", "name": "uuid", "required": True, "type": "string"}


@dataclass
class _Document:
    """A document in the making. `definitions` has the names in use, and their definitions."""

    paths: dict[str, Json] = field(default_factory=dict)
    definitions: dict[str, Json] = field(default_factory=dict)

    def add(self, path: str, method: str, summary: str, tag: str, **members: Any) -> None:
        """Describe one method of a path. `members` are members of its operation, in addition to the usual ones."""
        operation = {
            "parameters": [],
            "responses": {},
            "tags": [tag],
            "summary": summary,
            "produces": [_JSON],
            **members,
        }
        self.paths.setdefault(path, {})[method] = operation

    def describe_answer(self, name: str, status: int = 200) -> Json:
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
        shared = [name for name in definitions if name in self.definitions]
        new_names: dict[str, str] = {}
        if any(self.definitions[name] != definitions[name] for name in shared):
            for name in shared:
                used = {*self.definitions, *definitions, *new_names.values()}
                new_names[name] = next(f"{name}{at}" for at in range(1, len(used) + 2) if f"{name}{at}" not in used)
        for name, definition in definitions.items():
            self.definitions[new_names.get(name, name)] = rename_references(definition, new_names)
        return new_names


def document(base: str, models: Iterable[tuple[str, ModelDescription]], *, predict: bool, train: bool) -> Json:
    """Make the document. `predict`, `train`: whether these endpoints answer."""
    swagger, described = _Document(), list(models)
    failure = swagger.describe_answer("Failure", 400)
    swagger.add(
        f"{base}/v2/",
        "get",
        "The version of the API",
        "versions",
        responses=swagger.describe_answer("Version") | failure,
    )
    swagger.add(
        f"{base}/v2/debug/", "get", "The log of the server, if it is shown", "debug", produces=["text/plain"],
        responses={"200": {"description": "What was logged so far"}, "204": {"description": "It is not shown"}},
    )  # fmt: skip
    swagger.add(
        f"{base}/v2/models/",
        "get",
        "The models that are served",
        "models",
        responses=swagger.describe_answer("ModelMeta"),
    )
    for name, _ in described:
        path = f"{base}/v2/models/{name}/"
        swagger.add(path, "get", "The metadata of the model", "models", responses=swagger.describe_answer("ModelMeta"))
    swagger.add(
        base or "/",
        "get",
        "The versions of the API",
        "versions",
        responses=swagger.describe_answer("Versions") | failure,
    )
    for name, description in described:
        _add_model(swagger, f"{base}/v2/models/{name}/", description, predict=predict, train=train)
    return {
        "swagger": "2.0",
        "info": {
            "title": "DEEPaaS models, served by Penstock",
            "version": importlib.metadata.version("penstock"),
            "description": "Metadata, predictions and trainings of the models of this server.",
        },
        "paths": swagger.paths,
        "definitions": swagger.definitions,
    }


def _add_model(swagger: _Document, path: str, description: ModelDescription, *, predict: bool, train: bool) -> None:
    """Describe the endpoints of a model. `path` is that of its metadata."""
    parts = [
        *((description.train_args,) if train else ()),
        *((description.predict_args, description.schema) if predict else ()),
    ]
    if predict and not description.schema:
        swagger.describe_answer("Prediction")
    if train:
        swagger.describe_answer("TrainingList")
    new_names = swagger.merge({name: each for part in parts for name, each in part.get("definitions", {}).items()})
    if train:
        arguments = rename_references(description.train_args.get("parameters", []), new_names)
        swagger.add(path + "train/", "post", "Start a training", "models", parameters=arguments)
        swagger.add(
            path + "train/", "get", "The trainings", "models", responses=swagger.describe_answer("TrainingList")
        )
        one, uuid = path + "train/{uuid}", [_UUID]
        swagger.add(one, "get", "A training", "models", parameters=uuid, responses=swagger.describe_answer("Training"))
        swagger.add(one, "delete", "End a training, or forget it", "models", parameters=uuid)
    if predict:
        arguments = rename_references(description.predict_args.get("parameters", []), new_names)
        name = description.schema.get("name", "")
        success = {"200": {"schema": {"$ref": _REF + new_names.get(name, name)}, "description": "Done"}} if name else {}
        swagger.add(
            path + "predict/", "post", "Make a prediction", "models", parameters=arguments,
            produces=description.predict_args.get("produces", [_JSON]),
            responses=(success or swagger.describe_answer("Prediction")) | swagger.describe_answer("Failure", 400),
        )  # fmt: skip


def rename_references(value: Any, names: Mapping[str, str], to: str = _REF) -> Any:
    """Return JSON with the references to definitions renamed, or with another prefix."""
    if isinstance(value, dict):
        return {
            key: to + names.get(each.removeprefix(_REF), each.removeprefix(_REF))
            if key == "$ref" and isinstance(each, str)
            else rename_references(each, names, to)
            for key, each in value.items()
        }
    return [rename_references(each, names, to) for each in value] if isinstance(value, list) else value


def _names_in(value: Any) -> list[str]:
    """List the definitions to which JSON refers."""
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str):
            return [reference.removeprefix(_REF)]
        return [name for each in value.values() for name in _names_in(each)]
    return [name for each in value for name in _names_in(each)] if isinstance(value, list) else []
