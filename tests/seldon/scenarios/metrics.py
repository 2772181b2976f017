"""Metrics and tags, in answers and at the metrics port."""

from __future__ import annotations

from typing import Any

from .definitions import Group, get, predict, rest, rpc, words

ROW = {"data": {"ndarray": [[1, 2]]}}
METRIC_SETS = words(
    "all all made tagged tagged-otherwise tagged-method none-at-all more-keys negative-counter timer-long timer-short "
    "timer-zero nan infinite bool float64 unicode-tag total"
)
REFUSED = words(
    "float32 null tuple dict no-key no-type no-value bad-type small-type text-value null-value int-tag unspeakable "
    "one-bad"
)
TAGS = words("one many none-at-all null list number numpy int-key give")
PASSED = {"metrics": [{"key": "passed", "type": "GAUGE", "value": 1}], "tags": {"metrics": "all", "tags": "one"}}


def asking(**tags: str) -> dict[str, Any]:
    """Choose the metrics and tags from now on."""
    return dict(ROW, meta={"tags": tags})


FEEDBACK = {"request": {"data": {"ndarray": [[1]]}}, "reward": 0.5}
ENVIRONMENT = {
    "PREDICTIVE_UNIT_ID": "classifier",
    "PREDICTIVE_UNIT_IMAGE": "reg.io:5000/org/img:0.3",
    "SELDON_DEPLOYMENT_ID": "mine",
    "PREDICTOR_ID": "main",
    "PREDICTOR_LABELS": '{"version": "v7", "other": "x"}',
}

