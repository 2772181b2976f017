"""What deepaas-cli is asked to do with: arguments of several kinds, a file, something printed."""

import io
import json
import sys

from webargs import fields, validate


def get_metadata():
    print("described")
    return {"name": "commanded", "author": "\u00c9mile", "extra": None}


def warm():
    print("warmed")
    sys.stderr.write("warmed aside\n")


def get_predict_args():
    return {
        "text": fields.Str(missing="t", description="A text, 100% plain"),
        "choice": fields.Str(missing="a", enum=["a", "b"], validate=validate.OneOf(["a", "b"])),
        "int": fields.Int(missing=1),
        "float": fields.Float(missing=0.5),
        "bool": fields.Bool(missing=True),
        "list": fields.List(fields.Int(), missing=[1]),
        "dict": fields.Dict(missing={"a": 1}),
        "date": fields.Date(missing=None),
        "a-hyphen": fields.Str(missing="h"),
        "an_underscore": fields.Str(missing="u"),
        "file": fields.Field(missing=None, type="file", location="form"),
        "plain": fields.Field(missing=None),
        "delimited": fields.DelimitedList(fields.Int(), missing=None),
        "absent": fields.Str(load_default=None),
        "accept": fields.Str(
            missing="application/json", validate=validate.OneOf(["application/json", "image/png", "text/plain"])
        ),
        "give": fields.Str(missing=""),
    }


def predict(**kwargs):
    if kwargs["give"] == "bytesio":
        return io.BytesIO(b"\x89PNG")
    if kwargs["give"] == "bytes":
        return b"bytes"
    if kwargs["give"] == "text":
        return "h\u00e9"
    if kwargs["give"] == "set":
        return {1}
    if kwargs["give"] == "error":
        raise ValueError("predict boom")
    if kwargs["file"] is not None:
        with open(kwargs["file"].filename, "rb") as stored:
            kwargs["file"] = dict(kwargs["file"]._asdict(), content=stored.read().decode())
            kwargs["file"].pop("filename")
    return json.loads(json.dumps(kwargs))


def get_train_args():
    return {
        "epochs": fields.Int(required=True),
        "rate": fields.Float(missing=0.1),
        "file": fields.Field(missing=None, type="file", location="form"),
        "give": fields.Str(missing=""),
    }


def train(**kwargs):
    print("training")
    if kwargs["give"] == "error":
        raise ValueError("train boom")
    if kwargs["give"] == "set":
        return {1}
    return {"acc": kwargs["epochs"] * kwargs["rate"]}
