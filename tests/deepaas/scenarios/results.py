"""What predict returns and raises, what is checked of it, and as which content type it leaves."""

from __future__ import annotations

from tests.originals import RecordedRequest, get, post

from .definitions import encoded, form, group, predict

RESULT_NAMES = [
    "text",
    "empty-text",
    "accents",
    "controls",
    "quotes",
    "lone",
    "number",
    "huge",
    "negative",
    "real",
    "tiny",
    "big",
    "whole-real",
    "minus-zero",
    "nan",
    "infinite",
    "true",
    "none",
    "list",
    "tuple",
    "dict",
    "int-keys",
    "odd-keys",
    "bytes-keys",
    "mixed-keys",
    "namedtuple",
    "ordered",
    "default",
    "counter",
    "userdict",
    "deque",
    "bytes",
    "bytearray",
    "set",
    "frozenset",
    "range",
    "complex",
    "date",
    "datetime",
    "decimal",
    "fraction",
    "uuid",
    "path",
    "enum",
    "int-enum",
    "word",
    "class",
    "object",
    "dataclass",
    "deep",
    "exception",
    "ellipsis",
    "long-list",
    "bytesio",
    "stringio",
    "file",
]
NUMPY = [
    "np.float64(0.5)", "np.float32(0.5)", "np.int64(3)", "np.int8(3)", "np.bool_(True)", "np.array([1, 2])",
    "np.zeros((2, 2))", "np.str_('a')", "{'a': np.float32(1)}", "np.array(5)", "[np.float64(2)]", "np.nan",
]  # fmt: skip
UNSENDABLE = ["generator", "text-file", "lambda", "function", "itself", "module", "np.array", "nonsense"]
RAISED = [
    "ValueError", "TypeError", "KeyError", "AttributeError", "attribute", "NotImplementedError", "RuntimeError",
    "OSError",
    "FileNotFoundError", "AssertionError", "MemoryError", "RecursionError", "UnicodeError", "StopIteration", "Warning",
    "ZeroDivisionError", "Own", "ValidationError", "nothing",
]  # fmt: skip
ENDING = ["KeyboardInterrupt", "SystemExit", "GeneratorExit", "exit", "_exit", "Unpicklable", "asyncio"]
OF_HTTP = [
    "HTTPBadRequest", "HTTPUnprocessableEntity", "HTTPNotFound", "HTTPInternalServerError", "HTTPServiceUnavailable",
    "HTTPUnauthorized", "HTTPTooManyRequests", "HTTPNoContent", "HTTPOk",
]  # fmt: skip

RESULTS: list[RecordedRequest] = [predict(f"gives-{give}", "returned", encoded(give=give)) for give in RESULT_NAMES]
RESULTS += [predict(f"gives-{give}", "returned", encoded(give=give)) for give in NUMPY if give.startswith("np.")]
AWAY = [predict(f"gives-{give}", "returned", encoded(give=give), silent=True) for give in UNSENDABLE]
FAILS: list[RecordedRequest] = [get("described", "/v2/models/errs/"), get("all", "/v2/models/")]
FAILS += [predict(f"raises-{what}", "errs", f"?what={what}", silent=True) for what in RAISED]
FAILS += [predict("raises-accents", "errs", encoded(what="ValueError", message="é\n世"))]
ENDS = [predict(f"ends-{what}", "errs", f"?what={what}", silent=True) for what in ENDING]
SAYS = [predict(f"says-{what}", "errs", encoded(what=what, message="bad thing"), silent=True) for what in OF_HTTP]
AFTER = [predict("dies", "errs", "?what=_exit", silent=True), predict("after", "errs", "?what=nothing")]

SCHEMAS = [
    "good",
    "no-predictions",
    "extra",
    "extra-inside",
    "missing",
    "missing-inside",
    "texts",
    "wrong",
    "number-for-text",
    "null",
    "nan",
    "tuple",
    "dict-for-list",
    "text",
    "list",
    "empty-list",
    "list-of-it",
    "none",
    "number",
    "empty",
    "set",
]


def checked(name: str, kind: str) -> object:
    """Ask one schema for all results."""
    requests = [predict(give, "m", f"?give={give}") for give in SCHEMAS]
    return group(name, [*requests, get("swagger", "/swagger.json")], models={"m": f"schemas:{kind}"})


