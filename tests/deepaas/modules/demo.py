"""A module of many arguments and three files, as demonstrations of DEEPaaS have them."""

import base64

from webargs import fields, validate


def get_metadata():
    return {"name": "demo", "author": "Demo", "author-email": "demo@example.com", "summary": "A demonstration", "license": None}


def _file(description):
    return fields.Field(required=True, metadata={"type": "file", "location": "form", "description": description})


def get_predict_args():
    return {
        "demo-str": fields.Str(load_default="some-string", metadata={"description": "A text"}),
        "demo-str-choice": fields.Str(
            load_default="choice2", metadata={"enum": ["choice1", "choice2"]}, validate=validate.OneOf(["choice1", "choice2"])
        ),
        "demo-password": fields.Str(load_default="1234", metadata={"format": "password"}),
        "demo-int": fields.Int(load_default=1),
        "demo-int-range": fields.Int(load_default=50, validate=validate.Range(min=1, max=100)),
        "demo-float": fields.Float(load_default=0.1),
        "demo-bool": fields.Bool(load_default=True),
        "demo-dict": fields.Dict(load_default={"a": 0, "b": 1}),
        "demo-list-of-floats": fields.List(fields.Float(), load_default=[0.1, 0.2, 0.3]),
        "demo-image": _file("image"),
        "demo-audio": _file("audio"),
        "demo-video": _file("video"),
    }


def predict(**kwargs):
    for name in ("demo-image", "demo-audio", "demo-video"):
        with open(kwargs[name].filename, "rb") as stored:
            kwargs[name] = base64.b64encode(stored.read()).decode()
    return {**kwargs, "labels": ["class1", "class2"], "probabilities": [0.75, 0.25]}


schema = {
    **{name: field for name, field in get_predict_args().items() if not name.startswith("demo-i")},
    "demo-int": fields.Int(),
    "demo-int-range": fields.Int(),
    "demo-image": fields.Str(metadata={"description": "base64"}),
    "demo-audio": fields.Str(),
    "demo-video": fields.Str(),
    "labels": fields.List(fields.Str()),
    "probabilities": fields.List(fields.Float()),
}
