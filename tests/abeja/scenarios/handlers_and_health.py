"""Requests for the request object, kinds of handlers, their process, health, and the page's examples."""

from __future__ import annotations

from tests.originals import FORM, JSON, RecordedRequest, get, multipart, post

from .definitions import TEXT, group, table, text

MANY = {"X-Many": "one\r\nx-many: two", "X-Empty": ""}
PARTS = multipart(("a", "first"), ("b", "second", "b.txt", "text/csv"))
OF_PARTS = [
    "read", "read-twice", "metadata", "content-values", "parts-len", "parts-slice", "parts-index", "parts-by-name",
    "content-type", "close-then-read", "content-get", "content-read", "body-lines", "keys", "len",
]  # fmt: skip
OF_NOTHING = [
    "read",
    "read-3",
    "read-0",
    "json-load",
    "content-read",
    "body-readline",
    "truth",
    "content-truth",
    "body-seek-end",
]
CALLABLES = [
    "instance", "method", "static", "of_class", "partial", "anonymous", "Made", "MadeOfNothing", "other_names", "one",
    "three", "three_with_default", "many", "keywords", "only_keywords", "awaited", "generated", "generated_awaited",
    "decorated", "not_callable", "nothing", "Instance",
]  # fmt: skip
IDENTITIES = {
    "ABEJA_MODEL_ID": "1234567890123",
    "ABEJA_MODEL_VERSION": "201906\u2212model2 a/b",
    "ABEJA_DEPLOYMENT_ID": "2345678901234",
    "ABEJA_SERVICE_ID": "ser-abc",
    "ABEJA_ORGANIZATION_ID": "1111111111111",
    "ABEJA_MODEL_VERSION_ID": "ver-1",
    "TRAINING_JOB_DEFINITION_NAME": "job",
    "TRAINING_JOB_ID": "5",
    "MINE": "mine",
}


def _do(name: str, body: object = '{"foo": "bar"}', kind: str = JSON) -> RecordedRequest:
    return post(name, "/", body, kind, headers={"X-Do": name, **MANY})


def _tax(name: str, body: str, kind: str = JSON) -> RecordedRequest:
    return post(name, "/", body, kind)


TAXES = [
    _tax("as-printed", '{"total_without_tax": 100}'),
    _tax("text", '{"total_without_tax": "200"}'),
    _tax("missing", '{"nope": 100}'),
    _tax("bad", "{bad"),
    _tax("not-an-integer", '{"total_without_tax": "x"}'),
    _tax("list", "[1]"),
    _tax("empty", ""),
    _tax("null", '{"total_without_tax": null}'),
    _tax("big", '{"total_without_tax": 100000000000000000000}'),
    _tax("other-type", '{"total_without_tax": 100}', "text/plain"),
    _tax("with-a-mark", '\ufeff{"total_without_tax": 100}'),
    RecordedRequest("utf-16", "/", '{"total_without_tax": 100}'.encode("utf-16"), headers={"Content-Type": JSON}),
    get("get", "/?%7B%22total_without_tax%22:100%7D"),
    get("get-not-encoded", '/?{"total_without_tax":100}'),
]
HEALTHS = [
    get("ready", "/health_check"),
    get("ready-with-a-query", "/health_check?a=b"),
    get("ready-head", "/health_check", method="HEAD"),
    text("ready-post", path="/health_check"),
    get("ready-delete", "/health_check", method="DELETE"),
    get("not-health", "/health_check/"),
    get("apart", "/health_check", port="health"),
    get("apart-with-a-query", "/health_check?a=b", port="health"),
    get("apart-head", "/health_check", method="HEAD", port="health"),
    text("apart-post", path="/health_check", port="health"),
    get("apart-root", "/", port="health"),
    get("apart-elsewhere", "/other?x", port="health"),
    get("apart-longer", "/health_check/", port="health"),
    text("apart-elsewhere-post", path="/", port="health"),
    get("apart-elsewhere-delete", "/", method="DELETE", port="health"),
]

GROUPS = [
    group("objects", "objects:handler", [_do(name) for name in table("objects", "DOINGS")]),
    group("poison-parts-append", "objects:handler", [_do("parts-append"), _do("len")]),
    group("objects-of-parts", "objects:handler", [_do(name, PARTS, FORM) for name in OF_PARTS]),
    group("objects-of-nothing", "objects:handler", [_do(name, "", TEXT) for name in OF_NOTHING]),
    group("objects-of-no-parts", "objects:handler", [_do(name, b"--edge--\r\n", FORM) for name in OF_PARTS]),
    *(group(f"callable-{name}", f"callables:{name}", [text("post"), get("get", "/?x")]) for name in CALLABLES),
    group("keeping", "callables:counting", [get(f"call-{at}", "/") for at in range(3)]),
    group(
        "keeping-in-a-context",
        "callables:counting",
        [get(f"call-{at}", "/") for at in range(3)],
        {"CONTEXT": '{"a": [1]}'},
    ),
    group("inside", "inside:handler", [get("get", "/")]),
    group("identities", "inside:handler", [get("get", "/"), get("health", "/health_check")], IDENTITIES),
    group("identities-empty", "inside:handler", [get("get", "/")], dict.fromkeys(IDENTITIES, "")),
    group("result-folder-relative", "inside:handler", [get("get", "/")], {"ABEJA_TRAINING_RESULT_DIR": "a/../b"}),
    group("result-folder-absolute", "inside:handler", [get("get", "/")], {"ABEJA_TRAINING_RESULT_DIR": "/results/x/"}),
    group("result-folder-here", "inside:handler", [get("get", "/")], {"ABEJA_TRAINING_RESULT_DIR": "."}),
    group("result-folder-empty", "inside:handler", [get("get", "/")], {"ABEJA_TRAINING_RESULT_DIR": ""}),
    group("prints", "inside:prints", [get("get", "/")]),
    group("exits-system-exit", "inside:exits", [get("alive", "/"), get("system-exit", "/?system-exit")]),
    group("exits-interrupt", "inside:exits", [get("interrupt", "/?keyboard-interrupt")]),
    group("exits-generator-exit", "inside:exits", [get("generator-exit", "/?generator-exit")]),
    group("exits-at-once", "inside:exits", [get("exit", "/?exit")]),
    group("default-handler", "", [text("json", {"total_without_tax": 100}, JSON)]),
    group("dotted-handler", "package.deeper:handler", [get("get", "/?x")]),
    group("healths", "echo:handler", HEALTHS),
    group("seed-json", "seeds:json_in_json_out", TAXES),
    group("seed-400", "seeds:mended", TAXES),
    group("seed-400-as-printed", "seeds:as_printed", TAXES),
    group("seed-predictions", "seeds:predictions", [get("get", "/"), text("post")]),
]  # fmt: skip
