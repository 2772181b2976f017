"""Routers, combiners and feedback."""

from __future__ import annotations

from typing import Any

from .definitions import FORM, URLENCODED, Group, Rest, get, giving, multipart, rest, rpc, words

ROUTES = words("zero one minus big bool float numpy text null list response response-of-text")
TENSOR = {"data": {"tensor": {"shape": [1, 2], "values": [1, 2]}}}
COMBINED = words("told names sum dict text bytes response number unimplemented first")
FED = words("told null list array texts text dict bytes int shown unimplemented response")


def messages(give: str) -> list[dict[str, Any]]:
    """Request a certain result from the combiner."""
    return [
        {"data": {"names": [give, "b"], "ndarray": [[1, 2]]}, "meta": {"puid": "p1", "tags": {"a": 1}}},
        {"data": {"ndarray": [[3, 5]]}, "meta": {"puid": "p2", "tags": {"a": 2, "b": 3}}},
    ]


C20 = {
    "seldonMessages": [
        {
            "meta": {"puid": "p1", "tags": {"a": 1}, "metrics": [{"type": "COUNTER", "key": "k", "value": 1}]},
            "data": {"names": ["sum"], "ndarray": [[1, 2]]},
        },
        {"meta": {"tags": {"a": 2, "b": 3}, "requestPath": {"m": "i"}}, "data": {"ndarray": [[3, 5]]}},
    ]
}


def aggregate(name: str, value: Any, **options: Any) -> Rest:
    """Post to /aggregate."""
    return rest(name, "/aggregate", value, **options)


def feedback(name: str, value: Any, **options: Any) -> Rest:
    """Post to /send-feedback."""
    return rest(name, "/send-feedback", value, **options)


def fed(give: str, **more: Any) -> dict[str, Any]:
    """Request a certain result from a component that takes feedback."""
    return dict({"request": {"data": {"names": [give], "ndarray": [[1, 2]]}}}, **more)


C21 = {
    "request": {"data": {"names": ["a", "b"], "ndarray": [[1, 2]]}},
    "response": {"meta": {"routing": {"0": 3}}, "data": {"ndarray": [[0.9]]}},
    "reward": 1.0,
    "truth": {"data": {"ndarray": [[1]]}},
}
FEEDBACKS = {
    "C21": C21,
    "reward-zero": dict(C21, reward=0),
    "reward-tenth": dict(C21, reward=0.1),
    "reward-text": dict(C21, reward="0.5"),
    "reward-word": dict(C21, reward="much"),
    "reward-null": dict(C21, reward=None),
    "reward-nan": dict(C21, reward="NaN"),
    "reward-too-big": dict(C21, reward=1e300),
    "reward-list": dict(C21, reward=[1]),
    "routing-of-another": dict(C21, response={"meta": {"routing": {"1": 3}}}),
    "routing-float": dict(C21, response={"meta": {"routing": {"0": 1.5}}}),
    "routing-negative": dict(C21, response={"meta": {"routing": {"0": -1}}}),
    "unknown-field": dict(C21, more=1),
    "unknown-field-within": {"request": {"data": {"names": [], "other": 1}}},
    "names-null": {"request": {"data": {"names": None, "ndarray": [1]}}},
    "names-number": {"request": {"data": {"names": [1], "ndarray": [1]}}},
    "two-payloads": {"request": {"strData": "a", "binData": "MTIz"}},
    "two-kinds": {"request": {"data": {"ndarray": [1], "tensor": {"shape": [1], "values": [1]}}}},
    "empty": {},
    "list": [],
    "list-of-one": [1],
    "text": '"x"',
    "null": "null",
    "tensor": {
        "request": {"data": {"tensor": {"shape": [2, 1], "values": [1, 2]}}},
        "truth": {"data": {"tensor": {"shape": [1], "values": [5]}}},
    },
    "tensor-of-another-size": {"request": {"data": {"tensor": {"shape": [2, 2], "values": [1, 2]}}}},
    "texts": {"request": {"data": {"ndarray": [["a", 1]]}}, "truth": {"data": {"ndarray": ["b"]}}},
    "bools": {"request": {"data": {"ndarray": [[True]]}}},
    "ragged": {"request": {"data": {"ndarray": [[1], [1, 2]]}}},
    "str-data": {"request": {"strData": "x"}, "truth": {"strData": "y"}},
    "bin-data": {"request": {"binData": "MTIz"}},
    "bin-data-bad": {"request": {"binData": "!"}},
    "json-data": {"request": {"jsonData": {"a": 1}}},
    "snake-case": {"request": {"str_data": "x"}},
    "meta": {"request": {"data": {"ndarray": [1]}, "meta": {"puid": "p", "tags": {"a": 1}, "requestPath": {"a": "b"}}}},
    "meta-metrics": {
        "request": {"data": {"ndarray": [1]}, "meta": {"metrics": [{"key": "k", "type": "TIMER", "value": 1}]}}
    },
    "meta-bad": {"request": {"meta": {"puid": 5}}},
    "status": {"request": {"status": {"code": 5, "status": "FAILURE"}, "data": {"ndarray": [1]}}},
    "metric-of-no-type": {"request": {"meta": {"metrics": [{"type": "HISTOGRAM"}]}}},
    "big-int": {"request": {"data": {"ndarray": [9007199254740993]}}},
    "only-truth": {"truth": {"data": {"ndarray": [[1.5, None]]}}},
    "only-reward": {"reward": 1},
}

