"""A module that returns what it is asked to return."""

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import uuid

from webargs import fields


class Colour(enum.Enum):
    red = 1


class Number(enum.IntEnum):
    one = 1


class Word(str):
    pass


class Plain:
    pass


@dataclasses.dataclass
class Point:
    x: int = 1


Pair = collections.namedtuple("Pair", "left right")
DEEP = []
for _ in range(200):
    DEEP = [DEEP]


def _numpy(expression):
    import numpy as np

    return eval(expression, {"np": np})


def _local():
    return 1


RESULTS = {
    "text": "plain string",
    "empty-text": "",
    "accents": "h\u00e9llo \u4e16\u754c \U0001f600",
    "controls": "\x00\x01\t\n\r\x1f\x7f\u2028",
    "quotes": "\"\\/'<>&",
    "lone": "\ud800",
    "number": 7,
    "huge": 2**200,
    "negative": -1,
    "real": 0.1,
    "tiny": 1e-310,
    "big": 1e22,
    "whole-real": 1.0,
    "minus-zero": -0.0,
    "nan": float("nan"),
    "infinite": [float("inf"), float("-inf")],
    "true": True,
    "none": None,
    "list": [1, 2.5, "x"],
    "tuple": (1, (2, None)),
    "dict": {"b": 1, "a": {"c": []}},
    "int-keys": {1: "a", 2.5: "b", None: "c", True: "d"},
    "odd-keys": {(1, 2): "a"},
    "bytes-keys": {b"a": 1},
    "mixed-keys": {"1": "a", 1: "b"},
    "namedtuple": Pair(1, "x"),
    "ordered": collections.OrderedDict([("z", 1), ("y", 2)]),
    "default": collections.defaultdict(int, a=1),
    "counter": collections.Counter("aab"),
    "userdict": collections.UserDict(a=1),
    "deque": collections.deque([1]),
    "bytes": b"abc",
    "bytearray": bytearray(b"abc"),
    "set": {1},
    "frozenset": frozenset([1]),
    "range": range(3),
    "complex": 1j,
    "date": datetime.date(2020, 1, 2),
    "datetime": datetime.datetime(2020, 1, 2, 3, 4, 5),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=5),
    "path": pathlib.PurePosixPath("/a/b"),
    "enum": Colour.red,
    "int-enum": Number.one,
    "word": Word("a word"),
    "class": Plain,
    "object": Plain(),
    "dataclass": Point(),
    "deep": DEEP,
    "exception": ValueError("not raised"),
    "ellipsis": ...,
    "long-list": list(range(3000)),
}


def get_predict_args():
    return {"give": fields.Str(missing="text")}


def predict(give):
    if give.startswith("np."):
        return _numpy(give)
    if give == "generator":
        return (item for item in [1, 2])
    if give == "bytesio":
        return io.BytesIO(b"abc")
    if give == "stringio":
        return io.StringIO("abc")
    if give == "file":
        return open(__file__, "rb")
    if give == "text-file":
        return open(__file__)
    if give == "lambda":
        return lambda: 1
    if give == "function":
        return _local
    if give == "itself":
        itself = []
        itself.append(itself)
        return itself
    if give == "module":
        return io
    return RESULTS[give]
