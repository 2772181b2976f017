"""A component that returns the result that `meta.tags.give` requests: one of every kind."""

import collections
import dataclasses
import datetime
import decimal
import uuid

import numpy as np
from seldon_core.user_model import SeldonResponse

GRID = [[1, 2], [3, 4]]


class Shown:
    def __str__(self):
        return "shown"

    __repr__ = __str__


@dataclasses.dataclass
class Point:
    x: int
    y: float


class TextKind(str):
    pass


RESULTS = {
    "int8": np.array(GRID, np.int8),
    "int16": np.array(GRID, np.int16),
    "int32": np.array(GRID, np.int32),
    "int64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "uint8": np.array(GRID, np.uint8),
    "uint32": np.array(GRID, np.uint32),
    "uint64": np.array([[2**64 - 1]], np.uint64),
    "float16": np.array([[0.1, 65504]], np.float16),
    "float32": np.array([[0.1, 16777217]], np.float32),
    "float64": np.array([[0.1, 1e16, 1e22, 1e-7, -0.0, 5e-324]], np.float64),
    "longdouble": np.array([[0.5]], np.longdouble),
    "complex": np.array([[1 + 2j]]),
    "bools": np.array([[True, False]]),
    "texts": np.array([["a", "\xe9\u20ac"]]),
    "bytes-array": np.array([[b"a"]]),
    "objects": np.array([["a", 1, None, 2.5, True]], dtype=object),
    "object-numbers": np.array([[1, 2]], dtype=object),
    "dates": np.array(["2020-01-02"], "datetime64[D]"),
    "records": np.array([(1, 2.5)], [("a", np.int32), ("b", np.float64)]),
    "nan": np.array([[np.nan, np.inf, -np.inf]]),
    "scalar-array": np.array(5),
    "scalar-text": np.array("five"),
    "vector": np.array([1.5, 2]),
    "cube": np.arange(8).reshape(2, 2, 2),
    "no-rows": np.zeros((0, 3)),
    "no-columns": np.zeros((2, 0)),
    "empty": np.array([]),
    "transposed": np.arange(6).reshape(2, 3).T,
    "strided": np.arange(10)[::3],
    "masked": np.ma.array([1, 2], mask=[False, True]),
    "big-endian": np.array([[1, 258]], ">i4"),
    "matrix": np.matrix([[1, 2]]),
    "list-of-ints": [1, 2],
    "list-of-lists": [[1, 2.5], [3, 4]],
    "list-of-texts": ["a", "b"],
    "list-of-bools": [[True, False]],
    "list-mixed": [["a", 1.5, None]],
    "list-of-numbers-and-none": [1, None],
    "list-ragged": [[1], [2, 3]],
    "list-of-dicts": [{"a": 1}],
    "list-of-arrays": [np.array([1, 2])],
    "list-of-numpy-scalars": [np.float64(0.5), np.int64(3)],
    "list-of-float32": [np.float32(0.5)],
    "list-of-tuples": [(1, 2), (3, 4)],
    "list-of-bytes": [b"a"],
    "list-big-int": [2**70],
    "list-uint64": [2**63],
    "list-of-nan": [float("nan"), float("inf")],
    "list-empty": [],
    "list-of-empty": [[]],
    "list-of-complex": [1j],
    "dict": {"b": 1, "a": [1.5, None, True, "x"], "c": {"z": {}, "y": []}},
    "dict-empty": {},
    "dict-unicode": {"\xe9": "\u20ac\U0001f600\x7f\x00"},
    "dict-int-keys": {2: "b", 10: "a"},
    "dict-mixed-keys": {1: "a", "b": 2},
    "dict-none-key": {None: 1},
    "dict-bool-key": {True: 1},
    "dict-float-key": {1.5: 1},
    "dict-tuple-key": {(1, 2): 1},
    "dict-numpy-scalar": {"a": np.float32(0.5)},
    "dict-float64": {"a": np.float64(0.1)},
    "dict-int64": {"a": np.int64(1)},
    "dict-bool_": {"a": np.bool_(True)},
    "dict-array": {"a": np.array([1])},
    "dict-tuple": {"a": (1, 2)},
    "dict-set": {"a": {1}},
    "dict-bytes": {"a": b"x"},
    "dict-date": {"a": datetime.datetime(2020, 1, 2, 3, 4, 5), "b": datetime.date(2020, 1, 2)},
    "dict-decimal": {"a": decimal.Decimal("1.50")},
    "dict-uuid": {"a": uuid.UUID(int=5)},
    "dict-dataclass": {"a": Point(1, 2.0)},
    "dict-nan": {"a": float("nan"), "b": float("-inf")},
    "dict-big-int": {"a": 2**70},
    "dict-of-ints": {"a": 1, "b": -1, "c": 1.0},
    "dict-ordered": collections.OrderedDict([("z", 1), ("a", 2)]),
    "dict-default": collections.defaultdict(list, {"a": [1]}),
    "dict-text-kind": {TextKind("a"): TextKind("b")},
    "dict-surrogate": {"a": "\ud800"},
    "text": "hi",
    "text-empty": "",
    "text-unicode": "\xe9\u20ac\U0001f600 \" \\ / \n\t\x00\x7f\u2028 <&>",
    "text-kind": TextKind("kind"),
    "text-surrogate": "\ud800",
    "bytes": b"\x00\xff123",
    "bytes-empty": b"",
    "bytearray": bytearray(b"123"),
    "memoryview": memoryview(b"123"),
    "none": None,
    "int": 3,
    "float": 1.5,
    "bool": True,
    "numpy-scalar": np.float64(1.5),
    "numpy-bool": np.bool_(True),
    "tuple": (1, 2),
    "set": {1},
    "range": range(3),
    "object": Shown(),
    "response": SeldonResponse([1.5]),
    "response-in-response": SeldonResponse(SeldonResponse([1])),
    "response-of-none": SeldonResponse(None),
    "response-of-dict": SeldonResponse({"a": 1}),
    "response-of-text": SeldonResponse("x"),
    "response-tags": SeldonResponse([1], tags={"b": 2, "a": [1, {"c": None}]}),
    "response-tags-over": SeldonResponse([1], tags={"give": "over"}),
    "response-tags-list": SeldonResponse([1], tags=["ab"]),
    "response-tags-pairs": SeldonResponse([1], tags=[("k", "v")]),
    "response-tags-numpy": SeldonResponse([1], tags={"a": np.int64(1)}),
    "response-tags-int-key": SeldonResponse([1], tags={1: 1}),
    "response-metrics-empty": SeldonResponse([1], metrics=[]),
    "response-metrics-tuple": SeldonResponse([1], metrics=({"type": "COUNTER", "key": "k", "value": 1},)),
    "response-metrics-dict": SeldonResponse([1], metrics={"type": "COUNTER", "key": "k", "value": 1}),
    "response-metrics-bad": SeldonResponse([1], metrics=[{"type": "COUNTER", "key": "k"}]),
}


class Returning:
    def predict(self, X, names, meta=None):
        give = meta["tags"]["give"]
        if give == "response-metrics":
            metrics = [
                {"type": "COUNTER", "key": "runtime_counter", "value": 1},
                {"type": "GAUGE", "key": "runtime_gauge", "value": 2.5, "tags": {"mine": "yes"}},
                {"type": "TIMER", "key": "runtime_timer", "value": 20},
            ]
            return SeldonResponse(X, tags={"runtime": True}, metrics=metrics)
        if give == "generator":
            return (each for each in [1])
        return RESULTS[give]

    def transform_input(self, X, names, meta=None):
        return self.predict(X, names, meta)

    def transform_output(self, X, names, meta=None):
        return self.predict(X, names, meta)


class Healthy:
    """Reports the last prediction as its health, so that one server can report many kinds."""

    def __init__(self):
        self.give = "text"

    def predict(self, X, names, meta=None):
        self.give = meta["tags"]["give"]
        return []

    def health_status(self):
        return RESULTS[self.give]

    def metrics(self):
        return [{"type": "COUNTER", "key": "asked", "value": 1}]

    def tags(self):
        return {"well": "yes"}
