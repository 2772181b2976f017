"""Every kind of field; what was sent is given back as Python would write it."""

import enum

from marshmallow import Schema, validate
from marshmallow import fields as plain
from webargs import fields


class Colour(enum.Enum):
    red = 1
    blue = 2


class Inner(Schema):
    x = plain.Int(required=True)
    y = plain.Str(load_default="why")


class Strict(Schema):
    x = plain.Int(required=True)

    class Meta:
        unknown = "raise"


def _odd(value):
    return value % 2 == 1


def _named(value):
    if value != "me":
        raise validate.ValidationError("Not me.")


def get_predict_args():
    return {
        "str": fields.Str(),
        "string-null": fields.String(allow_none=True),
        "uuid": fields.UUID(),
        "int": fields.Int(),
        "int-strict": fields.Int(strict=True),
        "number": fields.Number(),
        "float": fields.Float(),
        "float-nan": fields.Float(allow_nan=True),
        "decimal": fields.Decimal(),
        "decimal-places": fields.Decimal(places=2),
        "bool": fields.Bool(),
        "bool-own": fields.Bool(truthy={"aye"}, falsy={"nay"}),
        "datetime": fields.DateTime(),
        "datetime-rfc": fields.DateTime(format="rfc"),
        "datetime-stamp": fields.DateTime(format="timestamp"),
        "datetime-format": fields.DateTime(format="%d/%m/%Y"),
        "naive": fields.NaiveDateTime(),
        "aware": fields.AwareDateTime(),
        "time": fields.Time(),
        "date": fields.Date(),
        "date-format": fields.Date(format="%d.%m.%Y"),
        "timedelta": fields.TimeDelta(),
        "timedelta-minutes": fields.TimeDelta(precision="minutes"),
        "url": fields.Url(),
        "url-relative": fields.URL(relative=True),
        "url-schemes": fields.URL(schemes={"ftp"}),
        "url-loose": fields.URL(require_tld=False),
        "email": fields.Email(),
        "ip": fields.IP(),
        "ipv4": fields.IPv4(),
        "ipv6": fields.IPv6(),
        "ip-interface": fields.IPInterface(),
        "enum": fields.Enum(Colour),
        "enum-value": fields.Enum(Colour, by_value=True),
        "enum-field": fields.Enum(Colour, by_value=plain.Int),
        "raw": fields.Raw(),
        "field": fields.Field(),
        "dict": fields.Dict(),
        "dict-typed": fields.Dict(keys=fields.Str(), values=fields.Int()),
        "mapping": fields.Mapping(),
        "list": fields.List(fields.Int()),
        "list-str": fields.List(fields.Str(validate=validate.Length(min=2))),
        "list-nested": fields.List(fields.Nested(Inner)),
        "list-list": fields.List(fields.List(fields.Int())),
        "tuple": fields.Tuple((fields.Str(), fields.Int())),
        "delimited": fields.DelimitedList(fields.Int()),
        "delimited-bar": fields.DelimitedList(fields.Str(), delimiter="|"),
        "nested": fields.Nested(Inner),
        "nested-dict": fields.Nested({"a": fields.Int(), "b": fields.Nested({"c": fields.Bool(required=True)})}),
        "nested-many": fields.Nested(Inner, many=True),
        "nested-strict": fields.Nested(Strict),
        "nested-only": fields.Nested(Inner, only=("x",)),
        "pluck": fields.Pluck(Inner, "x"),
        "constant": fields.Constant(7),
        "function": fields.Function(deserialize=lambda value: value * 2),
        "keyed": fields.Int(data_key="key-of-it"),
        "loaded": fields.Int(load_default=None),
        "called": fields.Int(load_default=lambda: 5),
        "dump-only": fields.Int(dump_only=True),
        "load-only": fields.Int(load_only=True),
        "range": fields.Int(validate=validate.Range(min=1, max=100)),
        "range-open": fields.Float(validate=validate.Range(min=0, min_inclusive=False)),
        "length": fields.Str(validate=validate.Length(min=2, max=4)),
        "length-equal": fields.Str(validate=validate.Length(equal=3)),
        "oneof": fields.Str(validate=validate.OneOf(["a", "b"])),
        "oneof-labels": fields.Int(validate=validate.OneOf([1, 2], ["one", "two"], error="{input} of {choices}/{labels}")),
        "noneof": fields.Str(validate=validate.NoneOf(["a"])),
        "contains": fields.List(fields.Str(), validate=validate.ContainsOnly(["a", "b"])),
        "equal": fields.Str(validate=validate.Equal("me")),
        "regexp": fields.Str(validate=validate.Regexp("^[a-z]+$")),
        "predicate": fields.Str(validate=validate.Predicate("isdigit")),
        "own": fields.Int(validate=_odd),
        "own-raises": fields.Str(validate=_named),
        "several": fields.Str(validate=[validate.Length(min=3), validate.OneOf(["abc", "x"])]),
        "messages": fields.Int(error_messages={"invalid": "Not so.", "null": "Nothing."}),
    }


def predict(**kwargs):
    return {name: repr(value) for name, value in kwargs.items()}
