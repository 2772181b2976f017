"""Components with metrics and tags, which the last request chose."""

import numpy as np
from seldon_core.metrics import create_counter, create_gauge, create_timer
from seldon_core.user_model import SeldonNotImplementedError, SeldonResponse

METRICS = {
    "all": lambda: [
        {"type": "COUNTER", "key": "mycounter", "value": 1},
        {"type": "GAUGE", "key": "mygauge", "value": 100},
        {"type": "TIMER", "key": "mytimer", "value": 20.2},
    ],
    "made": lambda: [create_counter("made_counter", 2), create_gauge("made_gauge", 2.5), create_timer("made_timer", 3)],
    "tagged": lambda: [{"type": "COUNTER", "key": "tagged", "value": 1, "tags": {"mytag": "v"}}],
    "tagged-otherwise": lambda: [{"type": "COUNTER", "key": "tagged", "value": 2, "tags": {"mytag": "w", "a": "b"}}],
    "tagged-method": lambda: [{"type": "GAUGE", "key": "tagged_method", "value": 2, "tags": {"method": "mine"}}],
    "none-at-all": lambda: [],
    "more-keys": lambda: [{"type": "GAUGE", "key": "more_keys", "value": 1, "note": "kept"}],
    "negative-counter": lambda: [{"type": "COUNTER", "key": "negative", "value": -1.5}],
    "timer-long": lambda: [{"type": "TIMER", "key": "long_timer", "value": 60000}],
    "timer-short": lambda: [{"type": "TIMER", "key": "long_timer", "value": 0.5}],
    "timer-zero": lambda: [{"type": "TIMER", "key": "long_timer", "value": 0}],
    "nan": lambda: [{"type": "GAUGE", "key": "nan_gauge", "value": float("nan")}],
    "infinite": lambda: [{"type": "GAUGE", "key": "inf_gauge", "value": float("inf")}],
    "bool": lambda: [{"type": "GAUGE", "key": "bool_gauge", "value": True}],
    "float64": lambda: [{"type": "GAUGE", "key": "float64_gauge", "value": np.float64(0.5)}],
    "float32": lambda: [{"type": "GAUGE", "key": "float32_gauge", "value": np.float32(0.5)}],
    "unicode-tag": lambda: [{"type": "GAUGE", "key": "unicode_gauge", "value": 1, "tags": {"t": "\xe9\"\\\n"}}],
    "total": lambda: [{"type": "COUNTER", "key": "already_total", "value": 1}],
    "null": lambda: None,
    "tuple": lambda: ({"type": "COUNTER", "key": "k", "value": 1},),
    "dict": lambda: {"type": "COUNTER", "key": "k", "value": 1},
    "no-key": lambda: [{"type": "COUNTER", "value": 1}],
    "no-type": lambda: [{"key": "k", "value": 1}],
    "no-value": lambda: [{"type": "COUNTER", "key": "k"}],
    "bad-type": lambda: [{"type": "HISTOGRAM", "key": "k", "value": 1}],
    "small-type": lambda: [{"type": "counter", "key": "k", "value": 1}],
    "text-value": lambda: [{"type": "COUNTER", "key": "k", "value": "1"}],
    "null-value": lambda: [{"type": "COUNTER", "key": "k", "value": None}],
    "int-tag": lambda: [{"type": "COUNTER", "key": "k", "value": 1, "tags": {"a": 1}}],
    "unspeakable": lambda: [{"type": "COUNTER", "key": "k", "value": object}],
    "one-bad": lambda: METRICS["all"]() + [{"type": "COUNTER", "key": "k"}],
}
TAGS = {
    "one": {"system": "production"},
    "many": {"b": [1, 2.5, None], "a": {"x": True}, "c": "\xe9"},
    "none-at-all": {},
    "null": None,
    "list": ["ab", "cd"],
    "number": 5,
    "numpy": {"a": np.int64(1)},
    "int-key": {1: "a"},
    "give": {"metrics": "over the request's"},
}


class Metered:
    """`meta.tags.metrics` chooses the result of metrics() from then on, `meta.tags.tags` that of tags()."""

    def __init__(self):
        self.tags = {}

    def predict(self, X, names, meta=None):
        self.tags = (meta or {}).get("tags", {})
        return X

    def transform_input(self, X, names, meta=None):
        return self.predict(X, names, meta)

    def transform_output(self, X, names, meta=None):
        return self.predict(X, names, meta)

    def route(self, X, names, meta=None):
        self.predict(X, names, meta)
        return 0

    def aggregate(self, Xs, names):
        return Xs[0]

    def send_feedback(self, X, names, reward, truth, routing=None):
        return None

    def metrics(self):
        if "metrics" not in self.tags:
            raise SeldonNotImplementedError("not now")
        return METRICS[self.tags["metrics"]]()

    def tags(self):
        if "tags" not in self.tags:
            raise SeldonNotImplementedError("not now")
        return TAGS[self.tags["tags"]]


class Broken:
    """Reports a metric whose key is not a valid Prometheus name."""

    def predict(self, X, names):
        return X

    def metrics(self):
        return [{"type": "COUNTER", "key": "bad key-1", "value": 1}]


class Attributes:
    """Has attributes where methods are expected."""

    tags = {"a": "b"}
    metrics = [{"type": "COUNTER", "key": "k", "value": 1}]

    def predict(self, X, names):
        return X


class Everything:
    """Static and runtime tags and metrics together, wherever a SeldonResponse may be returned."""

    def _respond(self, result, word):
        metrics = [{"type": "COUNTER", "key": "instance_counter", "value": 1}]
        return SeldonResponse(data=result, metrics=metrics, tags={"runtime": word, "shared": "right one"})

    def predict(self, X, names=[], meta={}):
        return self._respond(X, "predict")

    def transform_input(self, X, names=[], meta={}):
        return self._respond(X, "input")

    def transform_output(self, X, names=[], meta={}):
        return self._respond(X, "output")

    def route(self, X, names=[]):
        return self._respond(2, "route")

    def aggregate(self, Xs, names=[]):
        return self._respond(Xs[0], "aggregate")

    def send_feedback(self, X, names, reward, truth, routing=None):
        return self._respond([reward], "feedback")

    def metrics(self):
        return [{"type": "COUNTER", "key": "requests_counter", "value": 1}]

    def tags(self):
        return {"static": "tag", "shared": "not right one"}
