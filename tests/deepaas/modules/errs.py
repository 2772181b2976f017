"""A module that raises what it is asked to raise, and describes nothing."""

import os
import sys

from webargs import fields


class Own(Exception):
    pass


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first + second)


def get_predict_args():
    return {"what": fields.Str(missing="ValueError"), "message": fields.Str(missing="boom")}


def predict(what, message):
    if what == "nothing":
        return {"fine": True}
    if what == "exit":
        sys.exit(3)
    if what == "_exit":
        os._exit(3)
    if what == "Own":
        raise Own(message)
    if what == "Unpicklable":
        raise Unpicklable(message, message)
    if what.startswith("HTTP"):
        from aiohttp import web

        raise getattr(web, what)(reason=message)
    if what == "ValidationError":
        from marshmallow import ValidationError

        raise ValidationError({"own": [message]})
    if what == "attribute":
        return message.no_such_attribute
    raise getattr(__import__("builtins"), what)(message)


get_train_args = get_predict_args


def train(what, message):
    return predict(what, message)