GROUPS = [
    Group(
        "router",
        "wiring.Router",
        [
            *(rest(f"C8-{give}" if give == "one" else give, "/route", giving(give)) for give in ROUTES),
            rest("for-a-tensor", "/route", giving("one", **TENSOR)),
            rest(
                "for-a-text",
                "/route",
                {"strData": "x", "meta": {"puid": "p", "tags": {"give": "one"}, "requestPath": {"a": "b"}}},
            ),
            rest("for-bytes", "/route", {"binData": "MTIz", "meta": {"tags": {"give": "zero"}}}),
            rest("of-no-data", "/route", giving("one", data={})),
            rest("for-nothing", "/route", {}),
            rest("for-a-list", "/route", [1]),
            get(
                "query",
                "/route?json=%7B%22strData%22%3A%22a%22%2C%22meta%22%3A%7B%22tags%22%3A%7B%22give%22%3A%22one%22%7D%7D%7D",
            ),
            rest("predict", "/predict", giving("one")),
            *(rpc(f"rpc-{give}", "Router/Route", giving(give)) for give in ROUTES),
            rpc("rpc-for-a-tensor", "Generic/Route", giving("one", **TENSOR)),
            rpc("rpc-for-a-text", "Router/Route", {"strData": "x", "meta": {"puid": "p", "tags": {"give": "one"}}}),
        ],
    ),
    Group(
        "combiner",
        "wiring.Combiner",
        [
            aggregate("C20-like", C20),
            *(aggregate(give, {"seldonMessages": messages(give)}) for give in COMBINED),
            *(aggregate(f"list-{give}", messages(give)) for give in ("told", "sum")),
            aggregate(
                "mixed-kinds", [{"strData": "a"}, {"binData": "MTIz"}, {"jsonData": [1]}, {"data": {"ndarray": [1]}}]
            ),
            aggregate("tensor-first", [dict(TENSOR), {"data": {"ndarray": [1]}}]),
            aggregate(
                "tensor-first-sum",
                [{"data": {"names": ["sum"], "tensor": {"shape": [1, 2], "values": [1, 2]}}}, TENSOR],
            ),
            aggregate("empty-list", []),
            aggregate("empty-messages", {"seldonMessages": []}),
            aggregate("messages-null", {"seldonMessages": None}),
            aggregate("messages-object", {"seldonMessages": {"a": 1}}),
            aggregate("no-messages", {"strData": "x"}),
            aggregate("empty", {}),
            aggregate("body-number", "5"),
            aggregate("body-text", '"seldonMessages"'),
            aggregate("body-null", "null"),
            aggregate("message-of-nothing", [{}]),
            aggregate("message-null", [None]),
            aggregate("message-number", [{"strData": "x"}, 5]),
            aggregate("meta-null", [{"strData": "x", "meta": None}]),
            aggregate("meta-null-second", [{"strData": "x"}, {"strData": "x", "meta": None}]),
            aggregate("names-null", [{"data": {"names": None, "ndarray": [[1]]}}]),
            aggregate(
                "metrics-merge",
                [
                    {"data": {"names": ["first"], "ndarray": [1]}, "meta": {"metrics": [{"a": 1}]}},
                    {"strData": "x", "meta": {"metrics": [{"b": 1}], "requestPath": {"x": "y"}}},
                ],
            ),
            aggregate("tags-of-a-list", [{"strData": "x", "meta": {"tags": [1]}}]),
            aggregate("parts", multipart(("seldonMessages", '[{"strData":"a"}]')), type=FORM),
            aggregate("form", 'json=[{"strData":"a"}]', type=URLENCODED),
            rpc("rpc-C20-like", "Combiner/Aggregate", C20),
            *(rpc(f"rpc-{give}", "Combiner/Aggregate", {"seldonMessages": messages(give)}) for give in COMBINED),
            rpc(
                "rpc-mixed-kinds",
                "Generic/Aggregate",
                {
                    "seldonMessages": [
                        {"strData": "a"},
                        {"binData": "MTIz"},
                        {"jsonData": [1]},
                        {"data": {"ndarray": [1]}},
                    ]
                },
            ),
            rpc("rpc-empty", "Combiner/Aggregate", {}),
            rpc("rpc-message-of-nothing", "Combiner/Aggregate", {"seldonMessages": [{}]}),
            rpc(
                "rpc-path-merges",
                "Combiner/Aggregate",
                {
                    "seldonMessages": [
                        {"strData": "x", "meta": {"requestPath": {"a": "1"}}},
                        {"strData": "x", "meta": {"requestPath": {"b": "2"}}},
                    ]
                },
            ),
        ],
    ),
    Group(
        "fed",
        "wiring.Fed",
        [
            *(feedback(name, value) for name, value in FEEDBACKS.items()),
            *(feedback(f"gives-{give}", fed(give)) for give in FED),
            *(
                feedback(
                    f"gives-{give}-for-a-tensor",
                    {"request": {"data": {"names": [give], "tensor": {"shape": [1], "values": [1]}}}},
                )
                for give in ("null", "list", "array", "texts", "dict")
            ),
            rest("longer-path", "/api/v1.0/feedback", C21),
            rest("oldest-path", "/api/v0.1/feedback", C21),
            get("query", "/send-feedback?json=%7B%22reward%22%3A1%7D"),
            feedback("form", 'json={"reward":1}', type=URLENCODED),
            feedback("parts", multipart(("request", '{"data":{"ndarray":[1]}}'), ("reward", "2")), type=FORM),
            get("exposition", "/metrics", port="metrics"),
            *(
                rpc(f"rpc-{name}", "Model/SendFeedback", FEEDBACKS[name])
                for name in (
                    "C21",
                    "reward-tenth",
                    "routing-of-another",
                    "empty",
                    "tensor",
                    "tensor-of-another-size",
                    "texts",
                    "ragged",
                    "str-data",
                    "meta",
                    "only-truth",
                )
            ),
            *(rpc(f"rpc-gives-{give}", "Router/SendFeedback", fed(give)) for give in FED),
        ],
    ),
    Group(
        "fed-quietly",
        "wiring.FedQuietly",
        [
            feedback("C21-null", C21),
            feedback("tensor", {"request": {"data": {"tensor": {"shape": [1], "values": [1]}}}, "reward": 2}),
            feedback("for-a-text", {"request": {"strData": "x"}}),
            feedback("puid", {"request": {"meta": {"puid": "p", "tags": {"mine": 1}}}}),
            get("exposition", "/metrics", port="metrics"),
            rpc("rpc", "Model/SendFeedback", C21),
        ],
    ),
    Group(
        "fed-by-name",
        "wiring.Fed",
        [
            feedback("routing-by-its-name", dict(C21, response={"meta": {"routing": {"0": 3, "eg-router": 1}}})),
            rpc(
                "rpc-routing-by-its-name",
                "Router/SendFeedback",
                dict(C21, response={"meta": {"routing": {"0": 3, "eg-router": 1}}}),
            ),
        ],
        {"PREDICTIVE_UNIT_ID": "eg-router"},
    ),
    Group(
        "once",
        "signatures.Once",
        [
            request
            for number, one in enumerate(
                [  # REST only: seldon-core's gRPC server has its own copy of the component
                    rest("C26", "/predict", giving("x")),
                    rest("input", "/transform-input", giving("x")),
                    rest("output-fails-for-its-meta", "/transform-output", giving("x")),
                    rest("output-of-no-meta", "/transform-output", {"strData": "x"}),
                    rest("route", "/route", giving("x")),
                    aggregate("aggregate", [{"strData": "x"}]),
                    feedback("feedback", C21),
                ]
            )
            for request in (one, get(f"runs-of-{number}", "/health/status"))
        ],
    ),
]