DATES = [predict(give, "m", f"?give={give}") for give in ("good", "bad", "object")]
FORMS = [
    "file",
    "bytes",
    "bytearray",
    "text",
    "dict",
    "none",
    "number",
    "list",
    "bytesio",
    "unbuffered",
    "updated",
    "odd-name",
    "no-extension",
    "empty",
    "read",
    "closed",
    "large",
    "gone",
]
TYPES = [
    "application/zip",
    "image/png",
    "application/json",
    "*/*",
    "text/html",
    "",
    "image/*",
    "application/JSON",
    "json",
]
HEADERS = [
    "image/png", "application/json", "text/plain", "*/*", "text/html", "", "image/*",
    "text/html,application/json;q=0.9",
    "application/json, */*", "image/png;q=1", "IMAGE/PNG", "image/png, image/png", "nonsense",
]  # fmt: skip


def accepting(query: bool = True) -> list[RecordedRequest]:
    """Ask for each type and each form."""
    requests = [predict("unsaid", "m"), form("part-json", "m", ("accept", "application/json"))]
    requests += [predict("json", "m", value={"accept": "image/png"}), predict("null", "m", value={"accept": None})]
    if query:
        requests += [predict(f"query-{kind}", "m", encoded(accept=kind)) for kind in TYPES]
        requests += [
            predict(f"{kind}-as-{shape}", "m", encoded(accept=kind, form=shape))
            for shape in FORMS for kind in ("image/png", "application/json")
        ]  # fmt: skip
    requests += [predict(f"header-{kind}", "m", headers={"Accept": kind}) for kind in HEADERS]
    requests += [predict("query-before-header", "m", "?accept=image/png", headers={"Accept": "application/json"})]
    return [*requests, get("swagger", "/swagger.json")]


OWN = ["text/plain; charset=latin-1", "text/csv", "nonsense", "application/problem+json", "text/html"]
PARAMETERS = [
    predict(f"{kind}-{shape}", "m", encoded(accept=kind, form=shape))
    for kind in OWN
    for shape in ("text", "bytes", "dict")
]

AWKWARD: list[RecordedRequest] = [
    get("described", "/v2/models/awkward/"),
    predict("named", "awkward"),
    predict("given", "awkward", encoded(**{"class": "c", "with space": "s", "\u00e9": "e"})),
    get("swagger", "/swagger.json"),
]
INSTANCES = {
    "whole": "forms:whole", "static": "forms:Static", "ofclass": "forms:OfClass", "unfinished": "forms:unfinished",
    "bare": "forms:bare", "raising": "forms:raising", "attribute": "forms:attribute",
    "later": "forms:unfinished_metadata",
    "ofnone": "forms:of_none", "oftext": "forms:of_text", "ofpairs": "forms:of_pairs", "ofbytes": "forms:of_bytes",
    "ofnan": "forms:of_nan", "oflinks": "forms:of_links",
}  # fmt: skip


def described(name: str) -> list[RecordedRequest]:
    """Ask one entry point for all it may have."""
    return [
        get("metadata", f"/v2/models/{name}/"),
        get("all", "/v2/models/"),
        predict("predict", name),
        predict("predict-given", name, "?a=5&a-hyphen=6"),
        post("train", f"/v2/models/{name}/train/", keep={"UUID": r'"uuid": "(\w+)"'}),
        get("training", f"/v2/models/{name}/train/{{UUID}}", until='^404|"status": "(?!running)'),
        get("swagger", "/swagger.json"),
    ]


