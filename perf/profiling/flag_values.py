"""Flags' values: parses numbers, ranges and shapes. Invalid values are rejected as perf_analyzer rejects them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .flags import UsageError
from .options import Range

UNBOUNDED = 0
_IDS = 1 << 64
"""The number of values of an id, or of an integer parameter."""


class FlagValues:
    """The flags of one command line, by key."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for key, value in pairs:
            self._values.setdefault(key, []).append(value)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def times(self, key: str) -> int:
        return len(self._values.get(key, ()))

    def each(self, key: str) -> list[str]:
        return self._values.get(key, [])

    def text(self, key: str, default: str = "") -> str:
        """Return the last one."""
        return self._values.get(key, [default])[-1]

    def number(self, key: str, default: Any, *, minimum: float = 1, number_type: type = int, name: str = "") -> Any:
        """Return the last one as a number of at least `minimum`. Raises: UsageError."""
        if key not in self._values:
            return default
        value = number(key, self.text(key), number_type)
        if value < minimum:
            condition = f">= {minimum}" if minimum != 1 or number_type is float else "> 0"
            raise UsageError(f"Failed to parse {name or shown(key)}. The value must be {condition}.")
        return value

    def one_of(self, key: str, choices: Sequence[str], default: str) -> str:
        """Return the last one, which must be one of `choices`. Raises: UsageError."""
        value = self.text(key, default)
        if value not in choices:
            listed_choices = ", ".join(f"'{each}'" for each in choices[:-1]) + f" or '{choices[-1]}'"
            raise UsageError(
                f"Failed to parse {shown(key)}. Unsupported type provided: '{value}'."
                f" The available options are {listed_choices}."
            )
        return value

    def file(self, key: str) -> str:
        """Return the last one, which must be a file. Raises: UsageError."""
        value = self.text(key)
        if key in self and not Path(value).is_file():
            raise UsageError(f"Failed to parse {shown(key)}. The value must be a valid file path.")
        return value


def range_of(flags: FlagValues, key: str, number_type: type) -> Range:
    """Parse START:END:STEP, where END and STEP are optional. Raises: UsageError."""
    values = flags.text(key, "1").split(":")
    if len(values) > 3:
        raise UsageError(f"Failed to parse {shown(key)}. The value does not match <start:end:step>.")
    numbers = [number(key, value, number_type) for value in values]
    start, end, step = (numbers + [1, 1, 1][len(numbers) :])[:3]
    if start <= 0:
        prefix = "" if number_type is int else f"Failed to parse {shown(key)}. "
        raise UsageError(f"{prefix}The start of the search range must be > 0")
    if end < 0 or step <= 0:
        raise UsageError(f"Failed to parse {shown(key)}. The end must be >= 0 and the step > 0.")
    return Range(start, end, step)


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse NAME:1,2,3. Raises: UsageError."""
    name, colon, sizes = text.rpartition(":")
    if not colon:
        raise UsageError("Failed to parse --shape. There must be a colon after input name.")
    numbers = tuple(number("shape", each, int) for each in sizes.split(","))
    if min(numbers) <= 0:
        raise UsageError("Failed to parse --shape. The dimensions of input tensor must be > 0.")
    return name, numbers


def declared(text: str) -> dict[str, Any]:
    """Parse NAME:DATATYPE:-1,2,3 as an entry of a model's metadata. Raises: UsageError."""
    name, colon, sizes = text.rpartition(":")
    name, second, datatype = name.rpartition(":")
    if not colon or not second:
        raise UsageError("Failed to parse --input. The value does not match <name:datatype:dimensions>.")
    numbers = [number("input", each, int) for each in sizes.split(",")]
    if not all(each > 0 or each == -1 for each in numbers):
        raise UsageError("Failed to parse --input. The dimensions must be > 0, or -1.")
    return {"name": name, "datatype": datatype.upper(), "shape": numbers}


def parameter(text: str) -> tuple[str, str | int | float | bool]:
    """Parse NAME:VALUE:TYPE. Raises: UsageError."""
    parts = text.split(":")
    if len(parts) != 3:
        raise UsageError("Failed to parse --request-parameter. The value does not match <name:value:type>.")
    name, value, kind = parts[0], parts[1], parts[2].lower()
    if kind == "string":
        return name, value
    if kind in {"double", "float"}:
        return name, number("request-parameter", value, float, finite=False)
    if kind in {"int", "uint"}:
        number_value = number("request-parameter", value, int)
        if not -_IDS // 2 <= number_value < _IDS:
            raise UsageError(f"Failed to parse --request-parameter. Invalid value provided: {value}")
        return name, number_value
    if kind == "bool" and value.lower() in {"true", "false", "1", "0"}:
        return name, value.lower() in {"true", "1"}
    raise UsageError(
        f"Failed to parse --request-parameter. '{text}': the type must be int, uint, bool, double, float or string,"
        " and the value one of it."
    )


def ids(text: str) -> tuple[int, int]:
    """Parse START:END. Returns: the first id and the number of ids. Raises: UsageError."""
    parts = text.split(":")
    if len(parts) > 2:
        raise UsageError("Failed to parse --sequence-id-range. The value does not match <start:end>.")
    numbers = [number("sequence-id-range", part, int) for part in parts]
    if min(numbers) < 0:
        raise UsageError("Failed to parse --sequence-id-range. The range values must be >= 0.")
    if numbers[0] >= _IDS or numbers[-1] > _IDS:
        raise UsageError("Failed to parse --sequence-id-range. The range values must be below 2^64.")
    if len(numbers) > 1 and numbers[1] <= numbers[0]:
        raise UsageError("Failed to parse --sequence-id-range. The 'end' value must be greater than 'start' value.")
    return max(numbers[0], 1), numbers[1] - numbers[0] if len(numbers) > 1 else UNBOUNDED


def number(key: str, text: str, number_type: type, *, finite: bool = True) -> Any:
    """Parse a number. A whole number may be written as 1000.0, as Model Analyzer does. Raises: UsageError."""
    with suppress(ValueError):
        value = number_type(text.removesuffix(".0"))
        if not finite or number_type is int or math.isfinite(value):
            return value
    raise UsageError(f"Failed to parse {shown(key)}. Invalid value provided: {text}")


def shown(key: str) -> str:
    """Format a flag as a user writes it."""
    return f"-{key}" if len(key) == 1 else f"--{key}"
