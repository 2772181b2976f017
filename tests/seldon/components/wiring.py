"""Routers, combiners and components that take feedback."""

import numpy as np
from seldon_core.user_model import SeldonComponent, SeldonNotImplementedError, SeldonResponse

ROUTES = {
    "zero": 0,
    "one": 1,
    "minus": -1,
    "big": 2**40,
    "bool": True,
    "float": 1.0,
    "numpy": np.int64(2),
    "text": "1",
    "null": None,
    "list": [1],
    "response": SeldonResponse(1, tags={"a": "b"}, metrics=[{"type": "COUNTER", "key": "routed", "value": 1}]),
    "response-of-text": SeldonResponse("x"),
}


class Router:
    def route(self, features, feature_names, meta=None):
        return ROUTES[meta["tags"]["give"]]

    def tags(self):
        return {"by": "router"}

    def class_names(self):
        return ["branch"]


class Combiner:
    """Returns what the first message's first name requests."""

    def aggregate(self, features_list, feature_names_list):
        give = feature_names_list[0][0] if feature_names_list[0] else "told"
        if give == "told":
            return [type(features_list).__name__, str([type(each).__name__ for each in features_list])]
        if give == "names":
            return [str([list(names) for names in feature_names_list])]
        if give == "sum":
            return sum(features_list)
        if give == "dict":
            return {"count": len(features_list)}
        if give == "text":
            return "text"
        if give == "bytes":
            return b"bytes"
        if give == "response":
            return SeldonResponse([1.5], tags={"a": "own"}, metrics=[{"type": "GAUGE", "key": "g", "value": 2}])
        if give == "number":
            return 1
        if give == "unimplemented":
            raise SeldonNotImplementedError("aggregate is not for this")
        return features_list[0]

    def metrics(self):
        return [{"type": "COUNTER", "key": "combined", "value": 1}]


class Fed:
    """Returns the feedback it received; `names[0]` of the request chooses another kind of answer."""

    def send_feedback(self, features, feature_names, reward, truth, routing=None):
        give = feature_names[0] if len(feature_names) else "told"
        if give == "null":
            return None
        if give == "list":
            return [1, 2.5]
        if give == "array":
            return np.array([[1, 2]])
        if give == "texts":
            return ["a"]
        if give == "text":
            return "fine"
        if give == "dict":
            return {"a": [1, None, "x"]}
        if give == "bytes":
            return b"123"
        if give == "int":
            return 5
        if give == "shown":
            return ("a", 1)
        if give == "unimplemented":
            raise SeldonNotImplementedError("not for this")
        if give == "response":
            return SeldonResponse(None, tags={"a": 1}, metrics=[{"type": "COUNTER", "key": "fed", "value": 1}])
        feedback = {
            "features": [str(features.dtype), features.tolist()],
            "truth": [str(truth.dtype), truth.tolist()],
            "names": list(feature_names),
            "reward": repr(reward),
            "routing": repr(routing),
        }
        return feedback


class FedQuietly:
    def send_feedback(self, features, feature_names, reward, truth, routing=None):
        return None

    def tags(self):
        return {"by": "feedback"}

    def metrics(self):
        return [
            {"type": "COUNTER", "key": "fed_counter", "value": 1},
            {"type": "GAUGE", "key": "fed_gauge", "value": 1, "tags": {"a": "b"}},
            {"type": "TIMER", "key": "fed_timer", "value": 1.5},
        ]
