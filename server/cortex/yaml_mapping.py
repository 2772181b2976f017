"""YamlMapping: one map of a cortex.yaml, read key by key, with everything wrong with it. Called by project.py.

Source of the texts: Cortex v0.10, pkg/lib/configreader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from penstock.server.repository.findings import Finding
from penstock.server.settings import nearest
from penstock.server.yaml_nodes import YamlNode

_KINDS = {str: "string", int: "integer", bool: "boolean"}
_PATTERN = r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([numkMGTPE]|[KMGTPE]i)?|[eE]([-+]?[0-9]{1,3}))")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}

QUANTITY_MESSAGE = f"quantities must match the regular expression '{_PATTERN}'"
"""Source: k8s.io/apimachinery, quantity.go."""


def quoted(value: Any) -> str:
    """Format a value as in Cortex's messages."""
    return json.dumps(value, ensure_ascii=False, default=str)


def alternatives(values: Iterable[str], last: str = "or") -> str:
    """Return `"a", "b", or "c"`."""
    shown = [quoted(value) for value in values]
    if len(shown) < 3:
        return f" {last} ".join(shown)
    return f"{', '.join(shown[:-1])}, {last} {shown[-1]}"


class YamlMapping:
    """A map, its place, and the findings that reading it adds to.

    Invariant: a mistake in one key hides none in another. `finish` reports keys that were not read.
    """

    def __init__(
        self, file: Path, node: YamlNode, location: tuple[str, ...], findings: list[Finding], api: str = ""
    ) -> None:
        self._file = file
        self._values: dict[str, YamlNode] = node.value if isinstance(node.value, dict) else {}
        self._findings = findings
        self._accepted_keys: list[str] = []
        self.line = node.key_line or node.line
        self.location = location
        self.api = api

    def __contains__(self, key: str) -> bool:
        return key in self._values and self._values[key].value is not None

    def empty(self) -> YamlMapping:
        """Return an empty map at the same place."""
        return YamlMapping(self._file, YamlNode({}, self.line), self.location, self._findings, self.api)

    def accept_keys(self, *keys: str) -> None:
        """Accept keys that are read elsewhere."""
        self._accepted_keys += keys

    def peek_text(self, key: str) -> str:
        """Return a value if it is a text, without reporting mistakes."""
        value = self._values[key].value if key in self._values else ""
        return value if isinstance(value, str) else ""

    def line_of(self, key: str) -> int:
        """Return the line of a key, or that of the map if it is missing."""
        found = self._values.get(key)
        return found.key_line or found.line if found is not None else self.line

    def mistake(self, message: str, key: str = "") -> None:
        """Record what prevents this from being used."""
        self._record(key, message, self.line_of(key), mistake=True)

    def warn(self, message: str, key: str = "") -> None:
        """Record what may be unintended."""
        self._record(key, message, self.line_of(key), mistake=False)

    def _record(self, key: str, message: str, line: int, *, mistake: bool) -> None:
        text = ": ".join((*self.location, *((key,) if key else ()), message))
        self._findings.append(Finding(self._file, text, line, is_mistake=mistake, model=self.api))

    # -- values ------------------------------------------------------------------------------------------------

    def text(self, key: str, *, required: bool = False, choices: tuple[str, ...] = ()) -> str:
        """Return a text, "" if it is missing; `choices` are the valid values."""
        node = self._get(key, required=required)
        if node is None:
            return ""
        if not isinstance(node.value, str):
            self._report_type(key, node, str)
        elif not node.value:
            self.mistake("cannot be empty", key)
        elif choices and node.value not in choices:
            suggestion = nearest(node.value, choices)
            self.mistake(f"invalid value (got {quoted(node.value)}, must be {alternatives(choices)}){suggestion}", key)
        else:
            return node.value
        return ""

    def integer(self, key: str, default: int, minimum: int, maximum: int = 2**31 - 1) -> int:
        """Return an integer."""
        node = self._get(key)
        if node is None:
            return default
        value = node.value
        if type(value) is not int:
            self._report_type(key, node, int)
        elif value < minimum:
            bound = f"greater than {minimum - 1}" if minimum else "greater than or equal to 0"
            self.mistake(f"{value} must be {bound}", key)
        elif value > maximum:
            self.mistake(f"{value} must be less than or equal to {maximum}", key)
        else:
            return value
        return default

    def quantity(self, key: str, default: str | None) -> str | None:
        """Return a quantity as it was written."""
        node = self._get(key)
        if node is None:
            return default
        if isinstance(node.value, bool) or not isinstance(node.value, str | int | float):
            self._report_type(key, node, str)
            return default
        text = str(node.value)
        try:
            if parse_quantity(text) >= 0:
                return text
        except ValueError as error:
            self.mistake(f"{quoted(text)}: {error}", key)
        else:
            self.mistake(f"{quoted(text)} must be greater than or equal to 0", key)
        return default

    def boolean(self, key: str) -> bool:
        """Return a boolean; False if it is missing."""
        node = self._get(key)
        if node is None or isinstance(node.value, bool):
            return node is not None and node.value is True
        self._report_type(key, node, bool)
        return False

    def mapping(self, key: str) -> YamlMapping | None:
        """Return a nested map."""
        node = self._get(key)
        if node is None:
            return None
        if isinstance(node.value, dict):
            return YamlMapping(self._file, node, (*self.location, key), self._findings, self.api)
        self.mistake(f"{quoted(node.unwrapped)}: invalid type (expected map)", key)
        return None

    def any_mapping(self, key: str) -> dict[str, Any]:
        """Return a map with any content, empty if it is missing."""
        node = self._get(key)
        if node is None:
            return {}
        if isinstance(node.value, dict):
            found: dict[str, Any] = node.unwrapped
            return found
        self.mistake(f"{quoted(node.unwrapped)}: invalid type (expected map)", key)
        return {}

    def ignore(self, key: str, why: str) -> None:
        """Accept a key that has no effect here, with a warning."""
        if self._get(key) is not None:
            self.warn(why, key)

    def finish(self) -> None:
        """Report keys that were not read, and repeated ones."""
        for key, value in self._values.items():
            if value.is_repeated:
                self.warn("is given twice; the last value applies", key)
            if key not in self._accepted_keys:
                suggestion = nearest(key, self._accepted_keys)
                self._record("", f"key {quoted(key)} is not supported{suggestion}", self.line_of(key), mistake=True)

    def _get(self, key: str, *, required: bool = False) -> YamlNode | None:
        """Return the value of a key; null counts as missing."""
        self._accepted_keys.append(key)
        node = self._values.get(key)
        if node is not None and node.value is None:
            if required:
                self.mistake("cannot be null", key)
            return None
        if node is None and required:
            self.mistake("must be defined", key)
        return node

    def _report_type(self, key: str, node: YamlNode, kind: type) -> None:
        self.mistake(f"{quoted(node.unwrapped)}: invalid type (expected {_KINDS[kind]})", key)


def parse_quantity(text: str) -> Decimal:
    """Parse a quantity. Raises: ValueError, with Kubernetes' text, for an invalid one."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(QUANTITY_MESSAGE)
    number, suffix, exponent = Decimal(match[1]), match[2], match[3]
    if exponent is not None:
        return number.scaleb(int(exponent))
    if suffix in _BINARY:
        return number * Decimal(1024 ** _BINARY[suffix])
    return number.scaleb(_DECIMAL.get(suffix or "", 0))
