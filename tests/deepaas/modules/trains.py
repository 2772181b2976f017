"""Trainings: as long, as good and as bad as they are asked to be."""

import os
import sys
import time

from webargs import fields


class Own(Exception):
    pass


def get_train_args():
    return {
        "sleep": fields.Float(required=True),
        "give": fields.Str(missing="acc"),
        "data": fields.Field(missing=None, type="file", location="form"),
        "list": fields.List(fields.Int()),
        "when": fields.Date(),
    }


def train(sleep, give, data, **more):
    time.sleep(sleep)
    if give == "error":
        raise ValueError("train boom")
    if give == "quiet":
        raise RuntimeError
    if give == "accents":
        raise Own("h\u00e9 \u4e16\n<b>")
    if give == "key":
        raise KeyError("k")
    if give == "later":
        raise NotImplementedError("not yet")
    if give == "nothing":
        return None
    if give == "bytes":
        return b"abc"
    if give == "nan":
        return float("nan")
    if give == "exit":
        sys.exit(3)
    if give == "_exit":
        os._exit(3)
    if give == "more":
        return {name: repr(value) for name, value in more.items()}
    if data is not None:
        with open(data.filename, "rb") as stored:
            return {"name": data.name, "content": stored.read().decode()}
    return {"acc": 0.9, "data": str(data)}


def predict():
    return "predicted"
