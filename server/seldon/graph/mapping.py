"""GraphMapping: reads the maps and lists of a graph file, and records mistakes in them. Called by graph_file.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.server.repository.findings import Finding
from penstock.server.settings import nearest
from penstock.server.yaml_nodes import YamlNode


class GraphMapping:
    """One map of a file, and the findings that reading it adds to. `label` names it in them ("node 'a'").

    Invariant: a value of the wrong type is a finding, and otherwise treated as missing.
    """

    def __init__(self, file: Path, node: YamlNode | None, label: str, findings: list[Finding]) -> None:
        self.file = file
        self.label = label
        self.findings = findings
        self.line = (node.key_line or node.line) if node is not None else 0
        self.values: dict[str, YamlNode] = {}
        if node is not None and isinstance(node.value, dict):
            self.values = {key: value for key, value in node.value.items() if value.value is not None}
        elif node is not None and node.value is not None:
            self.mistake("expected a map")

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def mistake(self, text: str, key: str = "") -> None:
        """Record what prevents the file from being served."""
        self._add_finding(text, key, mistake=True)

    def warn(self, text: str, key: str = "") -> None:
        """Record what may be unintended."""
        self._add_finding(text, key, mistake=False)

    def _add_finding(self, text: str, key: str, *, mistake: bool) -> None:
        found = self.values.get(key)
        line = (found.key_line or found.line) if found is not None else self.line
        self.findings.append(
            Finding(self.file, f"{self.label}: {text}" if self.label else text, line, is_mistake=mistake)
        )

    def text(self, key: str, default: str = "") -> str:
        """Return a text. A number or boolean counts as one, in its JSON form."""
        found = self.values.get(key)
        if found is None:
            return default
        if isinstance(found.value, dict | list):
            self.mistake(f"{key} must be a string", key)
            return default
        if key == "name" and isinstance(found.value, bool):
            self.mistake("YAML reads this name as a boolean: put it in quotes", key)
        return str(found.value).lower() if isinstance(found.value, bool) else str(found.value)

    def choice(self, key: str, choices: Iterable[str]) -> str:
        """Return one of the given words; "" if it is missing."""
        value = self.text(key)
        known = tuple(choices)
        if value and value not in known:
            self.mistake(f"{key} '{value}' is not one of {', '.join(known)}{nearest(value, known)}", key)
            return ""
        return value

    def integer(self, key: str, default: int) -> int:
        """Return a nonnegative integer."""
        found = self.values.get(key)
        if found is None:
            return default
        if type(found.value) is not int or found.value < 0:
            self.mistake(f"{key} must be a nonnegative integer", key)
            return default
        return found.value

    def flag(self, key: str) -> bool:
        """Return a boolean; False if it is missing."""
        found = self.values.get(key)
        if found is not None and not isinstance(found.value, bool):
            self.mistake(f"{key} must be true or false", key)
        return found is not None and found.value is True

    def section(self, key: str, label: str = "") -> GraphMapping:
        """Return a nested map, empty if it is missing."""
        found = self.values.get(key)
        return GraphMapping(self.file, found or YamlNode({}, self.line), label or self.label, self.findings)

    def items(self, key: str) -> list[YamlNode]:
        """Return the items of a list."""
        found = self.values.get(key)
        if found is None:
            return []
        if not isinstance(found.value, list):
            self.mistake(f"{key} must be a list", key)
            return []
        return found.value

    def sections(self, key: str, label: str = "") -> list[GraphMapping]:
        """Return a list's maps."""
        return [GraphMapping(self.file, item, label or self.label, self.findings) for item in self.items(key)]

    def texts(self) -> dict[str, str]:
        """Return all values as texts."""
        return {key: self.text(key) for key in self.values}

    def plain(self, key: str) -> Any:
        """Return a value as plain data, without line numbers."""
        found = self.values.get(key)
        return found.unwrapped if found is not None else None

    def warn_unknown(self, keys: Iterable[str]) -> None:
        """Warn of unknown keys."""
        known = tuple(keys)
        for key in self.values:
            if key not in known:
                self.warn(f"unknown key '{key}'{nearest(key, known)}", key)
