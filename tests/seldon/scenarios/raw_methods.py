"""The raw methods, the legacy methods before them, and the settings that affect them."""

from __future__ import annotations

from .definitions import FORM, URLENCODED, Group, get, giving, multipart, predict, rest, rpc, words

REPLIES = words(
    "dict unsorted empty list text number true null status-400 status-418 status-204 status-minus status-zero "
    "status-1000 status-text status-phrase status-null status-float status-of-no-code status-empty status-is-null "
    "status-is-text status-is-list meta-null meta-text metrics metrics-of-no-key metrics-of-no-type metrics-tagged "
    "unspeakable raise unimplemented seldon message echo"
)
PROTO_REPLIES = words("dict empty status-400 metrics metrics-tagged raise unimplemented seldon message echo")
SOME = words("dict status-400 metrics null raise unimplemented")
ROW = {"data": {"names": ["a"], "ndarray": [[1, 2]]}}
FEEDBACK = {"request": {"strData": "x", "data": None}, "reward": 1}

LEGACY = [
    predict("predict", ROW),
    predict("predict-list", [1]),
    rest("input", "/transform-input", ROW),
    rest("output", "/transform-output", ROW),
    rest("route", "/route", ROW),
    rest("aggregate", "/aggregate", [ROW]),
    rest("aggregate-anything", "/aggregate", {"a": 1}),
    rest("feedback", "/send-feedback", {"request": {"strData": "x"}, "reward": 1}),
    rpc("rpc-predict", "Model/Predict", ROW),
    rpc("rpc-input", "Transformer/TransformInput", ROW),
    rpc("rpc-output", "OutputTransformer/TransformOutput", ROW),
    rpc("rpc-route", "Router/Route", ROW),
    rpc("rpc-aggregate", "Combiner/Aggregate", {"seldonMessages": [ROW]}),
    rpc("rpc-feedback", "Model/SendFeedback", {"request": {"strData": "x"}, "reward": 1}),
]
MESSAGE = {"jsonData": {"b": "\xe9", "a": [1, 2.5]}}

