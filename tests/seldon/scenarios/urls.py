"""URLs and methods, and the answers of every component there."""

from __future__ import annotations

from .definitions import FORM, Group, RecordedRequest, get, giving, multipart, predict, rest, rpc

TEXT = {"strData": "x"}
ROW = {"data": {"names": ["a", "b"], "ndarray": [[1, 2]]}}
PATHS = [
    "/predict",
    "/api/v1.0/predictions",
    "/api/v0.1/predictions",
    "/send-feedback",
    "/api/v1.0/feedback",
    "/api/v0.1/feedback",
    "/transform-input",
    "/transform-output",
    "/route",
    "/aggregate",
    "/health/ping",
    "/health/status",
    "/api/v1.0/health/status",
    "/metadata",
    "/api/v1.0/metadata",
    "/seldon.json",
    "/",
    "/nope",
]
SURFACE: list[RecordedRequest] = [
    *(get(f"options{path}", path, method="OPTIONS") for path in PATHS),
    *(get(f"delete{path}", path, method="DELETE") for path in PATHS),
    *(get(f"get{path}", path, unread=path == "/seldon.json") for path in PATHS),
    *(rest(f"post-text{path}", path, TEXT) for path in PATHS),
    *(get(f"head{path}", path, method="HEAD") for path in PATHS if path != "/seldon.json"),
    *(rest(f"put{path}", path, TEXT, method="PUT") for path in ("/predict", "/nope", "/health/ping")),
    *(rest(f"patch{path}", path, TEXT, method="PATCH") for path in ("/predict", "/nope")),
    get("trace", "/predict", method="TRACE"),
    get("a-method-of-no-one", "/predict", method="PREDICT"),
    get("a-method-in-small-letters", "/predict?json=%7B%22strData%22:%22a%22%7D", method="get", unread=True),
    get("head-with-query", "/predict?json=%7B%22strData%22:%22a%22%7D", method="HEAD"),
    rest("head-with-body", "/predict", TEXT, method="HEAD"),
    get("options-with-origin", "/predict", method="OPTIONS", headers={"Origin": "http://a.example"}),
    get(
        "preflight",
        "/predict",
        method="OPTIONS",
        headers={
            "Origin": "http://a.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type, x-mine",
        },
    ),
    get(
        "preflight-of-an-unknown-url",
        "/nope",
        method="OPTIONS",
        headers={"Origin": "http://a.example", "Access-Control-Request-Method": "DELETE"},
    ),
    get("preflight-without-origin", "/predict", method="OPTIONS", headers={"Access-Control-Request-Method": "POST"}),
    predict("post-with-origin", TEXT, headers={"Origin": "http://a.example"}),
    predict("post-with-accept", TEXT, headers={"Accept": "text/html", "Accept-Encoding": "gzip"}),
    rest("trailing-slash", "/predict/", TEXT),
    get("trailing-slash-ping", "/health/ping/"),
    rest("two-slashes", "//predict", TEXT),
    rest("two-slashes-within", "/api//v1.0/predictions", TEXT, unread=True),
    get("two-slashes-get", "/health//ping?a=b"),
    rest("capitals", "/Predict", TEXT),
    rest("percent-encoded", "/%70redict", TEXT),
    rest("percent-encoded-slash", "/api%2Fv1.0/predictions", TEXT),
    rest("dots", "/x/../predict", TEXT),
    rest("with-a-query", "/api/v1.0/predictions?a=b", TEXT),
    rest("with-a-query-of-nothing", "/predict?", TEXT),
    rest("whole-url", "http://x/predict", TEXT),
    rest("a-longer-path", "/predict/more", TEXT),
    rest("combine", "/combine", TEXT),
    get("v2", "/v2x/health"),
    get("favicon", "/favicon.ico"),
    get("static", "/static/x"),
    get("unicode-url", "/%C3%A9"),
    get("ping-with-query", "/health/ping?a=b"),
    get("prometheus", "/metrics", port="metrics"),
    get("prometheus-head", "/metrics", method="HEAD", port="metrics"),
    get("prometheus-options", "/metrics", method="OPTIONS", port="metrics"),
    get("prometheus-post", "/metrics", method="POST", port="metrics", unread=True),
    get("prometheus-elsewhere", "/nope", port="metrics", unread=True),
    get("prometheus-slash", "/metrics/", port="metrics", unread=True),
]

FEEDBACK = {
    "request": {"data": {"names": ["a", "b"], "ndarray": [[1, 2]]}},
    "response": {"meta": {"routing": {"0": 3}}, "data": {"ndarray": [[0.9]]}},
    "reward": 1.0,
    "truth": {"data": {"ndarray": [[1]]}},
}
MESSAGES = {"seldonMessages": [ROW, TEXT]}
EVERYWHERE = [
    predict("predict", ROW),
    predict("predict-text", TEXT),
    predict("predict-tensor", {"data": {"tensor": {"shape": [1, 2], "values": [1, 2]}}}),
    rest("input", "/transform-input", ROW),
    rest("input-text", "/transform-input", TEXT),
    rest("input-tensor", "/transform-input", {"data": {"names": ["x"], "tensor": {"shape": [1, 2], "values": [1, 2]}}}),
    rest("output", "/transform-output", ROW),
    rest("output-bytes", "/transform-output", {"binData": "MTIz", "meta": {"puid": "p", "tags": {"a": 1}}}),
    rest("output-json", "/transform-output", {"jsonData": {"a": 1}}),
    rest("route", "/route", ROW),
    rest("aggregate", "/aggregate", MESSAGES),
    rest("feedback", "/send-feedback", FEEDBACK),
    rest("feedback-tensor", "/send-feedback", {"request": {"data": {"tensor": {"shape": [1], "values": [1]}}}}),
    get("health", "/health/status"),
    get("metadata", "/metadata"),
    rpc("rpc-predict", "Model/Predict", ROW),
    rpc("rpc-predict-text", "Model/Predict", TEXT),
    rpc("rpc-input", "Transformer/TransformInput", ROW),
    rpc("rpc-output", "OutputTransformer/TransformOutput", TEXT),
    rpc("rpc-route", "Router/Route", ROW),
    rpc("rpc-aggregate", "Combiner/Aggregate", MESSAGES),
    rpc("rpc-feedback", "Model/SendFeedback", FEEDBACK),
    rpc("rpc-metadata", "Model/Metadata", {}),
]

