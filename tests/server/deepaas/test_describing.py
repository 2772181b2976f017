"""How a model's arguments and answers are described in Swagger 2.0."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import marshmallow
import pytest
from marshmallow import fields, validate

from penstock.server.deepaas.inside.describing import Describer


class Inner(marshmallow.Schema):
    """A nested schema."""

    x = fields.Int(required=True)
    y = fields.Str(load_default="why")


class TreeSchema(marshmallow.Schema):
    """A schema that contains itself."""

    class Meta:
        title = "A tree"

    leaves = fields.List(fields.Nested("TreeSchema"))


def bound(declared: dict[str, Any]) -> Any:
    """Bind fields, as Arguments does."""
    fields = marshmallow.Schema.from_dict(declared)().fields
    return {name: fields[name] for name in declared}


def parameter(field: Any) -> dict[str, Any]:
    """Describe one argument."""
    (found,) = Describer().arguments(bound({"a": field}))["parameters"]
    assert (found.pop("name"), found.pop("required")) == ("a", False)
    return dict(found)


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (fields.Str(), {"type": "string"}), (fields.Int(), {"type": "integer", "format": "int32"}),
        (fields.Float(), {"type": "number", "format": "float"}), (fields.Decimal(), {"type": "number"}),
        (fields.Bool(), {"type": "boolean"}), (fields.UUID(), {"type": "string", "format": "uuid"}),
        (fields.AwareDateTime(), {"type": "string", "format": "date-time"}), (fields.Raw(), {}),
        (fields.Date(), {"type": "string", "format": "date"}), (fields.Time(), {"type": "string"}),
        (fields.Url(), {"type": "string", "format": "url"}), (fields.Email(), {"type": "string", "format": "email"}),
        (fields.TimeDelta(), {}), (fields.Tuple((fields.Str(),)), {}),
        (fields.Dict(values=fields.Bool()), {"type": "object", "additionalProperties": {"type": "boolean"}}),
        (
            fields.List(fields.List(fields.Bool())),
            {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}}, "collectionFormat": "multi"},
        ),
        (fields.Nested(Inner), {"$ref": "#/definitions/Inner"}),
        (fields.Nested(Inner, many=True), {"type": "array", "items": {"$ref": "#/definitions/Inner"}}),
        (fields.Nested(Inner, allow_none=True), {"allOf": [{"$ref": "#/definitions/Inner"}], "x-nullable": True}),
        (fields.Raw(load_default=None), {"default": None, "x-nullable": True}), (fields.Constant(7), {"default": 7}),
        (fields.Raw(load_default=lambda: 5), {}), (fields.Raw(metadata={"doc_default": 5}), {"default": 5}),
        (fields.Raw(load_default={1}), {}), (fields.Raw(metadata={"description": "d", "other": 1, "x_y": 2}),
                                              {"description": "d", "x-y": 2}),
        (fields.Raw(metadata={"enum": {1}, "items": print}), {}),
        (fields.Raw(metadata={"type": "file"}), {"type": "file"}),
        (fields.Raw(validate=validate.OneOf(["a", "b", "a"])), {"enum": ["a", "b"]}),
        (fields.Raw(validate=[validate.OneOf([1, 2, 3]), validate.OneOf([3, 2])]), {"enum": [2, 3]}),
        (fields.Raw(validate=validate.Equal("me")), {"enum": ["me"]}),
        (fields.Raw(validate=validate.Range(min=1, max=9)), {"minimum": 1, "maximum": 9}),
        (fields.Raw(validate=validate.Length(min=1, max=9)), {"minLength": 1, "maxLength": 9}),
        (fields.Raw(validate=validate.Length(equal=3)), {"minLength": 3, "maxLength": 3}),
        (fields.Raw(validate=validate.Regexp("^a$")), {"pattern": "^a$"}),
        (fields.Raw(validate=lambda value: True), {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, fields.Field) else "",
)  # fmt: skip
def test_a_field_is_described_as_by_the_original(field: Any, expected: dict[str, Any]) -> None:
    assert parameter(field) == {"in": "query", **expected}


def test_a_length_validator_of_a_list_limits_its_items() -> None:
    found = parameter(fields.List(fields.Raw(), validate=validate.Length(min=1)))
    assert (found["minItems"], "minLength" in found) == (1, False)


def test_a_default_that_the_field_cannot_serialize_is_left_out() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "default" not in parameter(fields.Int(load_default="five"))


@pytest.mark.parametrize(
    ("place", "written"),
    [
        ("query", "query"),
        ("form", "formData"),
        ("headers", "header"),
        ("cookies", "cookie"),
        ("path", "query"),
        ("moon", "query"),
    ],
)
def test_a_location_is_translated_to_swaggers_terms(place: str, written: str) -> None:
    assert parameter(fields.Raw(metadata={"location": place}))["in"] == written


def test_an_argument_of_the_path_is_required() -> None:
    declared = {"a": fields.Raw(metadata={"location": "match_info"})}
    assert Describer().arguments(bound(declared))["parameters"] == [{"in": "path", "name": "a", "required": True}]


def test_arguments_in_json_form_one_body_parameter() -> None:
    in_json = {"location": "json"}
    declared = {"a": fields.Raw(metadata=in_json), "b": fields.Raw(), "c": fields.Bool(required=True, metadata=in_json)}
    body, other = Describer().arguments(bound(declared))["parameters"]
    schema = {"type": "object", "properties": {"a": {}, "c": {"type": "boolean"}}, "required": ["c"]}
    assert body == {"in": "body", "name": "body", "required": False, "schema": schema}
    assert other["name"] == "b"


def test_arguments_have_the_names_that_clients_use() -> None:
    declared = {"a": fields.Raw(data_key="b", required=True), "c": fields.Raw(dump_only=True)}
    assert Describer().arguments(bound(declared))["parameters"] == [{"in": "query", "name": "b", "required": True}]


def test_nested_schemas_are_defined_once_and_differing_ones_are_numbered() -> None:
    declared = {
        "a": fields.Nested(Inner), "b": fields.List(fields.Nested(Inner)), "c": fields.Nested(Inner, only=("x",)),
        "d": fields.Nested({"e": fields.Nested({"f": fields.Bool()})}),
    }  # fmt: skip
    found = Describer().arguments(bound(declared))["definitions"]
    assert sorted(found) == ["Generated", "Generated1", "Inner", "Inner1"]
    assert found["Inner"] == {
        "type": "object", "required": ["x"],
        "properties": {"x": {"type": "integer", "format": "int32"}, "y": {"type": "string", "default": "why"}},
    }  # fmt: skip
    assert found["Generated"]["properties"]["e"] == {"$ref": "#/definitions/Generated1"}


def test_fields_of_a_schema_are_in_the_order_of_declaration_with_any_marshmallow() -> None:
    class Unordered(marshmallow.Schema):
        set_class: Any = set  # as before marshmallow 3.26

    names = [f"a{at}" for at in range(20)]
    schema = Unordered.from_dict({name: fields.Bool() for name in names})(exclude=["a7"])
    (definition,) = Describer().schema(schema)["definitions"].values()
    assert list(definition["properties"]) == [name for name in names if name != "a7"]


def test_a_schema_may_contain_itself() -> None:
    found = Describer().schema(TreeSchema())
    leaves = {"type": "array", "items": {"$ref": "#/definitions/Tree"}}
    assert found == {
        "name": "Tree",
        "definitions": {"Tree": {"type": "object", "properties": {"leaves": leaves}, "title": "A tree"}},
    }


def test_definitions_are_shared_among_all_descriptions_of_a_model() -> None:
    describer = Describer()
    first = describer.arguments(bound({"a": fields.Nested(Inner)}))
    second = describer.arguments(bound({"b": fields.Nested(Inner), "c": fields.Nested(Inner, only=("x",))}))
    assert list(first["definitions"]) == ["Inner"]
    assert sorted(second["definitions"]) == ["Inner", "Inner1"]


def test_every_description_can_be_written_as_json() -> None:
    declared = {
        "a": fields.Float(load_default=math.inf, allow_nan=True),
        "b": fields.Raw(metadata={"example": object()}),
    }
    json.dumps(Describer().arguments(bound(declared)))
