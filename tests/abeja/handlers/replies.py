"""What else a handler may return: codes, types, headers, and what is no dict; every key of REPLIES is a case."""

import asyncio
import collections
import decimal
import http
import io
import types

import numpy as np

CODES = [
    *range(200, 209), 226, *range(300, 306), 307, 308, *range(400, 419), *range(421, 425), 426, 428, 429, 431, 451,
    *range(500, 509), 510, 511,
]  # fmt: skip


class Dictionary(dict):
    pass


class Text(str):
    pass


class Number(int):
    pass


def raising(error):
    raise error


def replied(**members):
    return lambda: dict({"content": "x"}, **members)


def status(code):
    return replied(status_code=code)


def kind(content_type, content="x"):
    return replied(content_type=content_type, content=content)


def headed(metadata):
    return replied(metadata=metadata)


async def awaited():
    return {"content": "x"}


def generated():
    yield {"content": "x"}


REPLIES = {
    # what is returned
    "return-empty": dict,
    "return-content": replied(),
    "return-everything": lambda: {
        "status_code": http.HTTPStatus.CREATED, "content_type": "text/html", "content": "<p>", "metadata": {"x-one": "1"},
    },
    "return-more-keys": lambda: {"content": "x", "other": object(), 5: 6},
    "return-ordered": lambda: collections.OrderedDict(content="x"),
    "return-subclass": lambda: Dictionary(content="x"),
    "return-default-dict": lambda: collections.defaultdict(str, content="x"),
    "return-default-dict-that-fills": lambda: collections.defaultdict(lambda: 404),
    "return-proxy": lambda: types.MappingProxyType({"content": "x"}),
    "return-user-dict": lambda: collections.UserDict(content="x"),
    "return-text": lambda: "text",
    "return-bytes": lambda: b"bytes",
    "return-none": lambda: None,
    "return-list": lambda: [{"content": "x"}],
    "return-tuple": lambda: ({"content": "x"}, 200),
    "return-number": lambda: 200,
    "return-generator": generated,
    "return-coroutine": lambda: closed(awaited()),
    "return-file": lambda: io.BytesIO(b"x"),
    "return-capitals": lambda: {"Content": "x", "STATUS_CODE": 404},
    # what is raised
    "raise-exception": lambda: raising(Exception("said")),
    "raise-value-error": lambda: raising(ValueError('a "quoted" text')),
    "raise-key-error": lambda: {}["missing"],
    "raise-zero-division": lambda: 1 / 0,
    "raise-stop-iteration": lambda: next(iter([])),
    "raise-cancelled-as-an-exception": lambda: raising(asyncio.TimeoutError()),
    "raise-memory-error": lambda: raising(MemoryError()),
    "raise-recursion": lambda: REPLIES["raise-recursion"](),
    "raise-import-error": lambda: __import__("no_module_of_this_name"),
    "raise-assertion": lambda: raising(AssertionError()),
    # status_code
    **{f"status-{code}": status(code) for code in CODES},
    "status-enum-ok": status(http.HTTPStatus.OK),
    "status-enum-bad-request": status(http.HTTPStatus.BAD_REQUEST),
    "status-enum-locked": status(http.HTTPStatus.LOCKED),
    "status-none": status(None),
    "status-299": status(299),
    "status-420": status(420),
    "status-599": status(599),
    "status-600": status(600),
    "status-999": status(999),
    "status-text": status("404"),
    "status-text-empty": status(""),
    "status-float": status(404.0),
    "status-float-fraction": status(404.5),
    "status-true": status(True),
    "status-false": status(False),
    "status-list": status([200]),
    "status-dict": status({"a": 1}),
    "status-nan": status(float("nan")),
    "status-huge": status(10**30),
    "status-subclass": status(Number(404)),
    "status-204-with-a-type": replied(status_code=204, content_type="application/json"),
    "status-304-with-a-header": replied(status_code=304, metadata={"etag": '"e"'}),
    "status-302-with-a-location": replied(status_code=302, metadata={"Location": "/elsewhere"}),
    "status-401-with-a-challenge": replied(status_code=401, metadata={"www-authenticate": "Basic"}),
    "status-404-with-json": lambda: {
        "status_code": 404, "content_type": "application/json", "content": {"message": "no"},
    },
    "status-500-of-its-own": lambda: {"status_code": 500, "content": "mine"},
    "status-503-with-retry": lambda: {"status_code": 503, "metadata": {"Retry-After": "100"}},
    # content_type
    "type-missing": replied(),
    "type-none": kind(None),
    "type-empty": kind(""),
    "type-blank": kind("  \t"),
    "type-json": kind("application/json"),
    "type-json-charset": kind("application/json; charset=utf8"),
    "type-charset-in-quotes": kind('text/plain; charset="utf-8"'),
    "type-no-space": kind("text/plain;charset=utf-8"),
    "type-capitals": kind("TEXT/Html; Charset=UTF-8"),
    "type-image": kind("image/jpeg", io.BytesIO(b"\xff\xd8\xff")),
    "type-vendor": kind("application/vnd.x.y+json"),
    "type-one-word": kind("text"),
    "type-no-subtype": kind("text/"),
    "type-no-type": kind("/plain"),
    "type-slash": kind("/"),
    "type-two-slashes": kind("a/b/c"),
    "type-bad": kind("bad;;"),
    "type-semicolon-last": kind("text/plain;"),
    "type-semicolons-last": kind("text/plain; ;"),
    "type-parameter-without-value": kind("text/plain; charset"),
    "type-parameter-of-nothing": kind("text/plain; charset="),
    "type-parameter-twice": kind("text/plain; a=1; a=2"),
    "type-parameter-twice-alike": kind("text/plain; a=1; a=1"),
    "type-parameters": kind("text/plain; a=1; b=2"),
    "type-parameter-spaced": kind("text/plain; a = 1"),
    "type-parameter-open-quote": kind('text/plain; a="1'),
    "type-with-spaces": kind("  text/plain  "),
    "type-space-within": kind("text /plain"),
    "type-two-words": kind("text/plain html"),
    "type-comma": kind("text/plain, text/html"),
    "type-japanese": kind("text/日本"),
    "type-japanese-parameter": kind("text/plain; a=日本"),
    "type-newline": kind("text/plain\r\nx-evil: 1"),
    "type-multipart": kind("multipart/form-data"),
    "type-multipart-boundary": kind("multipart/form-data; boundary=edge"),
    "type-multipart-mixed": kind("multipart/mixed; boundary=edge"),
    "type-wildcard": kind("*/*"),
    "type-number": kind(5),
    "type-true": kind(True),
    "type-list": kind(["text/plain"]),
    "type-bytes": kind(b"text/plain"),
    "type-subclass": kind(Text("text/html")),
    "type-numpy": kind(np.str_("text/html")),
    "type-only-without-content": lambda: {"content_type": "application/json"},
    # metadata
    "metadata-none": headed(None),
    "metadata-empty": headed({}),
    "metadata-empty-list": headed([]),
    "metadata-false": headed(False),
    "metadata-one": headed({"x-one": "1"}),
    "metadata-two": headed({"X-One": "1", "X-Two": "2"}),
    "metadata-capitals": headed({"x-tWO": "2", "RETRY-AFTER": "100"}),
    "metadata-empty-value": headed({"x-one": ""}),
    "metadata-none-value": headed({"x-one": None}),
    "metadata-spaces": headed({"x-one": "  a  b  "}),
    "metadata-newline": headed({"x-one": "a\r\nx-two: b"}),
    "metadata-nul": headed({"x-one": "a\0b"}),
    "metadata-tab": headed({"x-one": "a\tb"}),
    "metadata-japanese": headed({"x-one": "日本"}),
    "metadata-latin": headed({"x-one": "\xe9"}),
    "metadata-surrogate": headed({"x-one": "\ud800"}),
    "metadata-long": headed({"x-one": "0123456789" * 800}),
    "metadata-key-with-a-space": headed({"x one": "1", "x-two": "2"}),
    "metadata-key-with-a-colon": headed({"x-one:": "1", "x-two": "2"}),
    "metadata-key-japanese": headed({"日本": "1", "x-two": "2"}),
    "metadata-key-empty": headed({"": "1", "x-two": "2"}),
    "metadata-key-with-an-underscore": headed({"x_one": "1"}),
    "metadata-key-number": headed({1: "1"}),
    "metadata-integer": headed({"n": 1}),
    "metadata-float": headed({"n": 1.5}),
    "metadata-true": headed({"n": True}),
    "metadata-list-value": headed({"n": ["a"]}),
    "metadata-dict-value": headed({"n": {}}),
    "metadata-nan": headed({"n": float("nan")}),
    "metadata-text": headed("x-one: 1"),
    "metadata-list": headed([("x-one", "1")]),
    "metadata-number": headed(5),
    "metadata-ordered": headed(collections.OrderedDict({"x-one": "1"})),
    "metadata-subclass-value": headed({"x-one": Text("1")}),
    "metadata-numpy-text": headed({"x-one": np.str_("1")}),
    "metadata-content-type": headed({"Content-Type": "text/html"}),
    "metadata-content-length": headed({"Content-Length": "3"}),
    "metadata-runtime-version": headed({"x-abeja-sys-meta-runtime-version": "9"}),
    "metadata-proxy-version": headed({"X-Abeja-Sys-Meta-Proxy-Version": "9"}),
    "metadata-model-id": headed({"X-Abeja-Model-Id": "mine"}),
    "metadata-set-cookie": headed({"set-cookie": "a=b"}),
    "metadata-date": headed({"Date": "x"}),
    "metadata-server": headed({"Server": "mine"}),
    "metadata-etag": headed({"etag": '"e"'}),
    "metadata-with-an-error-status": replied(status_code=400, metadata={"x-one": "1"}),
    "metadata-without-content": lambda: {"metadata": {"x-one": "1"}},
}  # fmt: skip
POISON = {
    "status-numpy": status(np.int64(200)),
    "status-bytes": status(b"200"),
    "status-decimal": status(decimal.Decimal(200)),
    "status-object": status(object()),
    "status-complex": status(1j),
    "metadata-bytes": headed({"x-one": b"1"}),
    "metadata-numpy": headed({"x-one": np.int64(1)}),
    "metadata-bytes-key": headed({b"x-one": "1"}),
    "metadata-tuple-key": headed({("x", 1): "1"}),
}
"""After these the original answers 500 to everything, and does not come back."""
BROKEN = {
    "status-0": status(0),
    "status-1": status(1),
    "status-99": status(99),
    "status-minus": status(-1),
    "status-1000": status(1000),
    "status-100": status(100),
    "status-101": status(101),
    "status-103": status(103),
}
"""To these the original gives no answer, or an incomplete one."""


def closed(coroutine):
    coroutine.close()
    return coroutine


def handler(request, context):
    name = request.read().decode()
    return {**REPLIES, **POISON, **BROKEN}[name]()
