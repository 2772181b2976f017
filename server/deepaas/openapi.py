"""OpenAPI: the document of a server's API as OpenAPI 3.0, derived from the original's. Pure.

It is accurate: predictions are any JSON, trainings are listed in an array, wrong arguments are answered with 422, and
it has Penstock's own URLs for a training's output. Source: OpenAPI 3.0.3; Swagger 2.0.
"""

from __future__ import annotations

from typing import Any

from .swagger import DEFINITIONS, Json, rename_references

_JSON = "application/json"
_PREFIX = "#/components/schemas/"
_PARAMETER_KEYS = ("name", "in", "required", "description", "collectionFormat", "x-nullable")
_TEXT_ANSWER = {"description": "What is wrong", "content": {"text/plain": {"schema": {"type": "string"}}}}
_ARGUMENT_ERRORS = {
    "type": "object", "description": "What is wrong with each argument",
    "additionalProperties": {"type": "array", "items": {"type": "string"}},
}  # fmt: skip
_TRAINING: Json = {
    "type": "object",
    "properties": {
        "date": {"type": "string", "description": "When it started"},
        "args": {"type": "object", "description": "Its arguments", "additionalProperties": True},
        "uuid": {"type": "string"},
        "status": {"type": "string", "enum": ["running", "done", "error", "cancelled"]},
        "message": {"type": "string", "description": "Why it failed"},
        "result": {
            "type": "object",
            "properties": {"output": {}, "finish_date": {"type": "string"}, "duration": {"type": "string"}},
        },
    },
    "required": ["date", "args", "uuid", "status"],
}
_DEFINITIONS: dict[str, Json] = {
    "Training": _TRAINING,
    "TrainingList": {"type": "array", "items": {"$ref": _PREFIX + "Training"}},
    "Prediction": {
        "type": "object",
        "properties": {"status": {"type": "string", "enum": ["OK"]}, "predictions": {}},
        "required": ["status", "predictions"],
    },
}
_TRAINING_PAGES = (
    ("log", "text/plain", "The output of a training"),
    ("progress", _JSON, "The progress of a training"),
    ("page", "text/html", "A page that follows a training"),
)


def document(swagger: Json) -> Json:
    """Make the document from the result of `swagger.document`."""
    schemas = {
        # a model's definition may have one of these names, if ours is not needed
        name: _DEFINITIONS[name] if name in _DEFINITIONS and definition == DEFINITIONS[name] else _schema(definition)
        for name, definition in swagger["definitions"].items()
    }
    paths: Json = {}
    for path, operations in swagger["paths"].items():
        paths[path] = {method: _operation(operation) for method, operation in operations.items()}
        _correct(path, paths)
    return {
        "openapi": "3.0.3",
        "info": swagger["info"],
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _correct(path: str, paths: Json) -> None:
    """Add what the original's document lacks for a path."""
    operations = paths[path]
    if path.endswith("/v2/models/"):
        every = {"type": "array", "items": {"$ref": _PREFIX + "ModelMeta"}}
        content = {_JSON: {"schema": {"type": "object", "properties": {"models": every}}}}
        operations["get"]["responses"]["200"]["content"] = content
    if "post" in operations:
        responses = operations["post"]["responses"]
        responses["400"] = _answer("The body does not match its content type", {})
        responses["422"] = _answer("An argument is invalid", _ARGUMENT_ERRORS)
        responses["501"] = _TEXT_ANSWER
    if path.endswith("/train/"):
        operations["post"]["responses"]["200"] = _answer("It has started", {"$ref": _PREFIX + "Training"})
    if path.endswith("/train/{uuid}"):
        operations["delete"]["responses"]["200"] = _answer("It has ended", {"$ref": _PREFIX + "Training"})
        for operation in operations.values():
            operation["responses"]["404"] = _TEXT_ANSWER
        parameters = operations["get"]["parameters"]
        for name, content_type, summary in _TRAINING_PAGES:
            success = {"description": summary, "content": {content_type: {"schema": {}}}}
            responses = {"200": success, "404": _TEXT_ANSWER}
            operation = {"tags": ["models"], "summary": summary, "parameters": parameters, "responses": responses}
            paths[f"{path}/{name}"] = {"get": operation}


def _answer(description: str, schema: Json) -> Json:
    """Describe an answer of JSON."""
    return {"description": description, "content": {_JSON: {"schema": schema}}}


def _operation(operation: Json) -> Json:
    """Describe one method of a path."""
    parameters, form, body = [], [], None
    for parameter in operation["parameters"]:
        if parameter["in"] == "formData" or (parameter["in"] == "query" and parameter.get("type") == "file"):
            form.append(parameter)
        elif parameter["in"] == "body":
            body = parameter
        else:
            parameters.append(_parameter(parameter))
    content: Json = {}
    if form:
        content["multipart/form-data"] = {"schema": _form(form)}
    if body is not None:
        content[_JSON] = {"schema": _schema(body.get("schema", {}))}
    kinds = operation["produces"]
    responses = {
        status: {
            "description": response.get("description") or "Done",
            **(
                {"content": {kind: _content(kind, response["schema"]) for kind in kinds}}
                if "schema" in response
                else {}
            ),
        }
        for status, response in operation["responses"].items()
    }
    return {
        "tags": operation["tags"],
        "summary": operation["summary"],
        "parameters": parameters,
        **({"requestBody": {"content": content}} if content else {}),
        "responses": responses,
    }


def _content(kind: str, schema: Json) -> Json:
    """Describe the content of an answer by its content type: anything but JSON is the bytes that the model returns."""
    return {"schema": _schema(schema) if kind in (_JSON, "*/*") else {"type": "string", "format": "binary"}}


def _parameter(parameter: Json) -> Json:
    """Describe a parameter outside the body."""
    copied: Json = {name: parameter[name] for name in ("name", "in", "description") if name in parameter}
    required = bool(parameter.get("required")) or parameter["in"] == "path"
    many = {"explode": parameter["collectionFormat"] == "multi"} if "collectionFormat" in parameter else {}
    return {**copied, "required": required, **many, "schema": _schema_of(parameter)}


def _form(parameters: list[Json]) -> Json:
    """Describe the fields of a form."""
    fields = {}
    for parameter in parameters:
        schema = _schema_of(parameter)
        fields[parameter["name"]] = {**schema, "description": parameter["description"]} if (
            "description" in parameter and "$ref" not in schema
        ) else schema  # fmt: skip
    required = [parameter["name"] for parameter in parameters if parameter.get("required")]
    return {"type": "object", "properties": fields, **({"required": required} if required else {})}


def _schema_of(parameter: Json) -> Json:
    """Return the schema of a parameter's value."""
    swagger_schema = {name: value for name, value in parameter.items() if name not in _PARAMETER_KEYS}
    if parameter.get("x-nullable"):
        swagger_schema["x-nullable"] = True
    schema = _schema(swagger_schema)
    if schema.get("type") == "file":
        return {**schema, "type": "string", "format": "binary"}
    return schema


def _schema(schema: Json) -> Json:
    """Convert a schema of Swagger 2.0: the place of definitions, and that a value may be null."""
    moved: Json = _nullable(rename_references(schema, {}, _PREFIX))
    return {"$ref": moved["$ref"]} if "$ref" in moved else moved


def _nullable(value: Any) -> Any:
    if isinstance(value, dict):
        return {"nullable" if key == "x-nullable" else key: _nullable(each) for key, each in value.items()}
    return [_nullable(each) for each in value] if isinstance(value, list) else value
