"""A module as the document's cases want it: it gives back what it was called with."""

from webargs import fields, validate


def get_metadata():
    return {"author": "A", "description": "D", "license": "MIT", "url": "http://x", "version": "1"}


def get_predict_args():
    return {
        "arg1": fields.Str(
            required=False, missing="foo", enum=["choice1", "choice2"], description="Argument one"
        ),
        "num": fields.Int(missing=3),
        "flag": fields.Bool(missing=False),
        "lst": fields.List(fields.Int(), missing=None),
        "strict": fields.Str(missing="a", validate=validate.OneOf(["a", "b"])),
        "data": fields.Field(
            description="Data file to perform inference on.",
            required=False,
            missing=None,
            type="file",
            location="form",
        ),
        "url": fields.Url(description="Url of data to perform inference on.", required=False, missing=None),
    }


def predict(**kwargs):
    if hasattr(kwargs["data"], "filename"):
        with open(kwargs["data"].filename, "rb") as stored:
            kwargs["data"] = dict(kwargs["data"]._asdict(), content=stored.read().decode("latin-1"))
    return kwargs


def get_train_args():
    return {"arg1": fields.Str(missing="foo")}


def train(**kwargs):
    return kwargs
