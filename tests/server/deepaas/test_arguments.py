"""The arguments a model is called with: where they are read from, how they are checked, and errors for invalid ones."""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, ClassVar

import marshmallow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from marshmallow import fields, validate
from webargs import fields as of_webargs

from penstock.server.carrying.messages import read_answer
from penstock.server.deepaas.inside.answers import Refusal
from penstock.server.deepaas.inside.arguments import AcceptArgument, Arguments

from .worker_calls import FORM, parts, request_of

JSON, URLENCODED = "application/json", "application/x-www-form-urlencoded"
Inner = marshmallow.Schema.from_dict({"x": fields.Int(required=True)})


def read(declared: dict[str, Any], **keywords: Any) -> Any:
    """Read the arguments of a request. Returns: the arguments, or the errors that the client receives."""
    value = keywords.pop("value", None)
    if value is not None:
        keywords |= {"body": json.dumps(value).encode(), "content_type": JSON}
    try:
        return Arguments(declared).read(request_of(**keywords))
    except Refusal as refusal:
        status, content_type, _, body = read_answer(refusal.answer)
        assert (status, content_type) == (422, b"application/json")
        return json.loads(body, object_pairs_hook=OrderedDict)


def old(kind: Any, *inner: Any, **keywords: Any) -> Any:
    """Make a field as written for marshmallow 3, with keywords that later versions do not take."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(*inner, **keywords)


def test_arguments_are_in_declaration_order_however_marshmallow_orders_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Backwards(set[str]):
        def __iter__(self) -> Iterator[str]:
            return iter(sorted(super().__iter__(), reverse=True))

    monkeypatch.setattr(marshmallow.Schema, "set_class", Backwards)
    declared = {name: fields.Int(load_default=0) for name in "abc"}
    assert list(read(declared)) == ["a", "b", "c"]
    assert list(read(declared, query="c=x&b=y")) == ["b", "c"]


class TestPlaces:
    DECLARED: ClassVar = {
        "anywhere": fields.Str(), "query": fields.Str(metadata={"location": "query"}),
        "form": fields.Str(metadata={"location": "form"}), "json": fields.Str(metadata={"location": "json"}),
        "X-Named": fields.Str(metadata={"location": "headers"}), "cookie": fields.Str(metadata={"location": "cookies"}),
    }  # fmt: skip

    def test_the_query_takes_precedence_over_form_and_json(self) -> None:
        assert read({"a": fields.Int()}, query="a=1", body=b"a=2", content_type=URLENCODED) == {"a": 1}
        assert read({"a": fields.Int()}, query="a=1", value={"a": 3}) == {"a": 1}
        assert read({"a": fields.Int()}, value={"a": 3}) == {"a": 3}

    @pytest.mark.parametrize(
        ("keywords", "names"),
        [
            ({"query": "{}=1"}, ["anywhere", "query"]),
            ({"body": b"{}=1", "content_type": URLENCODED}, ["anywhere", "form"]),
            ({"value": 1}, ["anywhere", "json"]),
            ({"headers": (("x-named", "1"), ("query", "1"))}, ["X-Named"]),
            ({"headers": (("cookie", "; ".join(f"{name}=1" for name in DECLARED)),)}, ["cookie"]),
        ],
        ids=["query", "form", "json", "headers", "cookies"],
    )
    def test_an_argument_is_read_from_the_location_that_its_field_declares(
        self, keywords: dict[str, Any], names: list[str]
    ) -> None:
        keywords = dict(keywords)
        if "query" in keywords:
            keywords["query"] = "&".join(f"{name}=1" for name in self.DECLARED)
        if "body" in keywords:
            keywords["body"] = "&".join(f"{name}=1" for name in self.DECLARED).encode()
        if "value" in keywords:
            keywords["value"] = dict.fromkeys(self.DECLARED, "1")
        assert read(self.DECLARED, **keywords) == dict.fromkeys(names, "1")

    def test_a_location_may_be_declared_as_for_webargs_fields(self) -> None:
        field = old(of_webargs.Field, missing=None, type="file", location="form")
        assert read({"a": field}, query="a=1") == {"a": None}
        assert read({"a": field}, body=parts(("a", b"text")), content_type=FORM) == {"a": "text"}

    def test_an_unknown_location_means_the_default_locations(self) -> None:
        assert read({"a": fields.Str(metadata={"location": "moon"})}, query="a=1") == {"a": "1"}

    def test_invalid_json_is_an_error_only_if_an_argument_is_missing_from_the_query(self) -> None:
        broken = {"body": b"{bad", "content_type": JSON}
        assert read({"a": fields.Int()}, query="a=1", **broken) == {"a": 1}
        with pytest.raises(Refusal) as refusal:
            Arguments({"a": fields.Int(), "b": fields.Int()}).read(request_of(query="a=x", **broken))
        assert read_answer(refusal.value.answer)[0] == 400

    def test_json_that_is_not_an_object_contains_no_arguments(self) -> None:
        for value in (5, "x", [1], False):
            assert read({"a": fields.Int(load_default=3)}, value=value) == {"a": 3}


class TestValues:
    def test_repeated_values_are_a_list_if_the_field_is_a_list(self) -> None:
        declared = {"list": fields.List(fields.Int()), "one": fields.Int()}
        assert read(declared, query="list=1&list=2&one=1&one=2") == {"list": [1, 2], "one": 1}
        assert read(declared, value={"list": 1, "one": 1}) == {"list": [1], "one": 1}
        assert read(declared, value={"list": None}) == {"list": ["Field may not be null."]}

    def test_a_delimited_list_is_split_by_its_field(self) -> None:
        assert read({"a": of_webargs.DelimitedList(fields.Int())}, query="a=1,2&a=3") == {"a": [1, 2]}

    def test_a_nested_list_may_be_the_whole_json_body(self) -> None:
        declared = {"many": fields.Nested(Inner, many=True), "one": fields.Nested(Inner)}
        assert read(declared, value=[{"x": 1}]) == {"many": [{"x": 1}]}
        assert read(declared, value={"many": [{"x": 1}], "one": {"x": 2}}) == {"many": [{"x": 1}], "one": {"x": 2}}

    def test_a_nested_schema_may_be_a_dict_as_in_webargs(self) -> None:
        declared = {"a": of_webargs.Nested({"x": fields.Int(required=True)})}
        assert read(declared, value={"a": {"x": "5"}}) == {"a": {"x": 5}}
        assert read(declared, value={"a": {}}) == {"a": {"x": ["Missing data for required field."]}}

    def test_arguments_have_the_clients_name_in_requests_and_the_models_key_in_calls(self) -> None:
        declared = {"keyed": fields.Int(data_key="key-of-it"), "b": fields.Int(attribute="c")}
        assert read(declared, query="key-of-it=1&keyed=2&b=3") == {"keyed": 1, "c": 3}
        assert read(declared, query="key-of-it=x") == {"key-of-it": ["Not a valid integer."]}

    def test_enum_metadata_is_not_checked(self) -> None:
        assert read({"a": old(fields.Str, missing="foo", enum=["b"])}) == {"a": "foo"}
        assert read({"a": old(fields.Str, missing="foo", enum=["b"])}, query="a=c") == {"a": "c"}

    def test_unknown_arguments_are_ignored_and_missing_ones_left_out(self) -> None:
        assert read({"a": fields.Int()}, query="b=1", value={"c": 1}) == {}

    def test_a_dump_only_field_is_an_unknown_argument(self) -> None:
        assert read({"a": fields.Int(dump_only=True)}, query="a=1") == {"a": ["Unknown field."]}

    def test_names_with_dots_are_nested_as_in_marshmallow(self) -> None:
        assert read({"a.b": fields.Int(), "c": fields.Int()}, query="a.b=1&c=2") == {"a": {"b": 1}, "c": 2}

    def test_a_model_may_have_no_arguments(self) -> None:
        assert read({}, query="a=1", body=b"{bad", content_type=JSON) == {}


class TestDefaults:
    def test_defaults_may_be_values_or_callables(self) -> None:
        declared = {
            "old": old(fields.Int, missing=3), "new": fields.Int(load_default=None),
            "called": fields.Int(load_default=lambda: 5),
            "constant": fields.Constant(7),
        }  # fmt: skip
        assert read(declared) == {"old": 3, "new": None, "called": 5, "constant": 7}

    def test_a_mutable_default_is_new_for_each_call(self) -> None:
        arguments = Arguments({"a": fields.List(fields.Int(), load_default=[1])})
        arguments.read(request_of())["a"].append(2)
        assert arguments.read(request_of()) == {"a": [1]}

    def test_the_default_of_a_required_argument_is_ignored(self) -> None:
        field = fields.Int(required=True)
        field.load_default = 5
        assert read({"a": field}) == {"a": ["Missing data for required field."]}


class TestErrors:
    def test_errors_are_in_declaration_order(self) -> None:
        declared = {
            "z": fields.Int(),
            "y": fields.Str(validate=validate.OneOf(["a", "b"])),
            "x": fields.Int(required=True),
        }
        found = read(declared, query="y=c&z=q")
        assert list(found.items()) == [
            ("z", ["Not a valid integer."]), ("y", ["Must be one of: a, b."]),
            ("x", ["Missing data for required field."]),
        ]  # fmt: skip

    def test_exceptions_other_than_validation_errors_propagate(self) -> None:
        with pytest.raises(ZeroDivisionError):
            read({"a": fields.Function(deserialize=lambda value: 1 // 0)}, query="a=1")


FIELDS: dict[str, Any] = {
    "int": fields.Int(), "needed": fields.Float(required=True), "text": fields.Str(validate=validate.Length(max=2)),
    "list": fields.List(fields.Int(), load_default=[1]), "bool": fields.Bool(load_default=False), "date": fields.Date(),
    "nested": fields.Nested(Inner), "many": fields.Nested(Inner, many=True), "none": fields.Int(allow_none=True),
    "dict": fields.Dict(values=fields.Int()), "keyed": fields.Int(data_key="key"),
    "default": fields.Int(load_default=3),
    "called": fields.Int(load_default=lambda: 4), "constant": fields.Constant(7), "raw": fields.Raw(),
}  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.just("2020-01-02"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "key", "other"]), VALUES))
def test_arguments_are_read_as_marshmallow_loads_them(value: dict[str, Any]) -> None:
    expected: Any
    known = {(field.data_key or name): (name, field) for name, field in FIELDS.items()}
    sent = {}
    for name in known:  # in the order of declaration
        if name in value:
            of_list = isinstance(known[name][1], fields.List)
            single = value[name]
            sent[name] = [single] if of_list and single is not None and not isinstance(single, list) else single
    try:
        expected = marshmallow.Schema.from_dict(FIELDS)().load(sent)
    except marshmallow.ValidationError as error:
        expected = json.loads(json.dumps(error.messages))
    found = read(FIELDS, value=value)
    assert found == expected
    if not isinstance(vars(marshmallow.Schema)["set_class"], property):  # before 3.26, marshmallow has no order
        assert list(found) == list(expected)


class TestAccept:
    CHOICES: ClassVar = ["application/zip", "image/png", "application/json"]

    def declared(self, **keywords: Any) -> dict[str, Any]:
        return {"accept": fields.Str(validate=validate.OneOf(self.CHOICES), **keywords)}

    def read(self, declared: dict[str, Any], *, by_header: bool = False, **keywords: Any) -> Any:
        accepting, request = AcceptArgument(declared, by_header=by_header), request_of(**keywords)
        try:
            return Arguments(accepting.arguments).read(request, accepting.from_header(request.line.headers))
        except Refusal as refusal:
            return json.loads(read_answer(refusal.answer)[3])

    def test_accept_defaults_to_the_users_default_or_the_first_choice(self) -> None:
        assert self.read(self.declared()) == {"accept": "application/zip"}
        assert self.read(self.declared(load_default="image/png")) == {"accept": "image/png"}
        assert self.read(self.declared(load_default="text/html")) == {"accept": "application/zip"}
        assert self.read(self.declared(load_default=None)) == {"accept": "application/zip"}

    def test_accept_may_be_any_type_but_the_error_lists_only_the_choices(self) -> None:
        assert self.read(self.declared(), query="accept=*/*") == {"accept": "*/*"}
        expected = {"accept": ["Must be one of: application/zip, image/png, application/json."]}
        assert self.read(self.declared(), query="accept=text/html") == expected

    def test_reading_accept_does_not_change_the_users_choices_and_field(self) -> None:
        declared = self.declared()
        field, check = declared["accept"], declared["accept"].validate
        self.read(declared)
        assert declared["accept"] is field
        assert check.choices is self.CHOICES
        assert "*/*" not in self.CHOICES
        assert field.load_default is marshmallow.missing

    def test_accept_may_be_declared_without_choices(self) -> None:
        assert self.read({"accept": fields.Str()}, query="accept=x") == {"accept": "x"}
        assert AcceptArgument({"accept": fields.Str()}, by_header=True).from_header({"accept": ["x"]}) is None

    def test_accept_read_from_the_headers_is_compared_as_a_whole(self) -> None:
        declared = self.declared(metadata={"location": "headers"})
        assert self.read(declared, headers=(("accept", "image/png"),)) == {"accept": "image/png"}
        assert "Must be" in str(self.read(declared, headers=(("accept", "image/png;q=1"),)))

    def test_the_accept_header_is_ignored_unless_configured(self) -> None:
        assert self.read(self.declared(), headers=(("accept", "image/png"),)) == {"accept": "application/zip"}

    @pytest.mark.parametrize(
        ("header", "chosen"),
        [
            ("image/png", "image/png"), ("IMAGE/PNG;q=0.5", "image/png"), ("text/html, image/png, */*", "image/png"),
            ("image/png, application/json", "application/zip"), ("*/*", "application/zip"),
            ("image/*", "application/zip"),
            ("image/png;q=0, application/json", "application/json"), ("image/png; q=0.0", "application/zip"),
            ("", "application/zip"), (",;,=;q", "application/zip"), ("image/png;q=", "image/png"),
        ],
    )  # fmt: skip
    def test_accept_is_taken_from_the_header_if_it_names_exactly_one_choice(self, header: str, chosen: str) -> None:
        assert self.read(self.declared(), by_header=True, headers=(("accept", header),)) == {"accept": chosen}

    def test_an_accept_argument_takes_precedence_over_the_header(self) -> None:
        keywords = {"query": "accept=application/json", "headers": (("accept", "image/png"),)}
        assert self.read(self.declared(), by_header=True, **keywords) == {"accept": "application/json"}

    @given(st.text())
    def test_any_accept_header_selects_one_of_the_choices_or_none(self, header: str) -> None:
        accepting = AcceptArgument(self.declared(), by_header=True)
        assert accepting.from_header({"accept": [header]}) in (None, *({"accept": each} for each in self.CHOICES))


def test_a_custom_deserialize_method_is_called_for_missing_arguments() -> None:
    class Counted(fields.Int):
        def deserialize(self, value: Any, attr: Any = None, data: Any = None, **more: Any) -> Any:
            return 7 if value is marshmallow.missing else super().deserialize(value, attr, data, **more)

    assert read({"a": Counted(load_default=1)}) == {"a": 7}
    assert read({"a": Counted(load_default=1)}, query="a=2") == {"a": 2}
