"""What the request object can do: every key of DOINGS is a case, asked for by its name in the header x-do.

The answer is the value's repr, or the error's
type; what differs between Python versions in a repr is left out.
"""

import collections.abc
import csv
import io
import json


def parts(request):
    return request["contents"]


def first(request):
    return request["contents"][0]


def twice(read):
    return [read(), read()]


def closed_then_read(thing):
    thing.close()
    return thing.read()


def set_item(thing):
    thing["x"] = 1
    return thing


def delete_item(thing):
    del thing["content_type"]
    return thing


def unpacked(content_type=None, http_method=None, **others):
    return [content_type, http_method, sorted(others)]


DOINGS = {
    # the request as a mapping
    "keys": lambda r: list(r.keys()),
    "keys-kind": lambda r: type(r.keys()).__name__,
    "iterate": list,
    "len": len,
    "truth": bool,
    "is-dict": lambda r: isinstance(r, dict),
    "is-mapping": lambda r: isinstance(r, collections.abc.Mapping),
    "is-mutable-mapping": lambda r: isinstance(r, collections.abc.MutableMapping),
    "is-hashable": lambda r: isinstance(r, collections.abc.Hashable),
    "hash": lambda r: hash(r) is None,
    "method": lambda r: r["http_method"],
    "method-kind": lambda r: type(r["http_method"]).__name__,
    "content-type": lambda r: r["content_type"],
    "headers-kind": lambda r: [type(r["headers"]).__name__, type(r["headers"][0]).__name__],
    "headers-first-keys": lambda r: list(r["headers"][0]),
    "http-headers-kind": lambda r: type(r["http_headers"]).__name__,
    "contents-kind": lambda r: type(r["contents"]).__name__,
    "content-kind": lambda r: type(first(r)).__name__,
    "request-kind": lambda r: type(r).__name__,
    "missing": lambda r: r["missing"],
    "missing-text": lambda r: str(raised(lambda: r["missing"])),
    "body-key": lambda r: r["body"],
    "path-key": lambda r: r.get("path"),
    "metadata": lambda r: r["metadata"],
    "metadata-get": lambda r: r.get("metadata", "nothing"),
    "metadata-in": lambda r: "metadata" in r,
    "get": lambda r: r.get("http_method"),
    "get-missing": lambda r: r.get("missing"),
    "get-default": lambda r: r.get("missing", 5),
    "get-keyword": lambda r: r.get("missing", default=6),
    "in": lambda r: ["contents" in r, "missing" in r, "http_headers" in r],
    "in-unhashable": lambda r: [] in r,
    "items": lambda r: [key for key, _ in r.items()],
    "values": lambda r: [type(value).__name__ for value in r.values()],
    "values-kind": lambda r: type(r.values()).__name__,
    "dict-of": lambda r: list(dict(r)),
    "unpack": lambda r: unpacked(**r),
    "set": set_item,
    "delete": delete_item,
    "pop": lambda r: r.pop("content_type"),
    "update": lambda r: r.update({}),
    "copy": lambda r: r.copy(),
    "json-dumps": json.dumps,
    "str-head": lambda r: str(r)[:45],
    "repr-is-str": lambda r: repr(r) == str(r),
    "equal-itself": lambda r: r == r,  # noqa: PLR0124
    "equal-dict": lambda r: [r == dict(r), r == {}, r != {}],
    "attribute": lambda r: r.content_type,
    "set-attribute": lambda r: setattr(r, "mine", 5) or r.mine,
    "append-content": lambda r: r.append_content(first(r)) or len(parts(r)),
    # the request as a file
    "read": lambda r: r.read(),
    "read-kind": lambda r: type(r.read()).__name__,
    "read-twice": lambda r: twice(r.read),
    "read-3": lambda r: [r.read(3), r.read(3), r.read()],
    "read-0": lambda r: [r.read(0), r.read()],
    "read-none": lambda r: r.read(None),
    "read-minus": lambda r: r.read(-5),
    "read-more": lambda r: r.read(10**6),
    "read-keyword": lambda r: r.read(size=2),
    "read-float": lambda r: r.read(1.5),
    "read-text": lambda r: r.read("1"),
    "read-then-part": lambda r: [r.read(2), first(r).read(2), r.read()],
    "readline": lambda r: r.readline(),
    "readlines": lambda r: r.readlines(),
    "seek": lambda r: r.seek(0),
    "tell": lambda r: r.tell(),
    "readable": lambda r: r.readable(),
    "with": lambda r: r.__enter__(),
    "close": lambda r: r.close(),
    "close-twice": lambda r: [r.close(), r.close()],
    "close-then-read": closed_then_read,
    "json-load": json.load,
    "json-loads": lambda r: json.loads(r.read()),
    "bytes-io": lambda r: io.BytesIO(r.read()).getvalue(),
    "text-io": lambda r: io.TextIOWrapper(r).read(),
    "csv-of-it": lambda r: list(csv.reader(io.StringIO(r.read().decode()))),
    "wrapped": lambda r: io.TextIOWrapper(first(r)["body"]).read(),
    # one content
    "content-keys": lambda r: list(first(r).keys()),
    "content-iterate": lambda r: list(first(r)),
    "content-len": lambda r: len(first(r)),
    "content-truth": lambda r: bool(first(r)),
    "content-is-dict": lambda r: isinstance(first(r), dict),
    "content-is-mapping": lambda r: isinstance(first(r), collections.abc.Mapping),
    "content-values": lambda r: [first(r)[key] for key in ("content_type", "metadata", "file_name", "form_name")],
    "content-missing": lambda r: first(r)["missing"],
    "content-get": lambda r: [first(r).get("file_name"), first(r).get("missing"), first(r).get("missing", 1)],
    "content-in": lambda r: ["body" in first(r), "missing" in first(r)],
    "content-items": lambda r: [key for key, _ in first(r).items()],
    "content-values-len": lambda r: len(first(r).values()),
    "content-set": lambda r: set_item(first(r)),
    "content-delete": lambda r: delete_item(first(r)),
    "content-equal": lambda r: [first(r) == first(r), first(r) == dict(first(r)), first(r) == {}, first(r) != {}],
    "content-str-head": lambda r: str(first(r))[:34],
    "content-hash": lambda r: hash(first(r)) is None,
    "content-read": lambda r: first(r).read(),
    "content-read-twice": lambda r: twice(first(r).read),
    "content-read-3": lambda r: [first(r).read(3), first(r).read(3)],
    "content-close-then-read": lambda r: closed_then_read(first(r)),
    "content-readline": lambda r: first(r).readline(),
    "content-json": lambda r: json.load(first(r)),
    "body-read": lambda r: first(r)["body"].read(),
    "body-readline": lambda r: first(r)["body"].readline(),
    "body-lines": lambda r: list(first(r)["body"]),
    "body-seek": lambda r: [r.read(), first(r)["body"].seek(0), r.read()],
    "body-tell": lambda r: [first(r)["body"].tell(), r.read(2), first(r)["body"].tell()],
    "body-seek-end": lambda r: [first(r)["body"].seek(0, 2), first(r)["body"].seek(-2, 2), r.read()],
    "body-readinto": lambda r: (lambda room: [first(r)["body"].readinto(room), bytes(room)])(bytearray(4)),
    "body-can": lambda r: [first(r)["body"].readable(), first(r)["body"].seekable(), first(r)["body"].writable()],
    "body-write": lambda r: first(r)["body"].write(b"x"),
    "body-is-a-buffered-file": lambda r: isinstance(first(r)["body"], io.BufferedIOBase),
    "body-closed": lambda r: [first(r)["body"].closed, r.close(), first(r)["body"].closed],
    "body-peek": lambda r: first(r)["body"].peek(3)[:3],
    "body-with": lambda r: with_body(first(r)["body"]),
    "parts-len": lambda r: len(parts(r)),
    "parts-slice": lambda r: len(parts(r)[:1]),
    "parts-index": lambda r: parts(r)[5],
    "parts-by-name": lambda r: {part["form_name"]: part.read() for part in parts(r)},
    "parts-clear": lambda r: parts(r).clear() or r.read(),
    # http_headers
    "headers-item": lambda r: r["http_headers"]["X-Do"],
    "headers-item-small": lambda r: r["http_headers"]["x-do"],
    "headers-missing": lambda r: r["http_headers"]["missing"],
    "headers-last": lambda r: r["http_headers"]["x-many"],
    "headers-all": lambda r: r["http_headers"].get_all("X-MANY"),
    "headers-all-missing": lambda r: r["http_headers"].get_all("missing"),
    "headers-get": lambda r: r["http_headers"].get("X-Many"),
    "headers-get-missing": lambda r: r["http_headers"].get("missing"),
    "headers-get-default": lambda r: r["http_headers"].get("missing", "d"),
    "headers-get-empty": lambda r: [r["http_headers"].get("x-empty"), "x-empty" in r["http_headers"]],
    "headers-in": lambda r: ["X-Many" in r["http_headers"], "missing" in r["http_headers"]],
    "headers-has-key": lambda r: r["http_headers"].has_key("X-MANY"),  # noqa: W601
    "headers-iterate": lambda r: list(r["http_headers"]),
    "headers-iterate-kind": lambda r: type(next(iter(r["http_headers"]))).__name__,
    "headers-len": lambda r: len(r["http_headers"]),
    "headers-truth": lambda r: bool(r["http_headers"]),
    "headers-keys": lambda r: list(r["http_headers"].keys()),
    "headers-values": lambda r: list(r["http_headers"].values()),
    "headers-items": lambda r: list(r["http_headers"].items()),
    "headers-keys-kind": lambda r: type(r["http_headers"].keys()).__name__,
    "headers-dict": lambda r: dict(r["http_headers"].items()),
    "headers-dict-of-it": lambda r: dict(r["http_headers"]),
    "headers-json": lambda r: json.dumps(r["http_headers"]),
    "headers-set": lambda r: set_item(r["http_headers"]),
    "headers-delete": lambda r: delete_item(r["http_headers"]),
    "headers-equal": lambda r: [r["http_headers"] == r["http_headers"], r["http_headers"] == {}],
    "headers-not-equal": lambda r: r["http_headers"] != {},
    "headers-number": lambda r: r["http_headers"][5],
    "headers-none": lambda r: r["http_headers"].get(None),
    "headers-is-mapping": lambda r: isinstance(r["http_headers"], collections.abc.Mapping),
    "headers-host": lambda r: r["http_headers"]["host"],
    "headers-list": lambda r: [one["key"] for one in r["headers"]],
    "headers-list-many": lambda r: [one["values"] for one in r["headers"] if one["key"] == "x-many"],
}
POISON = {"parts-append": lambda r: parts(r).append(1) or len(parts(r))}
"""The original closes the items of the list after the call, and does not survive this one."""


def with_body(body):
    with body as file:
        return file.read()


def raised(act):
    try:
        act()
    except Exception as error:
        return error


def written(value):
    return sorted(value) if isinstance(value, set) else value


def handler(request, context):
    try:
        outcome = repr(written({**DOINGS, **POISON}[request["http_headers"]["x-do"]](request)))
    except Exception as error:
        outcome = "raises " + type(error).__name__
    return {"content": outcome}
