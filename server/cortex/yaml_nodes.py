"""YAML with the line of everything: a cortex.yaml as Nodes, aliases and merges resolved. Called by project.py.

PyYAML reads its form; what words mean is scalars.py's, as Cortex had it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from .scalars import Scalar, named, resolve

MAX_NODES = 20_000
"""With what aliases stand for: a few lines of them can stand for any number."""
_OF_YAML = "tag:yaml.org,2002:"
_PLAIN = "plain"


class YamlError(Exception):
    """Why a text is no YAML that can be used. `line` 0: nowhere in particular."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and the line that it begins on. `key_line` is that of its key, in a mapping; `twice`, if it has two."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    line: int
    key_line: int = 0
    twice: bool = False

    @property
    def plain(self) -> Any:
        """The value without lines."""
        if isinstance(self.value, dict):
            return {key: node.plain for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain for node in self.value]
        return self.value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's, that leaves words without a tag as they are written."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else f"{_OF_YAML}str"
        return super().resolve(kind, value, implicit)


def parse(text: str) -> YamlNode:
    """Read one document; an empty text is null. Raises: YamlError."""
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
    except (ValueError, OverflowError) as error:  # an escape or a directive with a number that is none
        raise YamlError(f"invalid yaml: {error}") from error


class _Tree:
    """Makes Nodes of PyYAML's, no more than MAX_NODES, and none inside itself."""

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
        """Give what `<<` brings: of a map, or of the maps in a list, the first before the others."""
        made = self.node(said)
        maps = made.value if isinstance(made.value, list) else [made]
        found: dict[str, YamlNode] = {}
        for each in maps:
            if not isinstance(each.value, dict):
                raise YamlError("invalid yaml: map merge requires map or sequence of maps as the value", made.line)
            found = {**each.value, **found}
        return found


def _key(said: Any) -> str | None:
    """Give a key; None for what is no text. A `y` or an `on` is one, where Cortex took it for a yes."""
    if not isinstance(said, yaml.ScalarNode):
        return None
    value = _scalar(said)
    return str(said.value) if isinstance(value, str | bool) else None


def _scalar(said: Any) -> Scalar:
    if said.tag == _PLAIN:
        return resolve(said.value)
    return named(said.tag.removeprefix(_OF_YAML), said.value)
