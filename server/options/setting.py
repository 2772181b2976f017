"""Setting: how the settings classes declare a field, and what is derived from it.

Settings inherits all of those classes, which do not know each other. Only Settings gets the generated dataclass
methods: the others are never instantiated, and generating methods for each would slow down every start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PREFIX = "PENSTOCK_"
PORTS = (0, 65535)
SECONDS = (0.01, 86400.0)
COUNT = (1, 2**31 - 1)
TRUE_WORDS = ("true", "on", "1")
FALSE_WORDS = ("false", "off", "0")


def setting(
    default: Any, group: str, text: str, *, unit: str = "", bounds: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """Declare a setting: its default and its description."""
    meta = {"group": group, "text": text, "unit": unit, "bounds": bounds, "choices": choices}
    return field(default=default, metadata=meta)


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting: the field it fills, and everything derived from it."""

    name: str
    default: Any
    group: str
    text: str
    unit: str
    bounds: tuple[float, float] | None
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        """The environment name."""
        return PREFIX + self.name.upper()

    @property
    def expected(self) -> str:
        """A description of valid values."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if isinstance(self.default, bool):
            return "true or false"
        if self.bounds:
            kind = "a whole number" if isinstance(self.default, int) else "a number"
            return f"{kind} from {shown(self.bounds[0])} to {shown(self.bounds[1])}"
        return "a list of strings" if isinstance(self.default, tuple) else "a string"


def shown(value: object) -> str:
    """Write a default or a bound as a person would type it; "" if there is none."""
    if isinstance(value, int):
        return str(value).lower()  # true and false; numbers have no case
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value or "")
