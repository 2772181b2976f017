"""Signatures and results that do not fit their arguments."""

import functools

from webargs import fields


def get_metadata():
    return {"description": "awkward", "author-email": None, "keywords": ["a", "b"]}


def decorated(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        return {"around": function(*args, **kwargs)}

    return around


def get_predict_args():
    return {
        "class": fields.Str(missing="a keyword"),
        "with space": fields.Str(missing="spaced"),
        "\u00e9": fields.Str(missing="accent"),
        "": fields.Str(missing="no name"),
    }


@decorated
def predict(**kwargs):
    return kwargs


class TooFew:
    @staticmethod
    def get_predict_args():
        return {"given": fields.Str(missing="x")}

    @staticmethod
    def predict():
        return "without arguments"


class TooMany:
    @staticmethod
    def get_predict_args():
        return {"given": fields.Str()}

    @staticmethod
    def predict(given, more):
        return "with more"


class Positional:
    @staticmethod
    def predict(*args):
        return list(args)
