"""Knowledge about Python's own functions and common packages: which of them do not keep their arguments.

Used by the analysis in `state_analysis.py`. A name not listed here counts as keeping something, or as a library
function that does not.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import numpy as np

from .writes import FIRST_ARGUMENT_MUTATORS, MUTATING_METHODS

MUTATORS = frozenset(
    {name for name in MUTATING_METHODS if not name.startswith("__")}
    | FIRST_ARGUMENT_MUTATORS
    | {"setfield", "setflags", "byteswap", "setitem", "delitem", "iadd", "iconcat"}
)
"""Methods that modify their object, and functions that modify their first argument."""

KEEPS_NOTHING = frozenset((
    "abs", "all", "any", "ascii", "bin", "bool", "bytearray", "bytes", "callable", "chr", "complex", "divmod", "float",
    "format", "frozenset", "hash", "hex", "id", "int", "isinstance", "issubclass", "len", "object", "oct", "ord", "pow",
    "print", "range", "repr", "round", "slice", "str",
))  # fmt: skip
"""Builtins whose result contains no part of their arguments."""
PASSES_ON = frozenset((
    "dict", "enumerate", "filter", "list", "map", "max", "min", "reversed", "set", "sorted", "sum",
    "tuple", "zip",
))  # fmt: skip
"""Builtins whose result may contain parts of their arguments."""
PLAIN_NAMES = frozenset(("__file__", "__name__", "__doc__", "Ellipsis", "NotImplemented", "__debug__"))

READS = frozenset((
    "all", "any", "argmax", "argmin", "argsort", "capitalize", "count", "cumsum", "decode", "dot", "endswith", "find",
    "format", "hex", "index", "isdigit", "isdisjoint", "issubset", "issuperset", "item", "join", "lower", "lstrip",
    "max", "mean", "min", "prod", "rfind", "rstrip", "startswith", "std", "strip", "sum", "title", "tobytes", "upper",
    "var", "zfill",
))  # fmt: skip
"""Methods of texts, containers and arrays whose result contains no part of them."""
GIVES_PART = frozenset((
    "astype", "copy", "difference", "flatten", "get", "intersection", "items", "keys", "partition", "ravel", "replace",
    "repeat", "reshape", "rpartition", "rsplit", "split", "splitlines", "squeeze", "swapaxes", "take", "tolist",
    "transpose", "union", "values", "view", "symmetric_difference", "expandtabs", "encode",
)) - MUTATORS  # fmt: skip
"""Methods of texts, containers and arrays whose result may contain parts of them."""
READ_ATTRIBUTES = frozenset(
    ("dtype", "itemsize", "name", "nbytes", "ndim", "shape", "size", "type", "T", "real", "imag")
)
TAKES = READS | frozenset(("get", "intersection", "difference", "union", "isin", "matmul", "replace", "split"))
"""Methods of any object that may be passed containers, and do not keep them."""

LOGS = frozenset((
    "debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor",
))  # fmt: skip

PURE_STDLIB = frozenset((
    "base64", "binascii", "bisect", "calendar", "cmath", "codecs", "collections", "colorsys", "contextlib", "copy",
    "csv", "dataclasses", "datetime",
    "decimal", "difflib", "enum", "errno", "fnmatch", "fractions", "functools", "glob",
    "gzip", "hashlib", "heapq", "hmac", "html", "io", "itertools", "json", "logging", "math", "numbers", "operator",
    "os", "pathlib", "pickle", "pprint", "random", "re", "secrets", "statistics", "string", "struct", "tempfile",
    "textwrap", "time", "traceback", "typing", "unicodedata", "urllib", "uuid", "zipfile", "zlib", "zoneinfo",
    "__future__", "abc", "bz2", "lzma", "tarfile", "email", "http", "xml", "ast", "keyword", "reprlib", "array",
))  # fmt: skip
"""Standard modules whose functions keep nothing, except those matched by SETS. All others may."""
OF_OS = re.compile(
    r"os\.(path\.\w+|environ\.get|environ\.items|environ\.keys|getenv|getpid|cpu_count|urandom|fspath|fsencode|fsdecode"
    r"|listdir|scandir|walk|stat|access|getcwd|sched_getaffinity)"
)
SETS = re.compile(
    r"^_?(seed|manual_seed|set|put|store|register|unregister|setlocale|simplefilter|filterwarnings|basicConfig|disable|enable|reset"
    r"|configure|install|init|initialize|push|cache|memoize|add|append|update|clear|patch|use|activate|global|keep"
    r"|remember|save_state|restore|getcontext|setcontext|localcontext|field_size_limit|install_opener|addLevelName"
    r"|captureWarnings|pack_into|shutdown|capture|warn|warn_explicit|register_error|setstate)(?![a-z])"
)
"""Names of functions that set something: what a library keeps, another call may see."""
NOT_SETS = re.compile(r"(numpy|operator|cv2|tensorflow|torch)\.(math\.)?(add\w*|append|put\w*)")
COPIES = re.compile(
    r"json\.dumps|copy\.deepcopy|math\.\w+|numpy\.(array|sum|mean|dot|matmul|argmax|argmin|argsort|max|min|exp|log|sqrt"
    r"|add|subtract|multiply|divide|concatenate|stack|vstack|hstack|append|sort|insert|delete|resize|partition|unique"
    r"|where|isin|allclose|array_equal|float\d+|int\d+|uint8|linalg\.\w+)|re\.\w+|os\.path\.\w+|base64\.\w+|hashlib\.\w+"
    r"|datetime\.\w+(\.\w+)?|time\.\w+|statistics\.\w+|struct\.(pack|unpack|iter_unpack|unpack_from|calcsize)|string\.\w+|urllib\.parse\.\w+"
)
"""Functions whose result contains no part of their arguments."""
CONSTANTS = re.compile(r"(numpy|math|string|tensorflow)\.\w+$")
"""Library attributes known to be constant, if they are not called."""
FILE_WRITERS = frozenset((
    "write_text", "write_bytes", "touch", "mkdir", "makedirs", "unlink", "rmdir", "rename", "symlink_to", "hardlink_to",
    "tofile", "savetxt", "savez", "savez_compressed", "to_csv", "to_json", "to_pickle", "to_parquet", "imwrite",
    "imsave", "save", "save_model", "upload_file", "upload_fileobj", "put_object", "download_file", "download_fileobj",
    "urlretrieve", "extractall", "extract", "mkfifo", "mknod", "link", "symlink", "truncate", "rmtree", "copyfile",
    "copytree", "dump", "mkstemp", "mkdtemp",
))  # fmt: skip
"""Methods and functions that leave something on disk, or elsewhere outside the process."""

FIXED_MAKERS = re.compile(
    r"re\.compile|math\.\w+|os\.path\.\w+|os\.getenv|os\.environ\.get|os\.getcwd|datetime\.\w+(\.\w+)?|time\.\w+|uuid\.\w+"
    r"|json\.dumps|hashlib\.\w+|pathlib\.(Pure)?Path|decimal\.Decimal|base64\.\w+|struct\.calcsize|string\.Template"
    r"|numpy\.(float|int|uint)\d+|numpy\.dtype|operator\.(itemgetter|attrgetter)|struct\.Struct"
)
ARRAY_MAKERS = re.compile(
    r"numpy\.(array|asarray|zeros|ones|full|empty|eye|arange|linspace|load|loadtxt|genfromtxt|frombuffer|fromfile"
    r"|concatenate|stack|vstack|hstack|reshape|expand_dims|transpose|random\.(rand|randn|random|normal|uniform))"
)
PLAIN_MAKERS = re.compile(
    r"json\.loads?|yaml\.(safe_|full_)?load|copy\.(deep)?copy|collections\.(OrderedDict|Counter)|ast\.literal_eval"
    r"|tomllib\.loads?|msgpack\.unpackb?"
)
TEXT_METHODS = {
    "read": "FIXED", "readline": "FIXED", "decode": "FIXED", "strip": "FIXED", "lower": "FIXED", "upper": "FIXED",
    "format": "FIXED", "join": "FIXED", "readlines": "FLAT", "split": "FLAT", "splitlines": "FLAT",
    "read_text": "FIXED", "read_bytes": "FIXED", "json": "PLAIN", "tolist": "PLAIN",
}  # fmt: skip
"""The kind of value that these methods return, for any object."""
TEXT_ATTRIBUTES = frozenset(("text", "content", "status_code"))
SAFE_DUNDERS = frozenset(("__name__", "__doc__", "__len__", "__version__", "__file__"))
SIMPLE_BASES = re.compile(r"(\w+\.)*(\w*(Error|Exception|Warning)|NamedTuple|Enum|IntEnum|TypedDict|Protocol)")


@functools.cache
def out_position(path: str) -> int:
    """Return the position of the output array among a numpy function's arguments; sys.maxsize if there is none."""
    function: Any = np
    for name in path.split(".")[1:]:
        function = getattr(function, name, None)
    if isinstance(function, np.ufunc):
        return int(function.nin)
    try:
        names = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):
        return 2
    return names.index("out") if "out" in names else sys.maxsize
