"""Arguments: what a model's methods are called with, read from a request and checked. Source: webargs 5.5 as it reads.

The look-up is our own, by what the fields say; values are marshmallow's to check, whatever version of webargs the
model has imported its fields from. What can be known when the worker opens is made out then: a call looks for its
values and has each field deserialize its own, as Schema.load would, which takes 1.5 to 3 times as long.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .answers import Refusal, json_error
from .requests import ABSENT, Request

PLACES = ("query", "form", "json")
"""Where an argument is looked for that does not say where it stands."""
_NAMED = {
    "querystring": "query", "query": "query", "form": "form", "files": "form", "json": "json", "headers": "headers",
    "cookies": "cookies", "match_info": "path", "path": "path",
}  # fmt: skip
_FIXED = (type(None), bool, int, float, complex, str, bytes)
"""Types of defaults that every call may have the same object of."""


@dataclass(slots=True)
class Argument:
    """One argument. `key` is what the model calls it, `name` the client; `names` are `name`, as `places` spell it.

    `repeated`: it takes all values of its name. `whole`: a list may be its value that is all the JSON there is.
    `known`: its value where none is sent is `default`, which is `missing` if it is left out then.
    """

    key: str
    name: str
    field: Any
    places: tuple[str, ...]
    repeated: bool
    whole: bool
    known: bool = False
    default: Any = None


class Arguments:
    """The arguments of one method, in the order in which they are declared. `fields` are by their names."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        """Take what get_predict_args or get_train_args gives. Raises: what marshmallow does of it."""
        self.fields: dict[str, Any] = {}
        self._arguments: list[Argument] = []
        self._unknown: set[str] = set()
        self._schema: Any = None
        if not declared:
            return
        import marshmallow  # not there if models need none

        self._marshmallow = marshmallow
        schema = marshmallow.Schema.from_dict(dict(declared))()
        # before 3.26, marshmallow gives them in any order
        self.fields = {key: schema.fields[key] for key in declared if key in schema.fields}
        self._arguments = [_argument(key, field, marshmallow) for key, field in self.fields.items()]
        self._unknown = {each.name for each in self._arguments} - {
            field.data_key if field.data_key is not None else key for key, field in schema.load_fields.items()
        }
        names = {each.name for each in self._arguments}
        if len(names) < len(self._arguments) or any(
            "." in (each.field.attribute or each.key) for each in self._arguments
        ):
            self._schema = schema  # rare, and its own business

    def read(self, request: Request, chosen: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Read the arguments of a call. `chosen` are values of arguments that are not sent. Raises: Refusal."""
        if not self._arguments:
            return {}
        marshmallow = self._marshmallow
        missing = marshmallow.missing
        found: dict[str, Any] = {}
        for argument in self._arguments:
            value = _find(argument, request, missing)
            if value is missing and chosen:
                value = chosen.get(argument.key, missing)
            if value is not missing:
                found[argument.name] = value
        try:
            return self._schema.load(found) if self._schema is not None else self._load(found, missing)
        except marshmallow.ValidationError as error:
            raise Refusal(json_error(422, error.messages)) from error

    def _load(self, found: dict[str, Any], missing: Any) -> dict[str, Any]:
        """Do what Schema.load does for a schema without hooks. Raises: ValidationError."""
        errors: dict[str, Any] = {}
        given: dict[str, Any] = {}
        failed = self._marshmallow.ValidationError
        for argument in self._arguments:
            name = argument.name
            if name in self._unknown:
                continue
            value = found.get(name, missing)
            if value is missing and argument.known:
                value = argument.default
            else:
                try:
                    value = argument.field.deserialize(value, name, found)
                except failed as error:
                    errors[name] = error.messages
                    continue
                if argument.field.load_default is value and not isinstance(value, _FIXED):
                    value = copy.deepcopy(value)  # the next call is to have it as it was
            if value is not missing:
                given[argument.field.attribute or argument.key] = value
        for name in found:
            if name in self._unknown:
                errors[name] = ["Unknown field."]
        if errors:
            raise failed(errors)
        return given


def _argument(key: str, field: Any, marshmallow: Any) -> Argument:
    fields, missing = marshmallow.fields, marshmallow.missing
    name = field.data_key or key
    place = field.metadata.get("location")
    places = (_NAMED[place],) if place in _NAMED else PLACES
    # a list that is written in one value, as webargs' DelimitedList, has what divides it
    repeated = isinstance(field, fields.List) and not hasattr(type(field), "delimiter")
    whole = isinstance(field, fields.Nested) and bool(field.many)
    argument = Argument(key, name, field, places, repeated, whole)
    plain = type(field).deserialize is fields.Field.deserialize
    default = field.load_default
    if plain and not field.required and (default is missing or isinstance(default, _FIXED)):
        argument.known, argument.default = True, default
    return argument


def _find(argument: Argument, request: Request, missing: Any) -> Any:
    """Look for an argument, place by place. Returns: its value, or `missing`. Raises: Refusal."""
    name = argument.name
    for place in argument.places:
        if place == "json":
            value = _find_in_json(argument, request.json, missing)
            if value is not missing:
                return value
            continue
        if place == "query":
            values = request.said.query.get(name)
        elif place == "form":
            values = request.form.get(name)
        elif place == "headers":
            values = request.said.headers.get(name.lower())
        elif place == "cookies":
            values = request.said.cookies.get(name)
        else:
            values = None  # of the path, where there is nothing
        if values is not None:
            return list(values) if argument.repeated else values[0]
    return missing


def _find_in_json(argument: Argument, value: Any, missing: Any) -> Any:
    if value is ABSENT:
        return missing
    if argument.whole and isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return missing
    value = value.get(argument.name, missing)
    if argument.repeated and value is not missing and value is not None and not isinstance(value, list):
        return [value]
    return value
