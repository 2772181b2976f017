"""Describing: a model's arguments and answers in the form of Swagger 2.0, derived from marshmallow's fields.

The output for each field follows swagger.json of deepaas 2.6.0 (apispec 3.3); later versions of apispec differ. What
cannot be described is left out, such as a default that is not JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_TYPES: dict[str, tuple[str, str]] = {
    "Integer": ("integer", "int32"), "Float": ("number", "float"), "Decimal": ("number", ""), "Number": ("number", ""),
    "UUID": ("string", "uuid"), "DateTime": ("string", "date-time"), "Date": ("string", "date"), "Time": ("string", ""),
    "Email": ("string", "email"), "Url": ("string", "url"), "URL": ("string", "url"), "String": ("string", ""),
    "Boolean": ("boolean", ""), "Dict": ("object", ""), "List": ("array", ""),
}  # fmt: skip
"""The type and format of marshmallow's fields, and of their subclasses; others have none."""
_METADATA_KEYS = {
    "format", "title", "description", "default", "multipleOf", "maximum", "exclusiveMaximum", "minimum",
    "exclusiveMinimum", "maxLength", "minLength", "pattern", "maxItems", "minItems", "uniqueItems",
    "maxProperties", "minProperties", "required", "enum", "type", "items", "allOf", "properties",
    "additionalProperties", "readOnly", "xml", "externalDocs", "example",
}  # fmt: skip
"""The keys of a field's metadata that are written: they override everything else, as does `x_...`."""
_LOCATIONS = {
    "query": "query", "querystring": "query", "form": "formData", "files": "formData", "headers": "header",
    "cookies": "cookie", "json": "body", "match_info": "path",
}  # fmt: skip
_MODIFIERS = ("only", "exclude", "load_only", "dump_only", "partial")
_REFERENCE = "#/definitions/"


class Describer:
    """Describes one model. A nested schema has one definition, for all references to it."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._names: dict[Any, str] = {}

    def arguments(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Describe arguments. Returns: {"parameters": [...], "definitions": {name: ...}}."""
        parameters: list[dict[str, Any]] = []
        body: dict[str, Any] = {}
        for key, field in fields.items():
            if field.dump_only:
                continue
            name, location = field.data_key or key, _LOCATIONS.get(field.metadata.get("location"), "query")
            if location != "body":
                many = {"collectionFormat": "multi"} if _is_a(field, "List") else {}
                required = field.required or location == "path"
                parameters.append(
                    {"in": location, "name": name, "required": required, **many, **self.describe_field(field)}
                )
                continue
            if not body:
                body = {"type": "object", "properties": {}}
                parameters.append({"in": "body", "name": "body", "required": False, "schema": body})
            body["properties"][name] = self.describe_field(field)
            if field.required:
                body.setdefault("required", []).append(name)
        return {"parameters": parameters, "definitions": self._referenced(parameters)}

    def schema(self, schema: Any) -> dict[str, Any]:
        """Describe the Schema of answers. Returns: {"name": its name, "definitions": {name: ...}}."""
        name = self._define(schema)
        return {
            "name": name,
            "definitions": {name: self._definitions[name], **self._referenced(self._definitions[name])},
        }

    def describe_field(self, field: Any) -> dict[str, Any]:
        """Describe a field."""
        description: dict[str, Any] = {**_type_of(field), **_default_of(field), **_constraints_of(field)}
        if field.dump_only:
            description["readOnly"] = True
        if field.allow_none:
            description["x-nullable"] = True
        for key, value in field.metadata.items():
            key = key.replace("_", "-") if isinstance(key, str) and key.startswith("x_") else key
            if isinstance(key, str) and (key in _METADATA_KEYS or key.startswith("x-")) and _is_json(value):
                description[key] = value
        if _is_a(field, "Nested"):
            reference: dict[str, Any] = {"$ref": _REFERENCE + self._define(field.schema)}
            if field.schema.many or field.many:
                description.update(type="array", items=reference)
            else:
                description.update({"allOf": [reference]} if description else reference)
        elif _is_a(field, "List"):
            description["items"] = self.describe_field(field.inner)
        elif _is_a(field, "Dict") and field.value_field:
            description["additionalProperties"] = self.describe_field(field.value_field)
        return description

    def _define(self, schema: Any) -> str:
        """Define a Schema, unless it is already. Returns: its name."""
        key = (type(schema), *(_hashable(getattr(schema, name, None)) for name in _MODIFIERS))
        if key in self._names:
            return self._names[key]
        base = type(schema).__name__
        base = ("Partial-" if schema.partial else "") + (base.removesuffix("Schema") or base)
        name, number = base, 0
        while name in self._definitions:
            name, number = f"{base}{number + 1}", number + 1
        self._names[key] = name
        definition: dict[str, Any] = {"type": "object", "properties": {}}
        self._definitions[name] = definition
        for own, field in _ordered_fields(schema).items():
            definition["properties"][field.data_key or own] = self.describe_field(field)
            if field.required and not schema.partial:
                definition.setdefault("required", []).append(field.data_key or own)
        if "required" in definition:
            definition["required"].sort()
        for field_name in ("title", "description"):
            if hasattr(type(schema).Meta, field_name):
                definition[field_name] = getattr(type(schema).Meta, field_name)
        return name

    def _referenced(self, described: Any) -> dict[str, Any]:
        """Return the definitions that a description refers to, directly or indirectly."""
        found: dict[str, Any] = {}
        pending = [described]
        while pending:
            for name in re.findall(f'"{_REFERENCE}([^"]*)"', json.dumps(pending.pop())):
                if name in self._definitions and name not in found:
                    found[name] = self._definitions[name]
                    pending.append(found[name])
        return found


