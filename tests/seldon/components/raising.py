"""A component that raises what the request chooses with `meta.tags.give` (`strData` of feedback's truth does not
arrive; there the first name chooses)."""

from seldon_core.flask_utils import SeldonMicroserviceException
from seldon_core.user_model import SeldonNotImplementedError


class Own(Exception):
    pass


class Unsaid(Exception):
    def __str__(self):
        return ""


class Teapot(SeldonMicroserviceException):
    status_code = 418


RAISED = {
    "value": lambda: ValueError("a value"),
    "nothing": lambda: ValueError(),
    "two": lambda: ValueError("a", 2),
    "key": lambda: KeyError("k"),
    "index": lambda: IndexError("list index out of range"),
    "zero": lambda: ZeroDivisionError("division by zero"),
    "own": lambda: Own("own \xe9\u20ac \"quoted\"\n<b>"),
    "unsaid": lambda: Unsaid("never said"),
    "assertion": lambda: AssertionError(),
    "stop": lambda: StopIteration("stopped"),
    "not-implemented": lambda: NotImplementedError("later"),
    "attribute": lambda: AttributeError("'X' object has no attribute 'y'"),
    "os": lambda: OSError(2, "No such file or directory", "model.bin"),
    "memory": lambda: MemoryError(),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "seldon": lambda: SeldonMicroserviceException("seldon's own"),
    "seldon-403": lambda: SeldonMicroserviceException("forbidden", status_code=403, reason="NOT_YOURS"),
    "seldon-payload": lambda: SeldonMicroserviceException("with payload", 429, {"a": 1}),
    "seldon-dict": lambda: SeldonMicroserviceException({"a": [1]}),
    "seldon-200": lambda: SeldonMicroserviceException("fine", status_code=200),
    "seldon-kind": lambda: Teapot("short and stout"),
    "unimplemented": lambda: SeldonNotImplementedError("not here"),
    "warning": lambda: UserWarning("careful"),
}


class Raising:
    def _give(self, meta):
        raise RAISED[meta["tags"]["give"]]()

    def predict(self, X, names, meta=None):
        self._give(meta)

    def transform_input(self, X, names, meta=None):
        self._give(meta)

    def transform_output(self, X, names, meta=None):
        self._give(meta)

    def route(self, X, names, meta=None):
        self._give(meta)

    def aggregate(self, Xs, names):
        raise RAISED[names[0][0]]()

    def send_feedback(self, X, names, reward, truth, routing=None):
        raise RAISED[names[0]]()

    def health_status(self):
        raise ValueError("unwell")


class RaisingElsewhere:
    """Raises in class_names, tags or metrics, as the request's `meta.tags.give` chooses."""

    def __init__(self):
        self.where = ""

    def predict(self, X, names, meta=None):
        self.where = meta["tags"]["give"]
        return X

    def class_names(self):
        return self._give("class_names", ["a"])

    def tags(self):
        return self._give("tags", {})

    def metrics(self):
        return self._give("metrics", [])

    def _give(self, where, otherwise):
        if self.where == where:
            raise RuntimeError("in " + where)
        return otherwise
