"""Components with as little code as possible."""

from seldon_core.user_model import SeldonComponent


class Ident:
    def predict(self, X, features_names=None):
        return X


class Bare:
    """No method at all."""


class Unfilled(SeldonComponent):
    """All methods of the base class, none of its own."""


class Told:
    """Returns its arguments as text: types, values, names and meta."""

    def predict(self, X, names, meta=None):
        return _describe(X, names, meta)

    def transform_input(self, X, names, meta=None):
        return _describe(X, names, meta)

    def transform_output(self, X, names, meta=None):
        return _describe(X, names, meta)

    def route(self, features, feature_names, meta=None):
        self.routed = _describe(features, feature_names, meta)
        return 1

    def aggregate(self, features_list, feature_names_list):
        return [_describe(*each, None) for each in zip(features_list, feature_names_list)]

    def health_status(self):
        return self.routed


def _describe(X, names, meta):
    named = type(names).__name__ if names is None or isinstance(names, (list, str)) else "names"
    listed = list(names) if isinstance(names, (list, tuple)) or named == "names" else names
    value = f"{X.dtype} {X.shape} {X.tolist()!r}" if hasattr(X, "dtype") else repr(X)
    return f"{type(X).__name__} {value} | {named} {listed!r} | {sorted(meta.items()) if meta else meta!r}"


class Keyed:
    """Takes parameters."""

    def __init__(self, **parameters):
        self.parameters = parameters

    def predict(self, X, names):
        return {name: [type(value).__name__, value] for name, value in self.parameters.items()}


class Loading:
    """Records its construction and loading, which precede predictions."""

    def __init__(self, count=1):
        self.done = ["init", count]

    def load(self):
        self.done.append("load")
        raise AttributeError("of a user's own mistake")

    def predict(self, X, names):
        return [str(each) for each in self.done]

    def class_names(self):
        return ["never", "asked"]


class Named:
    """Names fewer columns than its answers have."""

    def predict(self, X, names):
        return X

    def class_names(self):
        return ["a", "b"]

    def feature_names(self):
        return ["never", "used"]


class NamedInAnAttribute:
    class_names = ["a", "b"]

    def predict(self, X, names):
        return X

    def transform_output(self, X, names):
        return X.tolist() if hasattr(X, "tolist") else X


class NamedInAnArray:
    def predict(self, X, names):
        return X

    def class_names(self):
        import numpy as np

        return np.array(["a", "b"])
