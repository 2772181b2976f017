"""Key checks: checks for the values in penstock.toml, one function per kind. Used by penstock_toml.py.

Each is a Check: it takes a value from the file and returns it in the form that a ParsedConfig holds. It raises
ValueError with a description of the accepted values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d*)")
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,9})?) ?([kKMGT]i?)?B", re.ASCII)
_UNITS = ("", "k", "m", "g", "t")
_INT64 = 2**63 - 1
NAME_MAX_BYTES = 255
"""The longest file name that file systems accept."""
_DAY_MS = 86_400_000

Check = Callable[[Any], Any]
"""Converts a value from the file to its form in a ParsedConfig. Raises ValueError with the accepted values."""


def integer(low: int, high: int = _INT64) -> Check:
    """Accept an integer."""

    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"an integer of at least {low}" if high == _INT64 else f"an integer from {low} to {high}")
        return value

    return check


def seconds(value: Any) -> float:
    """Accept a time in seconds."""
    if type(value) not in {int, float} or not 0 < value <= 86400:
        raise ValueError("a number of seconds above 0, at most 86400")
    return float(value)


def milliseconds(value: Any) -> int:
    """Accept a time in milliseconds. Returns: microseconds."""
    if type(value) not in {int, float} or not 0 < value <= _DAY_MS:
        raise ValueError(f"a number of milliseconds above 0, at most {_DAY_MS}")
    micros: int = max(1, round(value * 1000))
    return micros


def megabytes(value: Any) -> int:
    """Accept a size in megabytes. Returns: bytes."""
    size: int = integer(1, 1 << 40)(value)
    return size << 20


def size(value: Any) -> int:
    """Accept a size, in bytes or with a unit: "4 GiB" is 2^32, "4 GB" is 4 * 10^9. Returns: bytes."""
    match = _SIZE.fullmatch(value) if type(value) is str else None
    if match is not None:
        unit = (match[2] or "").lower()
        multiplier = (1024 if unit.endswith("i") else 1000) ** _UNITS.index(unit.removesuffix("i"))
        value = int(Decimal(match[1]) * multiplier)
    if type(value) is not int or not 0 < value <= _INT64:
        raise ValueError('a number of bytes above 0, or a size such as "4 GiB" or "500 MB"')
    return value


def number(value: Any) -> float:
    """Accept any number."""
    if type(value) not in {int, float}:
        raise ValueError("a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("a number that a double can hold") from None


def string(value: Any) -> str:
    """Accept a string."""
    if type(value) is not str or not value:
        raise ValueError("a string")
    return value


def strings(value: Any) -> tuple[str, ...]:
    """Accept a list of strings."""
    if type(value) is not list or not value or not all(type(each) is str and each for each in value):
        raise ValueError("a list of strings")
    return tuple(value)


def file_name(value: Any) -> str:
    """Accept the name of a file."""
    if type(value) is not str or not is_file_name(value):
        raise ValueError("the name of a file in the version's folder")
    return value


def boolean(value: Any) -> bool:
    """Accept true or false."""
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def flag(value: Any) -> str:
    """Accept true or false, for a runtime's option."""
    return "1" if boolean(value) else "0"


def graphs(value: Any) -> str:
    """Accept true, false or "auto", for a runtime's option."""
    if value == "auto":
        return "auto"
    if type(value) is not bool:
        raise ValueError('true, false or "auto"')
    return flag(value)


def option(check: Callable[[str], str]) -> Check:
    """Accept the TOML value of a runtime's option whose `check` takes a string."""

    def checked(value: Any) -> str:
        if type(value) not in {bool, int, str}:
            raise ValueError("true or false, an integer or a text")
        return check(str(value))

    return checked


def threads(value: Any) -> str:
    """Accept a number of threads."""
    return str(integer(1, 4096)(value))


def fraction(value: Any) -> str:
    """Accept a fraction, for a runtime's option."""
    if type(value) not in {int, float} or not 0 <= value <= 1:
        raise ValueError("a number from 0 to 1")
    return str(float(value))


def choice(**values: Any) -> Check:
    """Accept one of some words. Returns: the value that the word stands for."""

    def check(value: Any) -> Any:
        if type(value) is not str or value not in values:
            raise ValueError("one of " + ", ".join(f'"{name}"' for name in values))
        return values[value]

    return check


def sizes(value: Any) -> tuple[int, ...]:
    """Accept a list of sizes, in any order."""
    if type(value) is not list or not value or not all(type(size) is int and 0 < size <= _INT64 for size in value):
        raise ValueError("a list of integers above 0")
    return tuple(sorted(set(value)))


def buckets(value: Any) -> tuple[int, ...]:
    """Accept a list of sizes, in ascending order."""
    ascending = sizes(value)
    if list(ascending) != value:
        raise ValueError("a list of integers above 0, each above the one before")
    return ascending


def axes(value: Any) -> dict[str, int]:
    """Accept a table of names, each with an axis."""
    if type(value) is not dict or not all(type(axis) is int and 0 <= axis <= _INT64 for axis in value.values()):
        raise ValueError("a table of outputs, each with its axis: { name = 0 }")
    return value


def count(value: Any) -> int:
    """Accept a number of Instances, or "auto". Returns: 0 for "auto"."""
    if value == "auto":
        return 0
    if type(value) is not int or not 1 <= value <= 1024:
        raise ValueError('an integer from 1 to 1024, or "auto"')
    return value


def versions(value: Any) -> tuple[str, Any]:
    """Accept a choice of versions to serve."""
    if value == "all":
        return "all", ()
    if type(value) is list and value and all(type(item) is int and 0 < item <= _INT64 for item in value):
        return "specific", tuple(sorted(set(value)))
    if type(value) is dict and list(value) == ["latest"] and type(value["latest"]) is int and value["latest"] > 0:
        return "latest", min(value["latest"], 2**32 - 1)
    raise ValueError('"all", a list of versions, or { latest = n }')


def devices(value: Any) -> tuple[str, ...]:
    """Accept a list of devices."""
    if type(value) is not list or not value or len(set(map(str, value))) < len(value):
        raise ValueError('a list of devices, each once ("cpu", "cuda:0", ...)')
    for device in value:
        if type(device) is not str or not _DEVICE.fullmatch(device):
            raise ValueError('a list of devices ("cpu", "cuda:0", ...)')
    return tuple(value)


def replicas(value: Any) -> int | str:
    """Accept a number of replicas."""
    if value == "shared":
        return "shared"
    if type(value) is not int or not 1 <= value <= 4096:
        raise ValueError('an integer from 1 to 4096, or "shared"')
    return value


def table(value: Any) -> Any:
    """Accept any table."""
    if type(value) is not dict:
        raise ValueError("a table")
    return value


def is_file_name(name: str) -> bool:
    """Return whether `name` is one path component: it names an entry of a folder, never the folder itself."""
    if not name or name in {".", ".."} or set(name) & {"/", "\\", "\0"}:
        return False
    return len(name.encode("utf-8", "surrogatepass")) <= NAME_MAX_BYTES
