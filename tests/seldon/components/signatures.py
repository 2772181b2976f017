"""The ways in which users write the arguments of their methods, several in each class."""

import functools


class One:
    def predict(self, X):
        return X

    def transform_input(self, X, names, meta):
        return ["with meta", str(meta)]

    def transform_output(self, X, names, **kw):
        return ["with keywords", str(kw)]

    def route(self, features, feature_names):
        return len(feature_names)

    def aggregate(self, Xs, features_names):
        return Xs[0]

    def send_feedback(self, features, feature_names, reward, truth):
        return ["without routing"]


class Two:
    def predict(self, *args):
        return [str(len(args))]

    def transform_input(self, *args, **kw):
        return [str(len(args)), str(sorted(kw))]

    def transform_output(self, X, names, *, meta):
        return ["keyword only", str(meta)]

    def route(self, features, feature_names, meta=None):
        return 7 if meta else 6

    def aggregate(self, Xs, features_names, meta=None):
        return [str(meta)]

    def send_feedback(self, features, feature_names, reward, truth, routing=None):
        return [str(routing)]


class Three:
    @staticmethod
    def predict(X, names, meta=None):
        return ["static", str(meta)]

    @classmethod
    def transform_input(cls, X, names):
        return ["class"]

    transform_output = functools.partial(lambda word, X, names: [word], "partial")

    route = None

    def aggregate(self, features_list, feature_names_list, extra):
        return [1]

    def send_feedback(self, features, feature_names, reward, truth, **kw):
        return [str(kw)]


class Four:
    def predict(self, meta, names):
        return [str(type(meta).__name__)]

    def transform_input(self):
        return [1]

    def transform_output(self, X, names, meta, more):
        return [1]

    def route(self, features):
        return 1

    def send_feedback(self, features, feature_names, reward, truth, routing):
        return {"routing": routing, "reward": reward}


class Once:
    """Counts its calls, and reports the count as its health."""

    def __init__(self):
        self.runs = 0

    def predict(self, X, n, **k):
        self.runs += 1
        raise TypeError("inner")

    def transform_input(self, X, names, meta=None):
        self.runs += 1
        raise TypeError("inner of a transformer")

    def transform_output(self, X, names, meta=None):
        """Fails only if it receives a meta."""
        self.runs += 1
        return [len(meta["tags"]), None + 1] if meta else ["without meta"]

    def route(self, X, names):
        self.runs += 1
        raise TypeError("inner of a router")

    def aggregate(self, Xs, names):
        self.runs += 1
        raise TypeError("inner of a combiner")

    def send_feedback(self, X, names, reward, truth, routing=None):
        self.runs += 1
        raise TypeError("inner of feedback")

    def health_status(self):
        runs, self.runs = self.runs, 0
        return [runs]