FEEDBACK_REQUESTS: list[RecordedRequest] = [
    *(
        predict(f"told-{name}", value)
        for name, value in {
            "ndarray": ROW,
            "floats": {"data": {"ndarray": [[1, 2.5]]}},
            "bools": {"data": {"ndarray": [[True]]}},
            "null": {"data": {"ndarray": [[None, 1]]}},
            "mixed": {"data": {"ndarray": [["a", 1.5, True]]}},
            "uint64": {"data": {"ndarray": [2**63]}},
            "object": {"data": {"ndarray": [2**64]}},
            "tensor": {"data": {"tensor": {"shape": [2, 1], "values": [1, 2]}}},
            "tensor-empty": {"data": {"tensor": {"shape": [0], "values": []}}},
            "names-null": {"data": {"names": None, "ndarray": [1]}},
            "names-text": {"data": {"names": "ab", "ndarray": [1]}},
            "names-object": {"data": {"names": {"a": 1}, "ndarray": [1]}},
            "no-data": {"data": {}},
            "text": TEXT,
            "bytes": {"binData": "MTIz"},
            "bytes-lenient": {"binData": "!!!"},
            "json": {"jsonData": {"a": [1, None]}},
            "meta": dict(ROW, meta={"puid": "p", "tags": {"a": 1}, "routing": {"x": 1}, "other": [None]}),
            "meta-null": dict(TEXT, meta={}),
        }.items()
    ),
    rest("told-input", "/transform-input", dict(ROW, meta={"tags": {"a": 1}})),
    rest("told-output", "/transform-output", dict(TEXT, meta={"puid": "p"})),
    rest("told-route", "/route", dict(ROW, meta={"tags": {"a": 1}, "puid": "p"})),
    get("told-routed", "/health/status"),
    rest("told-aggregate", "/aggregate", MESSAGES),
    predict("told-parts", multipart(("binData", b"\x00\xff", "f"), ("meta", '{"puid":"p"}')), type=FORM),
    *(
        rpc(f"told-rpc-{name}", "Model/Predict", value)
        for name, value in {
            "ndarray": ROW,
            "tensor": {"data": {"tensor": {"shape": [2, 1], "values": [1, 2]}}},
            "bools": {"data": {"ndarray": [[True]]}},
            "mixed": {"data": {"ndarray": [["a", 1, True]]}},
            "no-data": {"data": {}},
            "text": TEXT,
            "bytes": {"binData": "MTIz"},
            "json": {"jsonData": {"a": [1, None]}},
            "json-number": {"jsonData": 5},
            "meta": dict(ROW, meta={"puid": "p", "tags": {"a": 1}, "routing": {"x": 1}, "requestPath": {"m": "i"}}),
            "meta-metrics": dict(TEXT, meta={"metrics": [{"key": "k", "value": 0.1}]}),
        }.items()
    ),
    rpc("told-rpc-input", "Generic/TransformInput", ROW),
    rpc("told-rpc-aggregate", "Combiner/Aggregate", MESSAGES),
]

NAMED = [
    predict("two-columns", ROW),
    predict("three-columns", {"data": {"ndarray": [[1, 2, 3]]}}),
    predict("vector-has-no-names", {"data": {"ndarray": [1, 2]}}),
    predict("tensor", {"data": {"tensor": {"shape": [1, 1, 2], "values": [1, 2]}}}),
    predict("text", TEXT),
    rest("passes-through", "/transform-input", ROW),
    rest("output", "/transform-output", ROW),
    rest("route-has-them-too", "/route", ROW),
    rpc("rpc", "Model/Predict", ROW),
    rpc("rpc-passes-through", "Transformer/TransformInput", ROW),
]

GROUPS = [
    Group("surface", "plain.Ident", SURFACE),
    Group("everywhere-bare", "plain.Bare", EVERYWHERE),
    Group("everywhere-unfilled", "plain.Unfilled", EVERYWHERE),
    Group("told", "plain.Told", FEEDBACK_REQUESTS),
    Group("named", "plain.Named", NAMED),
    Group("named-in-an-attribute", "plain.NamedInAnAttribute", NAMED),
    Group("named-in-an-array", "plain.NamedInAnArray", NAMED[:3] + NAMED[-2:]),
    *(
        Group(
            f"signatures-{name.lower()}",
            f"signatures.{name}",
            EVERYWHERE[:1]
            + EVERYWHERE[3:4]
            + [
                rest("input-with-meta", "/transform-input", giving("x")),
                rest("output", "/transform-output", giving("x")),
                rest("route", "/route", ROW),
                rest("route-with-meta", "/route", giving("x")),
                rest("aggregate", "/aggregate", MESSAGES),
                rest("feedback", "/send-feedback", FEEDBACK),
                rpc("rpc-predict", "Model/Predict", ROW),
                rpc("rpc-input", "Transformer/TransformInput", giving("x")),
                rpc("rpc-route", "Router/Route", ROW),
                rpc("rpc-feedback", "Router/SendFeedback", FEEDBACK),
            ],
        )
        for name in ("One", "Two", "Three", "Four")
    ),
]
