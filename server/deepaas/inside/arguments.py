"""Arguments: those of a model's methods, read from a request and validated; and the one named `accept`.

Penstock looks up arguments itself, by the fields' declarations; marshmallow validates values, whatever version of
webargs the model imported its fields from. As much as possible is computed when the worker opens: a call finds its
values and has each field deserialize its own, where Schema.load takes 1.5 to 3 times as long.
Source: webargs 5.5, by observed behavior; deepaas 2.6.0, api/v2/predict.py, for `accept`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .answers import Refusal, json_error
from .requests import ABSENT, Request

LOCATIONS = ("query", "form", "json")
"""The places searched for an argument that declares none."""
_LOCATION_NAMES = {
    "querystring": "query", "query": "query", "form": "form", "files": "form", "json": "json", "headers": "headers",
    "cookies": "cookies", "match_info": "path", "path": "path",
}  # fmt: skip
ANY = "*/*"
JSON_TYPES = ("application/json", ANY)
_IMMUTABLE_TYPES = (type(None), bool, int, float, complex, str, bytes)
"""Types of defaults that calls may share as one object."""


@dataclass(slots=True)
class Argument:
    """One argument. `key` is its name in the model, `name` the client's.

    - `locations` are searched for it in order.
    - `repeated`: it takes all values of its name.
    - `accepts_list`: a list that is the entire JSON may be its value.
    - `has_default`: if it is not sent, its value is `default`; it is left out if that is `missing`.
    """

    key: str
    name: str
    field: Any
    locations: tuple[str, ...]
    repeated: bool
    accepts_list: bool
    has_default: bool = False
    default: Any = None


class Arguments:
    """The arguments of one method, in the order of declaration. `fields` has them by name."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Take the result of get_predict_args or get_train_args. Raises: marshmallow's exceptions."""
        self.fields: dict[str, Any] = {}
        self._arguments: list[Argument] = []
        self._unknown: set[str] = set()
        self._schema: Any = None
        if not declared:
            return
        import marshmallow  # may be absent if the models do not use it

        self._marshmallow = marshmallow
        schema = marshmallow.Schema.from_dict(dict(declared))()
        # before 3.26, marshmallow returns them in any order
        self.fields = {key: schema.fields[key] for key in declared if key in schema.fields}
        self._arguments = [_argument(key, field, marshmallow) for key, field in self.fields.items()]
        self._unknown = {each.name for each in self._arguments} - {
            field.data_key if field.data_key is not None else key for key, field in schema.load_fields.items()
        }
        names = {each.name for each in self._arguments}
        if len(names) < len(self._arguments) or any(
            "." in (each.field.attribute or each.key) for each in self._arguments
        ):
            self._schema = schema  # rare, and left to marshmallow

    def read(self, request: Request, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Read the arguments of a call. `extra` has values for arguments that are not sent. Raises: Refusal."""
        if not self._arguments:
            return {}
        marshmallow = self._marshmallow
        missing = marshmallow.missing
        found: dict[str, Any] = {}
        for argument in self._arguments:
            value = _find(argument, request, missing)
            if value is missing and extra:
                value = extra.get(argument.key, missing)
            if value is not missing:
                found[argument.name] = value
        try:
            return self._schema.load(found) if self._schema is not None else self._load(found, missing)
        except marshmallow.ValidationError as error:
            raise Refusal(json_error(422, error.messages)) from error

    def _load(self, found: dict[str, Any], missing: Any) -> dict[str, Any]:
        """Do the same as Schema.load for a schema without hooks. Raises: ValidationError."""
        errors: dict[str, Any] = {}
        given: dict[str, Any] = {}
        invalid = self._marshmallow.ValidationError
        for argument in self._arguments:
            name = argument.name
            if name in self._unknown:
                continue
            value = found.get(name, missing)
            if value is missing and argument.has_default:
                value = argument.default
            else:
                try:
                    value = argument.field.deserialize(value, name, found)
                except invalid as error:
                    errors[name] = error.messages
                    continue
                if argument.field.load_default is value and not isinstance(value, _IMMUTABLE_TYPES):
                    value = copy.deepcopy(value)  # so that the next call gets it unchanged
            if value is not missing:
                given[argument.field.attribute or argument.key] = value
        for name in found:
            if name in self._unknown:
                errors[name] = ["Unknown field."]
        if errors:
            raise invalid(errors)
        return given


def _argument(key: str, field: Any, marshmallow: Any) -> Argument:
    fields, missing = marshmallow.fields, marshmallow.missing
    name = field.data_key or key
    location = field.metadata.get("location")
    locations = (_LOCATION_NAMES[location],) if location in _LOCATION_NAMES else LOCATIONS
    # a list within one value, like webargs' DelimitedList, has a delimiter
    repeated = isinstance(field, fields.List) and not hasattr(type(field), "delimiter")
    accepts_list = isinstance(field, fields.Nested) and bool(field.many)
    argument = Argument(key, name, field, locations, repeated, accepts_list)
    is_usual = type(field).deserialize is fields.Field.deserialize
    default = field.load_default
    if is_usual and not field.required and (default is missing or isinstance(default, _IMMUTABLE_TYPES)):
        argument.has_default, argument.default = True, default
    return argument


def _find(argument: Argument, request: Request, missing: Any) -> Any:
    """Search for an argument, location by location. Returns: its value, or `missing`. Raises: Refusal."""
    name = argument.name
    for location in argument.locations:
        if location == "json":
            value = _find_in_json(argument, request.json, missing)
            if value is not missing:
                return value
            continue
        if location == "query":
            values = request.line.query.get(name)
        elif location == "form":
            values = request.form.get(name)
        elif location == "headers":
            values = request.line.headers.get(name.lower())
        elif location == "cookies":
            values = request.line.cookies.get(name)
        else:
            values = None  # of the path, which has no arguments
        if values is not None:
            return list(values) if argument.repeated else values[0]
    return missing


def _find_in_json(argument: Argument, value: Any, missing: Any) -> Any:
    if value is ABSENT:
        return missing
    if argument.accepts_list and isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return missing
    value = value.get(argument.name, missing)
    if argument.repeated and value is not missing and value is not None and not isinstance(value, list):
        return [value]
    return value


class AcceptArgument:
    """The argument `accept` of one model, with which a client chooses the content type of the answer.

    Without it, every answer is JSON. It is read like other arguments: the header Accept counts only if the field
    declares that location, or if the setting allows it.
    `arguments` are the model's, with the field adapted: */* is accepted too, and the default is the field's if it is
    one of the choices, otherwise the first choice. The model's own field and its list of choices remain unchanged.
    """

    def __init__(self, declared: dict[str, Any], *, by_header: bool) -> None:
        self.choices: list[str] = []
        self.arguments = declared
        self._by_header = by_header
        field = declared.get("accept")
        if not field:
            return
        field = copy.copy(field)
        field.validators = [self._widen(each) for each in field.validators]
        if self.choices and field.load_default not in self.choices:
            field.load_default = self.choices[0]
        self.arguments = {**declared, "accept": field}

    def _widen(self, validator: Any) -> Any:
        """Return a validator that also accepts any type; its error text still lists the original choices."""
        if not hasattr(validator, "choices"):
            return validator
        widened = copy.copy(validator)
        widened.choices = [*validator.choices, ANY]
        self.choices = self.choices or widened.choices
        return widened

    def from_header(self, headers: dict[str, list[Any]]) -> dict[str, Any] | None:
        """Return the type that the header Accept chooses, if the setting allows it and exactly one type is named."""
        if not self._by_header or not self.choices or "accept" not in headers:
            return None
        media_types = [each.split(";") for each in ",".join(headers["accept"]).split(",")]
        types = {kind.strip().lower() for kind, *more in media_types if not any(_excludes(each) for each in more)}
        found = [choice for choice in self.choices if choice != ANY and choice.lower() in types]
        return {"accept": found[0]} if len(found) == 1 else None


def _excludes(parameter: str) -> bool:
    """Return whether a parameter of a media type rejects it."""
    name, _, value = parameter.partition("=")
    return name.strip().lower() == "q" and value.strip(" 0.") == "" and "0" in value
