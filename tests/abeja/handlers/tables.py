"""What a handler may return as text/csv: every key of TABLES is a case, asked for by its name as the query."""

import collections
import io
import types

import numpy as np
from contents import NOW, PAIRS, Dictionary, table

AB = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
TYPES = {
    "": "text/csv",
    "-with-a-charset": "text/csv; charset=shift_jis",
    "-in-capitals": "TEXT/CSV",
    "-with-spaces": "  text/csv ; x=y",
    "-of-tabs": "text/tab-separated-values",
    "-of-another-csv": "application/csv",
}

TABLES = {
    "dicts": lambda: AB,
    "dict": lambda: {"a": 1, "b": 2},
    "dict-empty": lambda: {},
    "pairs": lambda: PAIRS,
    "one-list-of-pairs": lambda: [("a", 1), ("b", 2)],
    "ordered": lambda: [collections.OrderedDict([("b", 1), ("a", 2)]), {"a": 3, "b": 4}],
    "fewer-keys": lambda: [{"a": 1, "b": 2}, {"a": 3}],
    "more-keys": lambda: [{"a": 1}, {"a": 2, "b": 3}],
    "other-keys": lambda: [{"a": 1}, {"b": 2}],
    "none": lambda: [{"a": None, "b": ""}],
    "only-none": lambda: [{"a": None}],
    "only-empty": lambda: [{"a": ""}],
    "quotes": lambda: [{"a": 'say "x"', "b": "1,2", "c": "x\ny", "d": "'", "e": "x\ry", "f": " y "}],
    "quoted-keys": lambda: [{'a"b': 1, "c,d": 2, " e": 3}],
    "integer-keys": lambda: [{1: "a", 2.5: "b", None: "c"}],
    "kinds": lambda: [{"a": 1.5, "b": True, "c": 1e100, "d": 10**30, "e": float("nan"), "f": NOW, "g": b"x"}],
    "nested": lambda: [{"a": [1, 2], "b": {"c": 1}, "d": (1,)}],
    "numpy": lambda: [{"a": np.array([1, 2]), "b": np.bool_(True)}],
    "japanese": lambda: [{"日": "本"}],
    "surrogate": lambda: [{"a": "\ud800"}],
    "text": lambda: "a,b\r\n1,2\r\n",
    "texts": lambda: ["a,b", "1,2"],
    "text-then-dicts": lambda: ["title", *AB],
    "dicts-then-text": lambda: [*AB, "end"],
    "bytes-then-dicts": lambda: [b"x\n", *AB],
    "dicts-then-bytes": lambda: [*AB, b"end"],
    "integers": lambda: [1, 2],
    "number": lambda: 5,
    "dict-then-integer": lambda: [{"a": 1}, 5],
    "dict-then-list": lambda: [{"a": 1}, [1]],
    "dict-then-none": lambda: [{"a": 1}, None],
    "lists": lambda: [[1, 2], [3, 4]],
    "empty-lists": lambda: [[], []],
    "empty-dicts": lambda: [{}, {}],
    "generator": lambda: ({"a": at} for at in range(3)),
    "string-io": lambda: table(["a", "b"], [1, 2]),
    "bytes-io": lambda: io.BytesIO(b"a,b\r\n1,2\r\n"),
    "bytes": lambda: b"a,b",
    "nothing": lambda: None,
    "counter": lambda: [collections.Counter("aab")],
    "subclass": lambda: [Dictionary(a=1)],
    "proxy": lambda: [types.MappingProxyType({"a": 1})],
    "user-dict": lambda: [collections.UserDict(a=1)],
    "chain-map": lambda: [collections.ChainMap({"a": 1})],
    "long": lambda: [{"n": at, "square": at * at} for at in range(500)],
    "formula": lambda: [{"a": "=1+1", "b": "-1", "c": "@x"}],
}  # fmt: skip


def handler(request, context):
    name, _, kind = request.read().decode().partition("/")
    return {"content_type": TYPES[kind], "content": TABLES[name]()}
