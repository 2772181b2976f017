"""What a handler may return as content: every key of CONTENTS is a case, asked for by its name as the query.

Runs on Python 3.8 too, as everything in this folder does: the original is recorded with it.
"""

import array
import collections
import csv
import datetime
import decimal
import enum
import fractions
import io
import itertools
import mmap
import os
import pathlib
import tempfile
import types
import uuid

import numpy as np

PAIRS = [[("a", 1), ("b", 2)], [("a", 3), ("b", 4)]]
EVERY_BYTE = bytes(range(256))


class Iterable:
    def __iter__(self):
        return iter(["x", b"y", 3])


class Indexed:
    def __getitem__(self, at):
        return ["p", "q"][at]


class Dictionary(dict):
    pass


class Words(str):
    pass


class Octets(bytes):
    pass


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Falsy:
    def __bool__(self):
        return False

    def __iter__(self):
        return iter(["never seen"])


class Readable:
    def read(self, size=-1):
        return b"never read"


Point = collections.namedtuple("Point", "x y")


def some():
    yield "a"
    yield "b"


def failing():
    yield "a"
    raise RuntimeError("midway")


def opened(mode, content=b"line 1\nline 2\n"):
    handle, path = tempfile.mkstemp()
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    file = open(path, mode)
    os.unlink(path)
    return file