def _ordered_fields(schema: Any) -> dict[str, Any]:
    """Return a Schema's fields, in order. Before 3.26, marshmallow has them in any order: in that of declaration."""
    if schema.set_class is not set:
        return dict(schema.fields)
    return {name: schema.fields[name] for name in [*schema.declared_fields, *schema.fields] if name in schema.fields}


def _is_a(field: Any, name: str) -> bool:
    """Return whether a field is of a class of marshmallow's, or of a subclass."""
    return any(each.__name__ == name and each.__module__ == "marshmallow.fields" for each in type(field).__mro__)


def _type_of(field: Any) -> dict[str, str]:
    for each in type(field).__mro__:
        if each.__module__ == "marshmallow.fields" and each.__name__ in _TYPES:
            kind, form = _TYPES[each.__name__]
            return {"type": kind, "format": form} if form else {"type": kind}
    return {}


def _default_of(field: Any) -> dict[str, Any]:
    if "doc_default" in field.metadata:
        default = field.metadata["doc_default"]
    else:
        import marshmallow

        default = field.load_default
        if default is marshmallow.missing or callable(default):
            return {}
        try:
            default = field._serialize(default, None, None)  # noqa: SLF001 - `serialize` looks it up in an object
        except Exception:  # noqa: BLE001 - it is no default of that kind
            return {}
    return {"default": default} if _is_json(default) else {}


def _constraints_of(field: Any) -> dict[str, Any]:
    """Describe a field's validators, as far as the format allows."""
    constraints: dict[str, Any] = {}
    items = "Items" if _is_a(field, "List") or _is_a(field, "Nested") else "Length"
    choices: list[list[Any]] = []
    for check in field.validators:
        if hasattr(check, "choices"):
            choices.append(list(check.choices))
        elif hasattr(check, "comparable"):
            constraints.setdefault("enum", []).append(check.comparable)
        elif hasattr(check, "min") and hasattr(check, "max"):
            of_length = hasattr(check, "equal")
            low, high = (f"min{items}", f"max{items}") if of_length else ("minimum", "maximum")
            equal = check.equal if of_length else None
            constraints |= {low: check.min} if check.min is not None else {}
            constraints |= {high: check.max} if check.max is not None else {}
            constraints |= {low: equal, high: equal} if equal is not None else {}
        elif isinstance(getattr(check, "regex", None), re.Pattern):
            constraints.setdefault("pattern", check.regex.pattern)
    if choices and "enum" not in constraints:
        constraints["enum"] = [
            choice for choice in dict.fromkeys(choices[0]) if all(choice in each for each in choices)
        ]
    return {name: value for name, value in constraints.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _hashable(value: Any) -> Any:
    return frozenset(value) if isinstance(value, Iterable) and not isinstance(value, str) else value
