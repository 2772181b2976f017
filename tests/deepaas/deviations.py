"""What we answer otherwise than the original did, case by case, and why (T: the traps of its document)."""

from __future__ import annotations

import json
from typing import Any

from tests.deepaas.command_runs import COMMANDS as RECORDED
from tests.deepaas.scenarios.results import HEADERS

Otherwise = dict[str, tuple[str, dict[str, Any]]]

_TEXT = {"content-type": "text/plain; charset=utf-8"}
_JSON = {"content-type": "application/json"}
_USUAL = {"content-type": "application/json; charset=utf-8"}
_TROUBLE = {"status": 500, "headers": _TEXT, "body": "500 Internal Server Error\n\nServer got itself in trouble"}
_FORM = {"status": 400, "headers": _JSON, "body": '{"form": ["Invalid form body."]}'}
_BODY = {"status": 400, "headers": _JSON, "body": '{"json": ["Invalid JSON body."]}'}

_MALFORMED = "a body that is not what it is said to be is the client's mistake: 400, not 500"
_FROZEN = "T6: what the original froze at is an answer, and the worker goes on, or a new one comes"
_NUMPY = "T13: numpy values are JSON"
_FILES = "a list of files can be had"
_CANCELLED = "T5: a running training is cancelled, as documented"
_FAILED = "T5: the record of a training that has failed is given when it is deleted, as that of any other"
_DEFAULT = "T4: the default of an argument `accept` is the user's"
_KEPT = "T1: an object is one and the same in all calls of a process, and keeps what they do to it"
_TRAINED = "a training's result or argument that is no JSON is shown as its text"


_DELIMITED = "a DelimitedList is that of the webargs which the model imports"
_PYTHON = "the text is Python's, and that of another version"
_SIZED = "a body that is too large is refused before it is stored, whatever it is"
_LARGE = {"status": 413, "headers": _TEXT, "body": "Maximum request body size 300 exceeded."}
_REFUSED = {
    "status": 405,
    "headers": {"allow": "GET, HEAD", "content-type": "application/json"},
    "body": '{"error":"Method Not Allowed"}',
}
_PAGES = "Penstock serves pages of its own beside the models'"
_STATIC = "nothing of the page /api stands at /static"
_DOC = "where there is no page, nothing leads to it"
_AT_ROOT = "a base path of `/` is none"
_NO_SCHEMA = "what is no JSON fails the schema before it fails to be written"
_PARAMETERS = "a content type may have parameters"
_CHARSET = "a form's own _charset_ is heeded"
_GZIP = "a body that cannot be unpacked is the client's mistake"
_PNG = {"content-disposition": 'attachment; filename="x.png"', "content-type": "image/png"}
_CHECKED = {"status": 500, "headers": _TEXT, "body": "500: ERROR validating model response, check server logs."}
_MISSING = {"status": 404, "headers": _TEXT, "body": "404: Not Found"}
_GIVEN = {"status": 200, "headers": _USUAL, "body": None}


def _predictions(value: Any) -> dict[str, Any]:
    return {"status": 200, "headers": _USUAL, "body": json.dumps({"status": "OK", "predictions": value})}


def _of(group: str, names: str, reason: str, otherwise: dict[str, Any]) -> Otherwise:
    return {f"{each}/{name}": (reason, otherwise) for each in group.split() for name in names.split()}


def _failed(name: str, message: str) -> dict[str, Any]:
    args = {"sleep": 0.0, "give": name, "data": None}
    record = {"date": "<date>", "args": args, "uuid": "<uuid>", "status": "error", "message": message}
    return {"status": 200, "headers": _USUAL, "body": json.dumps(record)}


def _done(name: str, output: str) -> dict[str, Any]:
    result = {"output": output, "finish_date": "<date>", "duration": "<duration>"}
    args = {"sleep": 0.0, "give": name, "data": None}
    record = {"date": "<date>", "args": args, "uuid": "<uuid>", "status": "done", "result": result}
    return {"status": 200, "headers": _USUAL, "body": json.dumps(record)}


def _kind(group: str, kind: str, names: str, value: str | None = None) -> Otherwise:
    """Give what webargs of today says of a DelimitedList: `value`, or that it is none."""
    answer = {"status": 422, "headers": _JSON, "body": json.dumps({kind: ["Not a valid delimited list."]})}
    if value is not None:
        answer = _predictions({kind: value, "constant": "7", "loaded": "None", "called": "5"})
    return {f"{group}/{kind}-{name}": (_DELIMITED, answer) for name in names.split()}


