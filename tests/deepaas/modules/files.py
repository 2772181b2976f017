"""Files, one and several, needed and not."""

import os

from webargs import fields


def _file(**more):
    return fields.Field(metadata={"type": "file", "location": "form", "description": "A file"}, **more)


def get_predict_args():
    return {
        "one": _file(missing=None),
        "must": _file(required=True),
        "plain": _file(),
        "listed": fields.List(_file(), metadata={"location": "form"}),
        "anywhere": fields.Raw(),
        "text": fields.Str(missing=None),
    }


def _shown(value):
    if isinstance(value, list):
        return [_shown(item) for item in value]
    if not hasattr(value, "filename"):
        return repr(value)
    with open(value.filename, "rb") as stored:
        content = stored.read()
    details = {"kind": type(value).__name__, "size": len(content), "content": content[:60].decode("latin-1")}
    return dict(value._asdict(), **details, extension=os.path.splitext(value.filename)[1])


def predict(**kwargs):
    return {name: _shown(value) for name, value in kwargs.items()}
