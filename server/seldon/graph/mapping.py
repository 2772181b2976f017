"""GraphMapping: reads the maps and lists of a graph file, and records what is wrong with them. Called by reading.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.server.cortex.yaml_nodes import YamlNode
from penstock.server.repository.findings import Finding
from penstock.server.settings import nearest


class GraphMapping:
    """One map of a file, and the findings that reading it adds to. `what` names it in them ("node 'a'").

    Invariant: a value of the wrong type is a finding, and otherwise treated as missing.
    """

    def __init__(self, file: Path, node: YamlNode | None, what: str, findings: list[Finding]) -> None:
        self.file = file
        self.what = what
        self.findings = findings
        self.line = (node.key_line or node.line) if node is not None else 0
        self.values: dict[str, YamlNode] = {}
        if node is not None and isinstance(node.value, dict):
            self.values = {key: value for key, value in node.value.items() if value.value is not None}
        elif node is not None and node.value is not None:
            self.mistake("a map is wanted here")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def mistake(self, text: str, key: str = "") -> None:
        """Record what prevents the file from being served."""
        self._note(text, key, mistake=True)

    def warn(self, text: str, key: str = "") -> None:
        """Record what may be unintended."""
        self._note(text, key, mistake=False)

    def _note(self, text: str, key: str, *, mistake: bool) -> None:
        found = self.values.get(key)
        line = (found.key_line or found.line) if found is not None else self.line
        self.findings.append(
            Finding(self.file, f"{self.what}: {text}" if self.what else text, line, is_mistake=mistake)
        )

    def text(self, key: str, default: str = "") -> str:
        """Return a text. A number or boolean counts as one, in its JSON form."""
        found = self.values.get(key)
        if found is None:
            return default
        if isinstance(found.value, dict | list):
            self.mistake(f"{key} is a text", key)
            return default
        if key == "name" and isinstance(found.value, bool):
            self.mistake("YAML reads this name as true or false: write it in quotes", key)
        return str(found.value).lower() if isinstance(found.value, bool) else str(found.value)

    def word(self, key: str, words: Iterable[str]) -> str:
        """Return one of the given words; "" if it is missing."""
        value = self.text(key)
        known = tuple(words)
        if value and value not in known:
            self.mistake(f"{key} '{value}' is none of {', '.join(known)}{nearest(value, known)}", key)
            return ""
        return value

    def whole(self, key: str, default: int) -> int:
        """Return a nonnegative integer."""
        found = self.values.get(key)
        if found is None:
            return default
        if type(found.value) is not int or found.value < 0:
            self.mistake(f"{key} is a whole number", key)
            return default
        return found.value

    def flag(self, key: str) -> bool:
        """Return a boolean; False if it is missing."""
        found = self.values.get(key)
        if found is not None and not isinstance(found.value, bool):
            self.mistake(f"{key} is true or false", key)
        return found is not None and found.value is True

    def part(self, key: str, what: str = "") -> GraphMapping:
        """Return a nested map, empty if it is missing."""
        found = self.values.get(key)
        return GraphMapping(self.file, found or YamlNode({}, self.line), what or self.what, self.findings)

    def items(self, key: str) -> list[YamlNode]:
        """Return the items of a list."""
        found = self.values.get(key)
        if found is None:
            return []
        if not isinstance(found.value, list):
            self.mistake(f"{key} is a list", key)
            return []
        return found.value

    def parts(self, key: str, what: str = "") -> list[GraphMapping]:
        """Return a list's maps."""
        return [GraphMapping(self.file, item, what or self.what, self.findings) for item in self.items(key)]

    def texts(self) -> dict[str, str]:
        """Return all values as texts."""
        return {key: self.text(key) for key in self.values}

    def plain(self, key: str) -> Any:
        """Return a value as plain data, without line numbers."""
        found = self.values.get(key)
        return found.plain if found is not None else None

    def only(self, keys: Iterable[str]) -> None:
        """Warn of unknown keys."""
        known = tuple(keys)
        for key in self.values:
            if key not in known:
                self.warn(f"'{key}' means nothing here{nearest(key, known)}", key)