GROUPS = [
    Group(
        "metrics",
        "metered.Metered",
        [
            *(predict(f"{number}-{name}", asking(metrics=name)) for number, name in enumerate(METRIC_SETS)),
            predict("with-the-request's", dict(ROW, meta=PASSED)),
            rest("input", "/transform-input", asking(metrics="all")),
            rest("output", "/transform-output", asking(metrics="tagged")),
            rest("route", "/route", asking(metrics="all")),
            rest("aggregate", "/aggregate", [dict(ROW, meta=PASSED), dict(ROW, meta=PASSED)]),
            rest("feedback", "/send-feedback", FEEDBACK),
            rest("feedback-of-no-reward", "/send-feedback", {"reward": 0}),
            rest("feedback-of-a-negative-reward", "/send-feedback", {"reward": -2}),
            get("health", "/health/status"),
            get("exposition", "/metrics", port="metrics"),
        ],
    ),
    Group(
        "metrics-refused",
        "metered.Metered",
        [
            *(predict(name, asking(metrics=name)) for name in REFUSED),
            predict("and-then-a-good-one", asking(metrics="all")),
            get("health-after-bad-ones", "/health/status"),
            predict("bad-again", asking(metrics="no-key")),
            get("health-of-bad-ones", "/health/status"),
            get("exposition", "/metrics", port="metrics"),
        ],
    ),
    Group(
        "metrics-of-messages",
        "metered.Metered",
        [
            *(
                rpc(f"{number}-{name}", "Model/Predict", asking(metrics=name))
                for number, name in enumerate(METRIC_SETS)
            ),
            *(rpc(f"refused-{name}", "Model/Predict", asking(metrics=name)) for name in REFUSED),
            rpc("with-the-request's", "Model/Predict", dict(ROW, meta=PASSED)),
            rpc(
                "aggregate", "Combiner/Aggregate", {"seldonMessages": [dict(ROW, meta=PASSED), dict(ROW, meta=PASSED)]}
            ),
            rpc("feedback", "Model/SendFeedback", FEEDBACK),
            get("exposition", "/metrics", port="metrics"),
        ],
    ),
    Group(
        "metrics-broken",
        "metered.Broken",
        [
            get("before", "/metrics", port="metrics"),
            predict("taken", ROW),
            get("after", "/metrics", port="metrics", unread=True),
            get("forever", "/metrics", port="metrics", unread=True),
            predict("still-serving", ROW),
        ],
    ),
    Group(
        "tags",
        "metered.Metered",
        [
            *(predict(name, asking(tags=name)) for name in TAGS),
            predict(
                "beside-the-request's", dict(ROW, meta={"tags": {"tags": "one", "system": "the request's", "more": 1}})
            ),
            rest("text", "/predict", {"strData": "x", "meta": {"tags": {"tags": "one"}}}),
            rest("route", "/route", asking(tags="one")),
            rest("feedback", "/send-feedback", FEEDBACK),
            get("health", "/health/status"),
            *(rpc(f"rpc-{name}", "Model/Predict", asking(tags=name)) for name in TAGS),
            rpc("rpc-route", "Router/Route", asking(tags="one")),
        ],
    ),
    Group("attributes", "metered.Attributes", [predict("predict", ROW), get("health", "/health/status")]),
    Group(
        "everything",
        "metered.Everything",
        [
            predict("predict", ROW),
            predict(
                "over-the-request's", dict(ROW, meta={"tags": {"runtime": "the request's", "shared": "too", "a": 1}})
            ),
            rest("input", "/transform-input", ROW),
            rest("output", "/transform-output", {"strData": "x"}),
            rest("route", "/route", ROW),
            rest("aggregate", "/aggregate", [ROW, ROW]),
            rest("feedback", "/send-feedback", FEEDBACK),
            rpc("rpc-predict", "Model/Predict", ROW),
            rpc("rpc-route", "Router/Route", ROW),
            rpc("rpc-aggregate", "Generic/Aggregate", {"seldonMessages": [ROW]}),
            rpc("rpc-feedback", "Generic/SendFeedback", FEEDBACK),
        ],
    ),
    Group(
        "placed",
        "metered.Metered",
        [
            predict("C27", ROW),
            predict("with-a-path", dict(ROW, meta={"requestPath": {"before": "img:1"}})),
            predict("over-its-own-path", dict(ROW, meta={"requestPath": {"classifier": "other:1"}})),
            rest("route", "/route", ROW),
            rest(
                "aggregate",
                "/aggregate",
                [
                    dict(ROW, meta={"requestPath": {"a": "1"}}),
                    dict(ROW, meta={"requestPath": {"b": "2", "a": "3"}}),
                ],
            ),
            rest("feedback", "/send-feedback", FEEDBACK),
            predict("metered", asking(metrics="all")),
            predict("metered-as-a-label", asking(metrics="tagged")),
            get("health", "/health/status"),
            get("metadata", "/metadata"),
            get("exposition", "/metrics", port="metrics"),
            rpc("rpc-metadata", "Model/Metadata", {}),
            rpc("rpc-predict", "Model/Predict", ROW),
            rpc("rpc-feedback", "Model/SendFeedback", FEEDBACK),
        ],
        ENVIRONMENT,
    ),
    Group(
        "placed-without-an-image",
        "metered.Metered",
        [
            predict("predict", asking(metrics="all")),
            get("metadata", "/metadata"),
            get("exposition", "/metrics", port="metrics"),
            get("exposition-elsewhere", "/prometheus/mine", port="metrics"),
        ],
        {"PREDICTIVE_UNIT_ID": "alone", "PREDICTIVE_UNIT_METRICS_ENDPOINT": "/prometheus/mine"},
    ),
    Group(
        "metrics-not-shown",
        "metered.Metered",
        [
            predict("own", asking(metrics="all")),
            predict("passed", dict(ROW, meta=PASSED)),
            predict("refused", asking(metrics="no-key")),
            rest("aggregate", "/aggregate", [dict(ROW, meta=PASSED)]),
            rpc("rpc", "Model/Predict", asking(metrics="all")),
            rpc("rpc-passed", "Model/Predict", dict(ROW, meta=PASSED)),
        ],
        {"INCLUDE_METRICS_IN_CLIENT_RESPONSE": "yes"},
    ),
    Group(
        "metrics-of-the-wrong-case",
        "metered.Everything",
        [predict("shown", ROW)],
        {"INCLUDE_METRICS_IN_CLIENT_RESPONSE": "TRUE"},
    ),
    Group(
        "executor-disabled",
        "metered.Everything",
        [
            rest("feedback", "/send-feedback", FEEDBACK),
            get("exposition", "/metrics", port="metrics"),
        ],
        {"SELDON_EXECUTOR_ENABLED": "false"},
    ),
]
