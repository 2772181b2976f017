"""Handlers for `model run-local`."""

import io
import os

NAMES = ["HANDLER", "ABEJA_ORGANIZATION_ID", "ABEJA_TRAINING_RESULT_DIR", "A", "B"]


def environment(request, context):
    return {"content": {name: os.environ.get(name) for name in NAMES}}


def saw(request, context):
    headers = {name: request["http_headers"][name] for name in ("accept", "accept-encoding", "content-length")}
    body = request.read().decode("latin-1")
    return {"content": {"type": request["content_type"], "method": request["http_method"], "body": body, "headers": headers}}


def text(request, context):
    return {"content": "hello"}


def number(request, context):
    return {"content": "5"}


def nan(request, context):
    return {"content": "NaN"}


def word(request, context):
    return {"content_type": "text/plain; charset=utf-8", "content": '"日本"'}


def japanese(request, context):
    return {"content": {"日": "本"}}


def lines(request, context):
    return {"content": [{"a": 1}, {"b": 2}]}


def empty(request, context):
    return {}


def no_content(request, context):
    return {"status_code": 204}


def jpeg(request, context):
    return {"content_type": "image/jpeg", "content": io.BytesIO(b"\xff\xd8\xff\n")}


def printing(request, context):
    print("said by the handler", flush=True)
    return {"content": "x"}


def failing(request, context):
    raise ValueError("a text for the log")


def not_found(request, context):
    return {"status_code": 404, "content": "nope"}


def calm(request, context):
    return {"status_code": 420, "content": "x"}


def last(request, context):
    return {"status_code": 599, "content": "x"}


def leaving(request, context):
    raise SystemExit(3)