GROUPS = [
    Group(
        "raw",
        "raw.Raw",
        [
            *(predict(give, giving(give)) for give in REPLIES),
            predict("body-list", ["echo", 1]),
            predict("body-nothing", b""),
            rest("predictions", "/api/v1.0/predictions", giving("status-418")),
            predict("parts", multipart(("meta", '{"tags":{"give":"echo"}}'), ("binData", b"123", "f")), type=FORM),
            predict("parts-text", multipart(("meta", '{"tags":{"give":"echo"}}'), ("strData", "x")), type=FORM),
            *(rest(f"input-{give}", "/transform-input", giving(give)) for give in SOME),
            *(rest(f"output-{give}", "/transform-output", giving(give)) for give in SOME),
            *(rest(f"route-{give}", "/route", giving(give)) for give in SOME),
            rest("aggregate", "/aggregate", {"seldonMessages": ["x"]}),
            rest("aggregate-list", "/aggregate", [{"a": 1}]),
            rest("aggregate-raises", "/aggregate", ["raise"]),
            *(
                rest(f"feedback-{give}", "/send-feedback", {"request": {"strData": give}})
                for give in ("x", "raise", "unimplemented", "dict", "null", "metrics")
            ),
            get("health", "/health/status"),
            *(rpc(f"rpc-{give}", "Model/Predict", giving(give)) for give in PROTO_REPLIES),
            rpc("rpc-input", "Transformer/TransformInput", giving("dict")),
            rpc("rpc-input-raises", "Transformer/TransformInput", giving("raise")),
            rpc("rpc-output", "OutputTransformer/TransformOutput", giving("metrics")),
            rpc("rpc-route", "Router/Route", giving("echo")),
            rpc("rpc-route-unimplemented", "Router/Route", giving("unimplemented")),
            rpc("rpc-aggregate", "Combiner/Aggregate", {"seldonMessages": [{"strData": "x"}]}),
            rpc("rpc-feedback", "Model/SendFeedback", {"request": {"strData": "metrics"}}),
            rpc("rpc-feedback-null", "Model/SendFeedback", {"request": {"strData": "null"}}),
            rpc("rpc-feedback-dict", "Model/SendFeedback", {"request": {"strData": "dict"}}),
        ],
    ),
    Group(
        "raw-metrics",
        "raw.Raw",
        [
            predict("metrics", giving("metrics")),
            predict("metrics-tagged", giving("metrics-tagged")),
            predict("metrics-of-no-type", giving("metrics-of-no-type")),
            rest("feedback", "/send-feedback", {"request": {"strData": "metrics"}, "reward": 1.5}),
            rest("route", "/route", giving("metrics")),
            get("exposition", "/metrics", port="metrics"),
        ],
    ),
    Group(
        "raw-metrics-not-shown",
        "raw.Raw",
        [
            predict("metrics", giving("metrics")),
            rest("feedback", "/send-feedback", {"request": {"strData": "metrics"}}),
            get("exposition", "/metrics", port="metrics"),
            rpc("rpc-metrics", "Model/Predict", giving("metrics")),
        ],
        {"INCLUDE_METRICS_IN_CLIENT_RESPONSE": "false"},
    ),
    Group(
        "raw-of-the-other-kind",
        "raw.RawHealthInAMessage",
        [
            get("health", "/health/status"),
            predict("predict", ROW),
            rpc("rpc-predict", "Model/Predict", ROW),
        ],
    ),
    Group("legacy", "raw.Legacy", LEGACY),
    Group("legacy-over-grpc", "raw.LegacyOverGrpc", LEGACY),
    Group(
        "passed",
        "raw.Passed",
        [
            *(predict(word, word, type="text/plain") for word in ("text", "dict", "list", "null", "raise", "else")),
            predict("json", {"a": 1}),
            predict("bytes", b"\x00\xff", type="application/octet-stream"),
            predict("no-type", b"abc", type=""),
            predict("nothing", b""),
            get("get", "/predict"),
            get("query", "/predict?json=x"),
            predict("form", "json=y", type=URLENCODED),
            predict("form-of-others", "a=y", type=URLENCODED),
            predict("parts", multipart(("strData", "x")), type=FORM),
            rest("longer-path", "/api/v1.0/predictions", b"abc"),
            rest("only-predict-passes", "/transform-input", {"strData": "x"}),
            rpc("rpc", "Model/Predict", {"strData": "x"}),
        ],
        {"PAYLOAD_PASSTHROUGH": "true"},
    ),
    Group(
        "passed-to-an-ordinary-class",
        "plain.Ident",
        [
            predict("json", {"strData": "a"}),
            rest("input", "/transform-input", {"strData": "a"}),
        ],
        {"PAYLOAD_PASSTHROUGH": "1"},
    ),
    Group(
        "printed-prettily",
        "plain.Ident",
        [
            predict("json", MESSAGE),
            predict("array", ROW),
            predict("refused", "{"),
            get("metadata", "/metadata"),
            get("ping", "/health/ping"),
        ],
        {"FLASK_JSONIFY_PRETTYPRINT_REGULAR": "true"},
    ),
    Group(
        "printed-as-it-is",
        "plain.Ident",
        [
            predict("json", MESSAGE),
            predict("array", ROW),
            predict("refused", "{"),
            get("metadata", "/metadata"),
        ],
        {"FLASK_JSON_SORT_KEYS": "0", "FLASK_JSON_AS_ASCII": "f"},
    ),
    Group(
        "keyed",
        "plain.Keyed",
        [predict("parameters", ROW)],
        {
            "PREDICTIVE_UNIT_PARAMETERS": '[{"name":"foo","value":"bar","type":"STRING"},'
            '{"name":"n","value":" 3 ","type":"INT"},'
            '{"name":"f","value":"1e3","type":"FLOAT"},{"name":"d","value":"0.1","type":"DOUBLE"},'
            '{"name":"b","value":"True","type":"BOOL"},'
            '{"name":"no","value":"off","type":"BOOL"}]',
        },
    ),
    Group(
        "keyed-by-an-argument",
        "plain.Keyed",
        [predict("parameters", ROW)],
        {
            "PREDICTIVE_UNIT_PARAMETERS": '[{"name":"foo","value":"unread","type":"STRING"}]',
        },
        [
            "--parameters",
            '[{"name":"n","value":"3","type":"INT"}]',
            "--service-type",
            "ROUTER",
            "--persistence",
            "--log-level",
            "ERROR",
        ],
    ),
    Group("loading", "plain.Loading", [predict("once", ROW)]),
]
