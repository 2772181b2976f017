"""ParseContext: what reading a ModelConfig has found so far. Filled by the modules beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.server.repository.findings import Finding

if TYPE_CHECKING:
    from penstock.server.repository.gpus import Gpus

_QUOTED = re.compile(r"'([^']+)'")


class ParseContext:
    """The settings in one ModelConfig, and every mistake in it.

    `folder` is the model's, `path` the configuration's, `name` the folder's. `gpus`: the GPUs present. `values` and
    `locations` are those of a ParsedConfig.
    """

    def __init__(
        self, folder: Path, path: Path, config: Any, lines: Mapping[str, int], gpus: Gpus
    ) -> None:  # fmt: skip
        self.folder = folder
        self.path = path
        self.config = config
        self.gpus = gpus
        self.name: str = config.name
        self.values: dict[str, Any] = {}
        self.locations: dict[str, tuple[Path, int]] = {}
        self.findings: list[Finding] = []
        self._lines = lines

    def add_mistake(self, field: str, message: str) -> None:
        """Record a mistake in a field or a part of it. If the message quotes one of several, its line is used."""
        self._add_finding(field, message, mistake=True)

    def add_warning(self, field: str, message: str) -> None:
        """Record a warning about a field, with its line found likewise. It prevents nothing from being served."""
        self._add_finding(field, message, mistake=False)

    def set_value(self, name: str, value: Any, field: str) -> None:
        """Record the value of a field, by its name in penstock.toml if it has one."""
        self.values[name] = value
        self.locations[name] = (self.path, self._line(field))

    def _add_finding(self, field: str, message: str, *, mistake: bool) -> None:
        line = self._quoted_line(field, message) or self._line(field)
        self.findings.append(Finding(self.path, message, line, mistake))

    def _quoted_line(self, field: str, message: str) -> int:
        root = field.partition(".")[0]
        named = [name for name in _QUOTED.findall(message) if name != self.name]
        locations = [(key.partition("=")[2], line) for key, line in self._lines.items() if key.startswith(f"{root}.")]
        return next((line for name in named for value, line in locations if value == name), 0)

    def _line(self, field: str) -> int:
        while field and field not in self._lines:
            field = field.rpartition(".")[0]
        return self._lines.get(field, 0)


def enum_name(message: Any, field: str) -> str:
    """Return the name of an enum's value, or "" if it is unknown."""
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(getattr(message, field))
    return value.name if value else ""
