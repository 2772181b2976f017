"""YamlMapping: one map of a cortex.yaml, read key by key, with everything wrong with it. Called by project.py.

Source of the texts: Cortex v0.10, pkg/lib/configreader.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.server.repository.findings import Finding
from penstock.server.settings import nearest

from .quantities import parse_quantity
from .yaml_nodes import YamlNode

_KINDS = {str: "string", int: "integer", bool: "boolean"}


def quoted(value: Any) -> str:
    """Format a value as in Cortex's messages."""
    return json.dumps(value, ensure_ascii=False, default=str)


def either(words: Iterable[str], last: str = "or") -> str:
    """Return `"a", "b", or "c"`."""
    shown = [quoted(word) for word in words]
    if len(shown) < 3:
        return f" {last} ".join(shown)
    return f"{', '.join(shown[:-1])}, {last} {shown[-1]}"


class YamlMapping:
    """A map, its place, and the findings that reading it adds to.

    Invariant: a mistake in one key hides none in another. `finish` reports keys that were not read.
    """

    def __init__(
        self, file: Path, node: YamlNode, place: tuple[str, ...], findings: list[Finding], api: str = ""
    ) -> None:
        self._file = file
        self._values: dict[str, YamlNode] = node.value if isinstance(node.value, dict) else {}
        self._findings = findings
        self._known: list[str] = []
        self.line = node.key_line or node.line
        self.place = place
        self.api = api

    def __contains__(self, key: str) -> bool:
        return key in self._values and self._values[key].value is not None

    def without(self) -> YamlMapping:
        """Return an empty map at the same place."""
        return YamlMapping(self._file, YamlNode({}, self.line), self.place, self._findings, self.api)

    def know(self, *keys: str) -> None:
        """Accept keys that are read elsewhere."""
        self._known += keys

    def word(self, key: str) -> str:
        """Return a value if it is a text, without reporting mistakes."""
        value = self._values[key].value if key in self._values else ""
        return value if isinstance(value, str) else ""

    def line_of(self, key: str) -> int:
        """Return the line of a key, or that of the map if it is missing."""
        found = self._values.get(key)
        return found.key_line or found.line if found is not None else self.line

    def mistake(self, message: str, key: str = "") -> None:
        """Record what prevents this from being used."""
        self._note(key, message, self.line_of(key), mistake=True)

    def warn(self, message: str, key: str = "") -> None:
        """Record what may be unintended."""
        self._note(key, message, self.line_of(key), mistake=False)

    def _note(self, key: str, message: str, line: int, *, mistake: bool) -> None:
        text = ": ".join((*self.place, *((key,) if key else ()), message))
        self._findings.append(Finding(self._file, text, line, is_mistake=mistake, model=self.api))

    # -- values ------------------------------------------------------------------------------------------------

    def text(self, key: str, *, required: bool = False, of: tuple[str, ...] = ()) -> str:
        """Return a text, "" if it is missing; `of` are the valid values."""
        node = self._asked(key, required=required)
        if node is None:
            return ""
        if not isinstance(node.value, str):
            self._wrong(key, node, str)
        elif not node.value:
            self.mistake("cannot be empty", key)
        elif of and node.value not in of:
            close = nearest(node.value, of)
            self.mistake(f"invalid value (got {quoted(node.value)}, must be {either(of)}){close}", key)
        else:
            return node.value
        return ""

    def whole(self, key: str, default: int, least: int, most: int = 2**31 - 1) -> int:
        """Return an integer."""
        node = self._asked(key)
        if node is None:
            return default
        value = node.value
        if type(value) is not int:
            self._wrong(key, node, int)
        elif value < least:
            bound = f"greater than {least - 1}" if least else "greater than or equal to 0"
            self.mistake(f"{value} must be {bound}", key)
        elif value > most:
            self.mistake(f"{value} must be less than or equal to {most}", key)
        else:
            return value
        return default

    def quantity(self, key: str, default: str | None) -> str | None:
        """Return a quantity as it was written."""
        node = self._asked(key)
        if node is None:
            return default
        if isinstance(node.value, bool) or not isinstance(node.value, str | int | float):
            self._wrong(key, node, str)
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

    def flag(self, key: str) -> bool:
        """Return a boolean; False if it is missing."""
        node = self._asked(key)
        if node is None or isinstance(node.value, bool):
            return node is not None and node.value is True
        self._wrong(key, node, bool)
        return False

    def part(self, key: str) -> YamlMapping | None:
        """Return a nested map."""
        node = self._asked(key)
        if node is None:
            return None
        if isinstance(node.value, dict):
            return YamlMapping(self._file, node, (*self.place, key), self._findings, self.api)
        self.mistake(f"{quoted(node.plain)}: invalid type (expected map)", key)
        return None

    def anything(self, key: str) -> dict[str, Any]:
        """Return a map with any content, empty if it is missing."""
        node = self._asked(key)
        if node is None:
            return {}
        if isinstance(node.value, dict):
            found: dict[str, Any] = node.plain
            return found
        self.mistake(f"{quoted(node.plain)}: invalid type (expected map)", key)
        return {}

    def ignored(self, key: str, why: str) -> None:
        """Accept a key that has no effect here, with a warning."""
        if self._asked(key) is not None:
            self.warn(why, key)

    def finish(self) -> None:
        """Report keys that were not read, and repeated ones."""
        for key, value in self._values.items():
            if value.twice:
                self.warn("is given twice; the last one counts", key)
            if key not in self._known:
                close = nearest(key, self._known)
                self._note("", f"key {quoted(key)} is not supported{close}", self.line_of(key), mistake=True)

    def _asked(self, key: str, *, required: bool = False) -> YamlNode | None:
        """Return the value of a key; null counts as missing."""
        self._known.append(key)
        node = self._values.get(key)
        if node is not None and node.value is None:
            if required:
                self.mistake("cannot be null", key)
            return None
        if node is None and required:
            self.mistake("must be defined", key)
        return node

    def _wrong(self, key: str, node: YamlNode, kind: type) -> None:
        self.mistake(f"{quoted(node.plain)}: invalid type (expected {_KINDS[kind]})", key)