def mapped():
    with opened("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def table(*rows):
    file = io.StringIO(newline="")
    csv.writer(file).writerows(rows)
    file.seek(0)
    return file


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return {"a": value}


def circular():
    value = {}
    value["a"] = value
    return value


NOW = datetime.datetime(2019, 5, 1, 12, 30, 15, 123456)

CONTENTS = {
    # one value
    "text": lambda: "hello",
    "text-japanese": lambda: "日本",
    "text-empty": lambda: "",
    "text-newline": lambda: "a\nb\r\n",
    "text-nul": lambda: "a\0b",
    "text-surrogate": lambda: "\ud800",
    "text-long": lambda: "0123456789" * 2000,
    "text-subclass": lambda: Words("words"),
    "none": lambda: None,
    "integer": lambda: 3,
    "zero": lambda: 0,
    "negative": lambda: -7,
    "huge": lambda: 10**40,
    "float": lambda: 1.5,
    "float-zero": lambda: 0.0,
    "float-small": lambda: 1e-9,
    "float-nan": lambda: float("nan"),
    "float-infinite": lambda: float("-inf"),
    "true": lambda: True,
    "false": lambda: False,
    "complex": lambda: 1j,
    "decimal": lambda: decimal.Decimal("1.5"),
    "fraction": lambda: fractions.Fraction(1, 2),
    "datetime": lambda: NOW,
    "datetime-utc": lambda: NOW.replace(tzinfo=datetime.timezone.utc),
    "date": NOW.date,
    "time": NOW.time,
    "timedelta": lambda: datetime.timedelta(1),
    "uuid": lambda: uuid.UUID(int=1),
    "path": lambda: pathlib.PurePosixPath("a/b"),
    "enum": lambda: Colour.RED,
    "enum-integer": lambda: Level.LOW,
    "enum-class": lambda: Level,
    "object": object,
    "class": lambda: Readable,
    "function": lambda: some,
    "module": lambda: types,
    "ellipsis": lambda: ...,
    "exception": lambda: ValueError("x"),
    "readable-but-not-iterable": Readable,
    # mappings
    "dict": lambda: {"a": 1},
    "dict-empty": lambda: {},
    "dict-unsorted": lambda: {"b": 1, "a": 2},
    "dict-nested": lambda: {"a": {"b": [1, {"c": None}]}, "d": True},
    "dict-japanese": lambda: {"日": "本 é \U0001f600"},
    "dict-escapes": lambda: {'"\\/': "\b\f\n\r\t\0\x7f</script>"},
    "dict-floats": lambda: {"a": 0.1, "b": 1e100, "c": -0.0, "d": float("nan"), "e": float("inf"), "f": 1e16},
    "dict-integer-keys": lambda: {1: "a", 2.5: "b", True: "c", None: "d"},
    "dict-tuple-keys": lambda: {(1, 2): "a"},
    "dict-bytes-keys": lambda: {b"a": 1},
    "dict-bytes-values": lambda: {"a": b"x"},
    "dict-set-values": lambda: {"a": {1}},
    "dict-tuple-values": lambda: {"a": (1, 2), "b": Point(1, 2)},
    "dict-date": lambda: {"a": NOW.date()},
    "dict-datetime": lambda: {"a": NOW, "b": datetime.datetime(2019, 5, 1)},
    "dict-enum": lambda: {"a": Colour.RED},
    "dict-enum-integer": lambda: {"a": Level.LOW},
    "dict-decimal": lambda: {"a": decimal.Decimal(1)},
    "dict-object": lambda: {"a": object()},
    "dict-circular": circular,
    "dict-deep": lambda: nested(200),
    "dict-generator": lambda: {"a": (x for x in "ab")},
    "dict-surrogate": lambda: {"a": "\ud800"},
    "dict-large": lambda: {str(at): at for at in range(400)},
    "dict-subclass": lambda: Dictionary(a=1),
    "dict-ordered": lambda: collections.OrderedDict([("b", 1), ("a", 2)]),
    "dict-default": lambda: collections.defaultdict(list, a=[1]),
    "dict-counter": lambda: collections.Counter("aab"),
    "dict-keys": lambda: {"a": 1, "b": 2}.keys(),
    "dict-items": lambda: {"a": 1, "b": 2}.items(),
    "dict-chain-map": lambda: collections.ChainMap({"a": 1}),
    "dict-proxy": lambda: types.MappingProxyType({"a": 1, "b": 2}),
    "dict-user": lambda: collections.UserDict(a=1),
    # numpy
    "numpy": lambda: {
        "a": np.array([1.5]), "b": np.int64(3), "c": np.float32(0.1), "d": datetime.datetime(2019, 5, 1),
    },
    "numpy-kinds": lambda: {
        "u8": np.uint8(255), "i16": np.int16(-2), "f16": np.float16(0.1), "f64": np.float64(0.1),
        "longest": np.longdouble(0.5),
    },
    "numpy-matrix": lambda: {"a": np.arange(6).reshape(2, 3)},
    "numpy-empty": lambda: {"a": np.zeros((0, 3))},
    "numpy-scalar-array": lambda: {"a": np.array(5)},
    "numpy-bools": lambda: {"a": np.array([True, False])},
    "numpy-texts": lambda: {"a": np.array(["x", "yy"])},
    "numpy-octets": lambda: {"a": np.array([b"x"])},
    "numpy-dates": lambda: {"a": np.array(["2019-05-01"], dtype="datetime64[D]")},
    "numpy-complexes": lambda: {"a": np.array([1j])},
    "numpy-structured": lambda: {"a": np.array([(1, 2.5)], dtype=[("x", "i4"), ("y", "f8")])},
    "numpy-nan": lambda: {"a": np.array([np.nan, np.inf])},
    "numpy-bool": lambda: {"a": np.bool_(True)},
    "numpy-text": lambda: {"a": np.str_("x")},
    "numpy-date": lambda: {"a": np.datetime64("2019-05-01")},
    "numpy-complex": lambda: {"a": np.complex64(1j)},
    "numpy-key": lambda: {np.int64(1): "a"},
    "numpy-text-key": lambda: {np.str_("a"): 1},
    "numpy-list": lambda: {"a": [np.int64(1), np.float64(2.5), np.array([3])]},
    "array": lambda: np.array([1, 2]),
    "array-of-one": lambda: np.array([7]),
    "array-of-one-zero": lambda: np.array([0]),
    "array-of-one-row": lambda: np.array([[1.5]]),
    "array-scalar": lambda: np.array(7),
    "array-in-a-list": lambda: [np.array([1, 2])],
    "array-rows-in-a-list": lambda: list(np.arange(4).reshape(2, 2)),
    "array-of-octets-in-a-list": lambda: [np.array([104, 105], dtype=np.uint8)],
    "numpy-integer": lambda: np.int64(3),
    "numpy-float": lambda: np.float32(0.1),
    "numpy-true": lambda: np.bool_(True),
    "numpy-false": lambda: np.bool_(False),
    "numpy-word": lambda: np.str_("word"),
    "numpy-bytes": lambda: np.bytes_(b"hi"),
    # bytes and their like
    "bytes": lambda: b"hello",
    "bytes-empty": lambda: b"",
    "bytes-every": lambda: EVERY_BYTE,
    "bytes-subclass": lambda: Octets(b"hi"),
    "bytearray": lambda: bytearray(b"hello"),
    "bytearray-empty": lambda: bytearray(),
    "memoryview": lambda: memoryview(b"hello"),
    "memoryview-of-floats": lambda: memoryview(array.array("d", [1.5, 2.5])),
    "array-of-integers": lambda: array.array("i", [1, 2]),
    "array-of-bytes": lambda: array.array("B", b"hello"),
    "array-of-characters": lambda: array.array("u", "ab"),
    "memory-map": mapped,
    # files
    "bytes-io": lambda: io.BytesIO(b"line 1\nline 2\n"),
    "bytes-io-of-every-byte": lambda: io.BytesIO(EVERY_BYTE * 3),
    "bytes-io-empty": lambda: io.BytesIO(),
    "bytes-io-at-its-end": lambda: (lambda file: (file.read(), file)[1])(io.BytesIO(b"all read")),
    "bytes-io-midway": lambda: (lambda file: (file.read(3), file)[1])(io.BytesIO(b"abcdef")),
    "bytes-io-closed": lambda: (lambda file: (file.close(), file)[1])(io.BytesIO(b"abc")),
    "bytes-io-large": lambda: io.BytesIO(b"0123456789abcde\n" * 1000),
    "string-io": lambda: io.StringIO("x\ny"),
    "string-io-table": lambda: table(["a", "b"], [1, 2]),
    "file-binary": lambda: opened("rb"),
    "file-binary-empty": lambda: opened("rb", b""),
    "file-text": lambda: opened("r"),
    "file-unbuffered": lambda: io.FileIO(opened("rb").fileno(), closefd=False),
    "file-writable": lambda: opened("ab"),
    "file-buffered": lambda: io.BufferedReader(io.BytesIO(b"a\nb")),
    "file-temporary": lambda: (lambda f: (f.write(b"a\nb"), f.seek(0), f)[2])(tempfile.TemporaryFile()),
    "file-spooled": lambda: (lambda f: (f.write(b"a\nb"), f.seek(0), f)[2])(tempfile.SpooledTemporaryFile()),
    # many values
    "list-empty": lambda: [],
    "list-of-nothing": lambda: [None],
    "list-of-empty-text": lambda: [""],
    "list-of-empty-texts": lambda: ["", "", "x"],
    "list-of-empty-bytes": lambda: [b"", "x"],
    "list-of-text": lambda: ["a", "b"],
    "list-of-bytes": lambda: [b"a", b"b"],
    "list-of-integers": lambda: [1, 2, 3],
    "list-of-dicts": lambda: [{"a": 1}, {"b": 2}],
    "list-of-mixed": lambda: ["a", b"b", 3, {"c": 4}, None, True, 1.5, b"z"],
    "list-of-bytes-then-text": lambda: [b"a", "b", b"c", {"d": 1}],
    "list-of-bytes-likes": lambda: [b"a", bytearray(b"b"), array.array("B", b"c")],
    "list-of-one-bytearray": lambda: [bytearray(b"b")],
    "list-of-one-array": lambda: [array.array("B", b"c")],
    "list-of-integer-arrays": lambda: [array.array("i", [1]), b"x"],
    "list-of-memoryview": lambda: [memoryview(b"abc")],
    "list-of-memoryviews": lambda: [memoryview(b"abc"), b"d"],
    "list-of-lists": lambda: [[1, 2], [3]],
    "list-of-empty-lists": lambda: [[], [1]],
    "list-of-one-empty-list": lambda: [[]],
    "list-of-pair": lambda: [("a", 1), ("b", 2)],
    "list-of-pairs": lambda: [[("a", 1), ("b", 2)]],
    "list-of-many-pairs": lambda: PAIRS,
    "list-of-list-pairs": lambda: [[["a", 1], ["b", 2]]],
    "list-of-tuple-pairs": lambda: [(("a", 1), ("b", 2))],
    "list-of-repeated-pairs": lambda: [[("a", 1), ("a", 2)]],
    "list-of-pairs-with-integer-keys": lambda: [[(1, 2), (3, 4)]],
    "list-of-triples": lambda: [[(1, 2, 3)]],
    "list-of-two-letter-texts": lambda: [["ab", "cd"]],
    "list-of-longer-texts": lambda: [["abc"]],
    "list-of-unhashable-pairs": lambda: [[([1], 2)]],
    "list-of-dict-lists": lambda: [[{"a": 1}]],
    "list-of-two-key-dicts": lambda: [[{"a": 1, "b": 2}]],
    "list-of-files": lambda: [io.BytesIO(b"x")],
    "list-of-objects": lambda: ["a", object()],
    "list-of-nan": lambda: [float("nan")],
    "list-of-long": lambda: list(range(300)),
    "list-of-datetimes": lambda: [NOW],
    "list-of-ordered-dicts": lambda: [collections.OrderedDict(b=1, a=2)],
    "tuple": lambda: ("a", 1),
    "tuple-empty": lambda: (),
    "tuple-named": lambda: Point("x", 2),
    "set-of-one": lambda: {5},
    "set-empty": lambda: set(),
    "frozenset": lambda: frozenset(["only"]),
    "deque": lambda: collections.deque(["a", 1]),
    "range": lambda: range(3),
    "range-empty": lambda: range(0),
    "map": lambda: map(str, [1, 2]),
    "zip": lambda: zip("ab", [1, 2]),
    "enumerate": lambda: enumerate("ab"),
    "reversed": lambda: reversed(["a", "b"]),
    "chain": lambda: itertools.chain(["a"], [b"b"]),
    "iterator": lambda: iter(["a", "b"]),
    "iterator-empty": lambda: iter([]),
    "generator": some,
    "generator-of-bytes": lambda: (b"part %d;" % at for at in range(3)),
    "generator-of-dicts": lambda: ({"a": at} for at in range(2)),
    "generator-empty": lambda: (at for at in ()),
    "generator-failing": failing,
    "iterable": Iterable,
    "indexed-but-not-iterable": Indexed,
    "falsy": Falsy,
}  # fmt: skip

def plain(request, context):
    return {"content": CONTENTS[request.read().decode()]()}


def as_json(request, context):
    return {"content_type": "application/json; charset=utf8", "content": CONTENTS[request.read().decode()]()}
