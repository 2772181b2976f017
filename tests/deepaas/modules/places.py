"""Arguments that are looked for in one place, or in all of them."""

from webargs import fields, validate


def get_predict_args():
    return {
        "anywhere": fields.Str(),
        "many": fields.List(fields.Str()),
        "in-query": fields.Str(location="query"),
        "in-querystring": fields.Str(location="querystring"),
        "in-form": fields.Str(location="form"),
        "in-json": fields.Raw(location="json"),
        "in-headers": fields.Str(location="headers"),
        "X-Named": fields.Int(metadata={"location": "headers"}),
        "in-cookies": fields.Str(location="cookies"),
        "renamed": fields.Str(data_key="X-Renamed", location="headers"),
        "many-query": fields.List(fields.Int(), location="query"),
        "many-form": fields.List(fields.Int(), location="form"),
        "many-json": fields.List(fields.Int(), location="json"),
        "many-headers": fields.List(fields.Str(), location="headers"),
        "many-cookies": fields.List(fields.Str(), location="cookies"),
        "checked-header": fields.Str(location="headers", validate=validate.OneOf(["a", "b"])),
    }


def predict(**kwargs):
    return kwargs