EMPTY = [
    get("D4", "/v2/models/empty/"),
    get("all", "/v2/models/"),
    predict("D22", "empty"),
    predict("with-a-body", "empty", value={"a": 1}),
    predict("with-a-bad-body", "empty", value="{bad"),
    post("D22-train", "/v2/models/empty/train/"),
    get("trainings", "/v2/models/empty/train/"),
    get("swagger", "/swagger.json"),
]
BUILT_IN = [
    get("models", "/v2/models/", unread=True),
    get("model", "/v2/models/deepaas-test/", unread=True),
    predict("D38", "deepaas-test"),
    form("predict", "deepaas-test", ("data", "x", "f.txt", "text/plain"), query="?parameter=1"),
    form("predict-choice", "deepaas-test", ("data", "x", "f.txt", "text/plain"),
        query="?parameter=1&parameter_three=bar"),
    form("predict-bad", "deepaas-test", ("data", "x", "f.txt", "text/plain"), query="?parameter=x&parameter_three=baz"),
    *(
        form(f"predict-as-{kind}", "deepaas-test", ("data", "x", "f.txt", "text/plain"), query="?parameter=1",
             headers={"Accept": kind}, unread=kind == "image/png")
        for kind in ("application/json", "text/plain", "image/png", "*/*", "text/html")
    ),
    post("train", "/v2/models/deepaas-test/train/"),
    post("train-it", "/v2/models/deepaas-test/train/?sleep=0", keep={"UUID": r'"uuid": "(\w+)"'}),
    get("trained", "/v2/models/deepaas-test/train/{UUID}", until='"status": "done'),
    get("swagger", "/swagger.json"),
]  # fmt: skip
MEDIA = (
    ("demo-image", b"\x89PNG", "i.png", "image/png"),
    ("demo-audio", "au", "a.wav", "audio/x-wav"),
    ("demo-video", "vi", "v.mp4", "video/mp4"),
)
DEMO: list[RecordedRequest] = [
    get("described", "/v2/models/demo/"),
    form("D39", "demo", *MEDIA, query="?demo-list-of-floats=1.5&demo-list-of-floats=2"),
    form("D39-outside", "demo", *MEDIA, query="?demo-int-range=101"),
    form("two-files", "demo", *MEDIA[:2], ("demo-dict", '{"a": 1}')),
    form("all-in-parts", "demo", *MEDIA, ("demo-str", "s"), ("demo-bool", "false"), ("demo-float", "1e-3")),
    get("swagger", "/swagger.json"),
]
KEPT: list[RecordedRequest] = [
    predict("first", "globals"),
    predict("second", "globals", "?give=y"),
    post("train", "/v2/models/globals/train/", keep={"UUID": r'"uuid": "(\w+)"'}),
    get("trained", "/v2/models/globals/train/{UUID}", until='"status": "done"'),
    predict("third", "globals"),
]
GROUPS = [
    group("demo", DEMO, models={"demo": "demo"}),
    group("globals", KEPT, models={"globals": "globals"}),
    group("returned", RESULTS, models={"returned": "returned"}),
    group("returned-and-lost", AWAY, models={"returned": "returned"}),
    group("raised", FAILS, models={"errs": "errs"}),
    group("ended", ENDS, models={"errs": "errs"}),
    group("raised-of-http", SAYS, models={"errs": "errs"}),
    group("after-a-death", AFTER, models={"errs": "errs"}),
    checked("schema-of-a-dict", "OfDict"),
    checked("schema-of-a-class", "OfClass"),
    checked("schema-of-an-empty-dict", "OfEmptyDict"),
    checked("schema-that-raises", "OfRaising"),
    checked("schema-that-excludes", "OfLoose"),
    checked("schema-of-the-seeds-attribute", "OfTheSeedsAttribute"),
    group("schema-of-dates", [*DATES, get("swagger", "/swagger.json")], models={"m": "schemas:OfDates"}),
    group("accept", accepting(), models={"m": "accepts"}),
    group("accept-in-headers", accepting(query=False), models={"m": "accepts:InHeaders"}),
    group("accept-json-first", accepting(), models={"m": "accepts:JsonFirst"}),
    group("accept-default-is-not-first", accepting(query=False), models={"m": "accepts:DefaultIsNotFirst"}),
    group("accept-required", accepting(query=False), models={"m": "accepts:Required"}),
    group("accept-with-parameters", PARAMETERS, models={"m": "accepts:Parameters"}),
    group("awkward", AWKWARD, models={"awkward": "awkward"}),
    group("too-few", [predict("none", "m"), predict("one", "m", "?given=a")], models={"m": "awkward:TooFew"}),
    group("too-many", [predict("none", "m"), predict("one", "m", "?given=a")], models={"m": "awkward:TooMany"}),
    group("positional", [predict("none", "m"), predict("one", "m", "?given=a")], models={"m": "awkward:Positional"}),
    *(group(f"form-{name}", described(name), models={name: point}) for name, point in INSTANCES.items()),
    group("empty", EMPTY, models={"empty": "empty"}),
    group("built-in", BUILT_IN, models={}),
]