def _http(name: str, status: int, body: str, headers: dict[str, str] = _TEXT) -> Otherwise:
    return {f"raised-of-http/says-{name}": (_FROZEN, {"status": status, "headers": headers, "body": body})}


DEVIATIONS: Otherwise = {
    **_of(
        "forms",
        "urlencoded-not-utf-8 urlencoded-no-charset form-not-utf-8 form-and-no-boundary form-of-another-boundary "
        "form-of-nothing form-without-an-end form-without-a-name form-without-a-disposition form-bare-line-ends "
        "form-of-a-form",
        _MALFORMED,
        _FORM,
    ),
    "forms/form-charset": (_CHARSET, {**_GIVEN}),
    "jsons/gzipped-badly": (
        _GZIP,
        {"status": 400, "headers": _TEXT, "body": "400: failed to decompress the gzip request body"},
    ),
    "slashes/at/docs": (_PAGES, {"status": 200, "headers": {"content-type": "text/html; charset=utf-8"}, "body": None}),
    "slashes/at/openapi.json": (_PAGES, {"status": 200, "headers": _JSON, "body": None}),
    "slashes/at/metrics": (_PAGES, {"status": 200, "body": None}),
    "slashes/at/v2/health/ready": (_PAGES, {"status": 200, "headers": {}, "body": ""}),
    **_of("slashes", "at/static/swagger/nothing.js at/static/swagger/", _STATIC, _MISSING),
    **{
        f"{group}/ui": (_DOC, _MISSING)
        for group in ["no-doc", "by-a-file", "by-a-file-and-a-flag", "by-a-file-and-the-environment", "by-a-folder"]
    },
    **_of("based-at-the-root", "versions versions-without-slash swagger at-the-root-swagger", _AT_ROOT, _GIVEN),
    "based-at-the-root/api": (_AT_ROOT, {"status": 200, "headers": {"content-type": "text/html; charset=utf-8"}}),
    "based-at-the-root/ui": (_AT_ROOT, {"status": 302, "headers": {**_TEXT, "location": "/api"}, "body": "302: Found"}),
    "accept-with-parameters/text/plain; charset=latin-1-text": (
        _PARAMETERS,
        {"status": 200, "headers": {"content-type": "text/plain; charset=latin-1"}, "body64": "aOlsbG8="},
    ),
    "accept-with-parameters/text/plain; charset=latin-1-bytes": (
        _PARAMETERS,
        {"status": 200, "headers": {"content-type": "text/plain; charset=latin-1"}, "body64": "iVBORw0KGgoAAQL/"},
    ),
    **_of(
        "accept-json-first",
        "application/json-as-unbuffered application/json-as-updated application/json-as-gone",
        _NO_SCHEMA,
        _CHECKED,
    ),
    **{
        f"accept-default-is-not-first/{name}": (_DEFAULT, {"headers": _PNG, "body64": "iVBORw0KGgoAAQL/"})
        for name in ["unsaid", *(f"header-{kind}" for kind in HEADERS)]
    },
    "accept-default-is-not-first/swagger": (_DEFAULT, _GIVEN),
    **_of("jsons", "empty-but-a-form", _MALFORMED, _FORM),
    **_of("jsons", "type-charset-unknown", _MALFORMED, _BODY),
    **_of("files", "boundary-inside cut", _MALFORMED, _FORM),
    **_of(
        "ended",
        "ends-KeyboardInterrupt ends-SystemExit ends-GeneratorExit ends-exit ends-_exit ends-Unpicklable",
        _FROZEN,
        _TROUBLE,
    ),
    **_kind("kinds-in-forms", "delimited", "file"),
    **_kind("kinds-in-forms", "delimited-bar", "file"),
    **_kind("kinds-in-json", "delimited", " ".join(f"json-{n}" for n in (1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14, 16))),
    **_kind("kinds-in-json", "delimited-bar", " ".join(f"json-{n}" for n in (1, 2, 3, 4, 8, 9, 10, 11, 12, 13))),
    **_kind("kinds-in-json", "delimited", "json-7", "[]"),
    **_kind("kinds-in-json", "delimited-bar", "json-7", "[]"),
    **_kind("kinds-queried", "delimited", "query-0", "[]"),
    **_kind("kinds-queried", "delimited-bar", "query-0", "[]"),
    "kinds-queried/ipv6-query-11": (
        _PYTHON,
        _predictions(
            {"ipv6": "IPv6Address('fe80::1%eth0')", "constant": "7", "loaded": "None", "called": "5"},
        ),
    ),
    "form-whole/predict": (_KEPT, _predictions({"calls": 101, "a-hyphen": 1})),
    "form-whole/predict-given": (_KEPT, _predictions({"calls": 102, "a-hyphen": 6})),
    **_of("sized sized-by-the-environment", "unread-large", _SIZED, _LARGE),
    **_of("slashes-posted", "at/static/swagger/nothing.js at/static/swagger/", _STATIC, _MISSING),
    **_of("slashes-posted", "at/docs at/metrics at/v2/health/ready", _PAGES, _REFUSED),
    **{
        f"trained/{name}-deleted": (_FAILED, _failed(name, message))
        for name, message in {
            "error": "train boom",
            "quiet": "",
            "accents": "h\u00e9 \u4e16\n<b>",
            "key": "'k'",
            "later": "not yet",
        }.items()
    },
    **_of("trained", "bytes-ended bytes-deleted", _TRAINED, _done("bytes", "b'abc'")),
    "trained/bytes-listed": (_TRAINED, _GIVEN),
    "training-cancelled/D33": (
        _CANCELLED,
        {
            "status": 200,
            "headers": _USUAL,
            "body": '{"date": "<date>", "args": {"sleep": 60.0, "give": "acc", "data": null}, "uuid": "<uuid>", '
            '"status": "cancelled"}',
        },
    ),
    "trained-with-files/T9-ended": (
        "T9: a training has its files",
        {
            "body": '{"date": "<date>", '
            '"args": {"sleep": 0.0, "give": "acc", "data": ["data", "text/plain", "f.txt"]}, '
            '"uuid": "<uuid>", "status": "done", "result": {"output": {"name": "data", "content": "of the file"}, '
            '"finish_date": "<date>", "duration": "<duration>"}}',
        },
    ),
    "trained-with-files/date": (
        _TRAINED,
        {
            "status": 200,
            "headers": _USUAL,
            "body": '{"date": "<date>", "args": {"sleep": 0.0, "give": "more", "data": null, "when": "2020-01-02"}, '
            '"uuid": "<uuid>", "status": "running"}',
        },
    ),
    "trained-with-files/date-listed": (_TRAINED, _GIVEN),
    "files/list": (_FILES, _GIVEN),
    "kinds-nested/swagger": ("a schema inside another is not taken for that other", _GIVEN),
    **{
        f"returned/gives-{name}": (_NUMPY, _predictions(value))
        for name, value in {
            "np.float32(0.5)": 0.5,
            "np.int64(3)": 3,
            "np.int8(3)": 3,
            "np.bool_(True)": True,
            "np.array([1, 2])": [1, 2],
            "np.zeros((2, 2))": [[0.0, 0.0], [0.0, 0.0]],
            "np.array(5)": 5,
        }.items()
    },
    **_of("raised", "raises-StopIteration", _FROZEN, _TROUBLE),
    **_of("after-a-death", "dies", _FROZEN, _TROUBLE),
    **_of("training-killed", "killed-predicts exits-predicts", _FROZEN, _predictions("predicted")),
    **_http("HTTPBadRequest", 400, "400: bad thing"),
    **_http("HTTPUnprocessableEntity", 422, "422: bad thing"),
    **_http("HTTPNotFound", 404, "404: bad thing"),
    **_http("HTTPInternalServerError", 500, "500: bad thing"),
    **_http("HTTPServiceUnavailable", 503, "503: bad thing"),
    **_http("HTTPUnauthorized", 401, "401: bad thing"),
    **_http("HTTPTooManyRequests", 429, "429: bad thing"),
    **_http("HTTPNoContent", 204, "", {}),
    **_http("HTTPOk", 200, "200: bad thing"),
}
_RECORDED: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads(RECORDED.read_text("utf-8"))}
_WARMED = "the command warms the model, and keeps arguments with hyphens, which the original lost"
_ABSENT = "an argument that is not given and has no default is not passed"
_OBJECT = "T1: a class is instantiated; F6: no method is required"
_BOTH = "--model-name is heeded, as the variable is"
_WRITTEN = "texts and bytes are stored, as other results are"
_REPLACED = "a model that is named and cannot be served is not replaced by the built-in one"
_WRONG = "a wrong command line fails"
_NO_LIST = (
    "deepaas-cli predict: error: argument --list: '[1' is not a Python list or dict: '[' was never closed "
    "(<unknown>, line 1)"
)
_STARTED = {"serves": ["m"]}


