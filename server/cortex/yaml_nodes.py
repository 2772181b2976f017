"""YAML with line numbers: a cortex.yaml as YamlNodes, with aliases and merges resolved. Called by project.py.

PyYAML parses the syntax; scalars.py resolves scalars, as in Cortex.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from .scalars import Scalar, named, resolve

MAX_NODES = 20_000
"""Includes the expansion of aliases: a few lines of them can expand to any number of values."""
_OF_YAML = "tag:yaml.org,2002:"
_PLAIN = "plain"


class YamlError(Exception):
    """Why a text is not usable YAML. `line` is 0 if there is no particular place."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its first line. In a mapping, `key_line` is its key's, and `twice` marks a repeated key."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    line: int
    key_line: int = 0
    twice: bool = False

    @property
    def plain(self) -> Any:
        """The value without line numbers."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain for node in self.value]
        return self.value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's loader, which leaves untagged scalars as written."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else f"{_OF_YAML}str"
        return super().resolve(kind, value, implicit)


def parse(text: str) -> YamlNode:
    """Parse one document; an empty text is null. Raises: YamlError."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
        return _Tree().node(root) if root is not None else YamlNode(None, 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 0
        said = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(f"invalid yaml: {said}", line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"invalid yaml: the character {chr(error.character)!a} is not allowed", line) from error
    except RecursionError as error:
        raise YamlError("invalid yaml: nested too deeply") from error
    except (ValueError, OverflowError) as error:  # an escape or a directive with an invalid number
        raise YamlError(f"invalid yaml: {error}") from error


class _Tree:
    """Converts PyYAML's nodes, at most MAX_NODES of them, and none that contains itself."""

    def __init__(self) -> None:
        self._count = 0
        self._above: set[int] = set()

    def node(self, said: Any) -> YamlNode:
        line = said.start_mark.line + 1
        self._count += 1
        if self._count > MAX_NODES:
            raise YamlError(f"invalid yaml: more than {MAX_NODES} values", line)
        if isinstance(said, yaml.ScalarNode):
            return YamlNode(_scalar(said), line)
        if id(said) in self._above:
            raise YamlError("invalid yaml: an alias of what it is part of", line)
        self._above.add(id(said))
        made = (
            YamlNode([self.node(each) for each in said.value], line)
            if isinstance(said, yaml.SequenceNode)
            else YamlNode(self._mapping(said), line)
        )
        self._above.discard(id(said))
        return made

    def _mapping(self, said: Any) -> dict[str, YamlNode]:
        merged: dict[str, YamlNode] = {}
        own: dict[str, YamlNode] = {}
        for key, value in said.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.tag == _PLAIN:
                merged = {**self._merged(value), **merged}
                continue
            name = _key(key)
            if name is None:
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or a map"
                raise YamlError(f"non string key found: {shown or 'null'}", line)
            made = self.node(value)
            own[name] = YamlNode(made.value, made.line, line, twice=name in own)
        return {**merged, **own}

    def _merged(self, said: Any) -> Mapping[str, YamlNode]:
        """Return what `<<` merges: a map, or the maps in a list, of which earlier ones override later ones."""
        made = self.node(said)
        maps = made.value if isinstance(made.value, list) else [made]
        found: dict[str, YamlNode] = {}
        for each in maps:
            if not isinstance(each.value, dict):
                raise YamlError("invalid yaml: map merge requires map or sequence of maps as the value", made.line)
            found = {**each.value, **found}
        return found


def _key(said: Any) -> str | None:
    """Return a key; None if it is not text. `y` and `on` are texts here, while Cortex reads them as booleans."""
    if not isinstance(said, yaml.ScalarNode):
        return None
    value = _scalar(said)
    return str(said.value) if isinstance(value, str | bool) else None


def _scalar(said: Any) -> Scalar:
    if said.tag == _PLAIN:
        return resolve(said.value)
    return named(said.tag.removeprefix(_OF_YAML), said.value)
