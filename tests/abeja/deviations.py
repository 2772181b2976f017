"""Answers that differ from those of the original, case by case, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.originals import text_of

from .original import ORIGINAL

Otherwise = tuple[str, dict[str, Any]]

JSON = {"content-type": "application/json"}


def _failed(text: str = "unexpected error occurred", status: int = 500) -> dict[str, Any]:
    body = json.dumps({"status": text}, separators=(",", ":"), ensure_ascii=False)
    return {"status": status, "headers": JSON, "body": body}


def _answered(body: str, **headers: str) -> dict[str, Any]:
    return {
        "status": 200,
        "headers": ORIGINAL.usual | {name.replace("_", "-"): headers[name] for name in headers},
        "body": body,
    }


def _unsupported(kind: str) -> dict[str, Any]:
    return _failed(f"Content-Type: [{kind}] is not supported", 501)


def _of(group: str, why: str, cases: Mapping[str, dict[str, Any]]) -> dict[str, Otherwise]:
    return {f"{group}/{name}": (why, answer) for name, answer in cases.items()}


def _bodies(group: str) -> dict[str, str]:
    return {case["name"]: case["answer"].get("body", "") for case in ORIGINAL.read(group)["cases"]}


_GO = "the text was that of a Go library; the status is the same"
_JSON_TOO = "a text within JSON is written as JSON is"
_HEADER = "a header cannot have this in it"
_LOST = "after this the original answered 500 to everything, for it had lost its runtime"
_BROKEN = "to this the original answered nothing, or what is no answer"
_ANY_PATH = "any path reaches the handler: nobody is sent to another"
_SERVERS = "HTTP that is wrong as such is answered by the server"
_AUTHORIZATION = "the page promises that Authorization is removed; on the platform something before the proxy did it"
_UNCLEAN = ["two-slashes", "two-slashes-within", "dots", "dot", "dots-last"]
_POISONED = ["metadata-bytes", "metadata-bytes-key", "metadata-numpy", "metadata-tuple-key"]
_POISONED += ["status-bytes", "status-complex", "status-decimal", "status-object"]
_LIKE_ANY = _answered(_bodies("paths")["any"].replace("foo=bar&baz=qux", "x"), content_type="application/json")
_NOWHERE = _failed("the form cannot be read: it does not contain its boundary", 400)

STRICT: dict[str, Otherwise] = {
    **_of("replies", _GO, {
        name: _failed() for name, body in _bodies("replies").items() if "Read IPC response body error" in body
    }),
    **_of("replies", _JSON_TOO, {
        "type-parameter-open-quote": _unsupported('text/plain; a="1'),
        "type-newline": _unsupported("text/plain\r\nx-evil: 1"),
    }),
    **_of("types", _JSON_TOO, {
        "parameter-open-quote": _unsupported('text/plain; a="b'),
        "not-ascii": _unsupported("text/\ufffd"),
        "not-ascii-parameter": _unsupported("text/plain; a=\ufffd"),
    }),
    "replies/metadata-nul": (_HEADER, _answered("x", x_one="a b")),
    **_of("broken", _BROKEN, {name: _failed() for name in _bodies("broken")}),
    **{f"poison-{name}/{name}": (_LOST, _failed()) for name in _POISONED},
    **{f"poison-{name}/return-content": (_LOST, _answered("x")) for name in [*_POISONED, "status-numpy"]},
    "poison-status-numpy/status-numpy": ("numpy's integers are integers", _answered("x")),
    "poison-parts-append/parts-append": (_LOST, _answered("2")),
    "poison-parts-append/len": (_LOST, _answered("5")),
    "headers/authorization": (_AUTHORIZATION, {"body": _bodies("headers")["none"]}),
    **_of("methods", _SERVERS, {
        "get-in-small-letters": _failed("invalid HTTP request: Invalid method encountered", 400),
        "post-in-small-letters": _failed("invalid HTTP request: Invalid method encountered", 400),
        "star": _unsupported(""),
    }),
    "bodies/expected-otherwise": (_SERVERS, _failed("unsupported Expect header, only 100-continue is supported", 417)),
    **_of("paths", _ANY_PATH, {f"unclean-{name}": _LIKE_ANY for name in _UNCLEAN}),
    "paths/unclean-dots-last": (_ANY_PATH, _answered(_bodies("paths")["none"], content_type="application/json")),
    "paths/post-unclean": (_ANY_PATH, _answered(_bodies("paths")["post-any"], content_type="application/json")),
    **_of("parts-truncated", _BROKEN, {"other-edge": _NOWHERE, "nothing": _NOWHERE, "not-a-form": _NOWHERE}),
    "parts-truncated/bad-header": (
        _BROKEN, _failed("the form cannot be read: a header of a part has no colon", 400),
    ),
    "objects-of-nothing/body-seek-end": (
        "a file in memory cannot stand before its begin", {"body": repr([0, 0, b""])},
    ),
}  # fmt: skip
"""The deviations that strict mode has too."""

_BYTES = "bytes are sent as they are: the page says so, and nobody can have meant their digits"
_NUMPY = "numpy's values are values like any other"
_AWAITED = "what can be awaited is awaited"
_JSON_KIND = {"content_type": "application/json; charset=utf8"}

DEVIATIONS: dict[str, Otherwise] = {
    **STRICT,
    **_of("contents", _BYTES, {
        "bytes": {"body": "hello"},
        "bytes-every": text_of(bytes(range(256)), "body"),
        "bytes-subclass": {"body": "hi"},
        "bytearray": {"body": "hello"},
        "memoryview": {"body": "hello"},
        "numpy-bytes": {"body": "hi"},
        "array-of-bytes": {"body": "hello"},
        "memory-map": _answered("line 1\nline 2\n"),
        "list-of-memoryview": _answered("abc"),
        "list-of-memoryviews": _answered("abcd"),
    }),
    "contents-as-json/bytes": (_BYTES, {"body": "hello"}),
    "tables/bytes": (_BYTES, _answered("a,b", content_type="text/csv")),
    **_of("contents", _NUMPY, {
        "numpy-bool": _answered('{"a": true}'),
        "numpy-true": _answered("true"),
        "numpy-false": _answered("false"),
        "array": _answered("1\n2"),
    }),
    **_of("contents-as-json", _NUMPY, {
        "numpy-bool": _answered('{"a": true}', **_JSON_KIND),
        "array": _answered("1\n2", **_JSON_KIND),
    }),
    **_of("callable-awaited", _AWAITED, {"post": _answered("POST\n:\ndict"), "get": _answered("GET\n:\ndict")}),
}  # fmt: skip