def _warmed(name: str, hyphened: str = "h") -> dict[str, Any]:
    """Give what the original did with what it left out."""
    answer = _RECORDED[name]["answer"]
    first, *lines = answer["said"]
    python, written = f"'a-hyphen': '{hyphened}', 'an_underscore'", f'"a-hyphen": "{hyphened}", "an_underscore"'
    changed = {**answer, "said": [first, "warmed", *(line.replace("'an_underscore'", python) for line in lines)]}
    if "written" in answer:
        changed["written"] = {
            file: {key: text.replace('"an_underscore"', written) for key, text in body.items()}
            for file, body in answer["written"].items()
        }
    return changed


COMMANDS: Otherwise = {
    **{
        name: (_WARMED, _warmed(name, "hh" if name == "predict-given" else "h"))
        for name, case in _RECORDED.items()
        if case.get("models") == {"m": "commanded"}
        and {"predict", "train"} & {*case["words"]}
        and not case["answer"]["exit"]
    },
    "train-set": (
        _TRAINED,
        {
            "exit": 0,
            "said": [
                "INFO train was called.",
                "warmed",
                "training",
                "INFO Elapsed time:  <duration>",
                (
                    'INFO return: {"date": "<date>", "args": {"epochs": 1, "rate": 0.1, "file": null, "give": "set"}, '
                    '"status": "done", "uuid": "<uuid>", "result": {"finish_date": "<date>", "duration": "<duration>", '
                    '"output": "{1}"}}'
                ),
            ],
        },
    ),
    "predict-accept-png-bytes": (
        _WRITTEN,
        {
            "exit": 0,
            "said": ["INFO predict was called.", "warmed", "INFO return: Output is saved in y.png"],
            "written": {"y.png": {"body": "bytes"}},
        },
    ),
    "predict-accept-text": (
        _WRITTEN,
        {
            "exit": 0,
            "said": ["INFO predict was called.", "warmed", "INFO return: Output is saved in y.txt"],
            "written": {"y.txt": {"body": "h\u00e9"}},
        },
    ),
    "optional": (_ABSENT, {"exit": 0, "said": ["INFO predict was called.", "INFO return: {'must': 'int'}"]}),
    "optional-stored": (
        _ABSENT,
        {
            "exit": 0,
            "said": ["INFO predict was called.", "INFO return: Output is saved in y.json"],
            "written": {"y.json": {"body": '{"must": "int"}'}},
        },
    ),
    "optional-train": (
        _ABSENT,
        {
            "exit": 0,
            "said": [
                "INFO train was called.",
                "INFO Elapsed time:  <duration>",
                (
                    'INFO return: {"date": "<date>", "args": {"must": 1}, "status": "done", '
                    '"uuid": "<uuid>", "result": '
                    '{"finish_date": "<date>", "duration": "<duration>", "output": {"must": "int"}}}'
                ),
            ],
        },
    ),
    "of-an-instance": (
        _OBJECT,
        {"exit": 0, "said": ["INFO predict was called.", "INFO return: {'calls': 101, 'a-hyphen': 1}"]},
    ),
    "of-a-class": (
        _OBJECT,
        {
            "exit": 0,
            "said": [
                "INFO get_metadata was called.",
                'INFO return: {"author": "of a class", "name": "named by itself", "id": "7", "extra": null}',
            ],
        },
    ),
    "of-statics": (_OBJECT, {"exit": 0, "said": ["INFO predict was called.", "INFO return: {'a': 1}"]}),
    "of-nothing": (_OBJECT, {"exit": 0, "said": ["INFO get_metadata was called.", 'INFO return: {"name": "w"}']}),
    "warm-missing": (_OBJECT, {"exit": 0, "said": ["INFO warm was called.", "INFO return: Finished warm() method"]}),
    "predict-bad-list": (_WRONG, {"exit": 2, "last": _NO_LIST}),
    "two-models-named": (_BOTH, _RECORDED["two-models-by-the-environment"]["answer"]),
    **{
        name: (_WRONG, {"exit": 1})
        for name in ("run-bad-port", "run-bad-size", "run-bad-workers", "run-no-workers", "run-bad-value-in-a-file")
    },
    **{
        f"run-{name}": (_REPLACED, {"exit": 1})
        for name in ("import-fails", "no-such-module", "no-such-attribute", "schema-of-an-instance", "schema-of-a-text")
    },
    "run-of-a-class": (_OBJECT, _STARTED),
    "run-accept-without-choices": ("an argument `accept` may take any type", _STARTED),
}
"""Likewise of commands: all that they do."""
