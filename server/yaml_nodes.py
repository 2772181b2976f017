"""YAML with line numbers: a text as YamlNodes, with aliases and merges resolved. Used by the Cortex and Seldon formats.

PyYAML parses the syntax. Plain scalars get the values of go-yaml 2, resolve.go, with which the originals read YAML.
They differ from PyYAML's: `1e-3` is a number, `12:30` and `2019-01-02` are texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

MAX_NODES = 20_000
"""Includes the expansion of aliases: a few lines of them can expand to any number of values."""
_OF_YAML = "tag:yaml.org,2002:"
_PLAIN = "plain"
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"})
_FALSE = frozenset({"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"})
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|0[0-7]*|[1-9][0-9]*)")
_MAX_DIGITS = 64

Scalar = str | int | float | bool | None


class YamlError(Exception):
    """Why a text is not usable YAML. `line` is 0 if there is no particular place."""

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A value and its first line. In a mapping, `key_line` is its key's, and `is_repeated` marks a repeated key."""

    value: Scalar | list[YamlNode] | dict[str, YamlNode]
    line: int
    key_line: int = 0
    is_repeated: bool = False

    @property
    def unwrapped(self) -> Any:
        """The value without line numbers."""
        if isinstance(self.value, dict):
            return {key: node.unwrapped for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.unwrapped for node in self.value]
        return self.value


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's loader, which leaves untagged scalars as written."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else f"{_OF_YAML}str"
        return super().resolve(kind, value, implicit)


def parse(text: str) -> YamlNode:
    """Parse one document; an empty text is null. Raises: YamlError."""
    with _open(text) as loader:
        root = loader.get_single_node()
        return _NodeConverter().convert(root) if root is not None else YamlNode(None, 1)


def parse_all(text: str) -> list[YamlNode]:
    """Parse any number of documents. Raises: YamlError."""
    with _open(text) as loader:
        converter, documents = _NodeConverter(), []
        while loader.check_node():
            documents.append(converter.convert(loader.get_node()))
        return documents


@contextmanager
def _open(text: str) -> Iterator[_Loader]:
    """Open a loader. Raises: YamlError, for PyYAML's errors in the body."""
    try:
        loader = _Loader(text)
        try:
            yield loader
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 0
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise YamlError(f"invalid yaml: {problem}", line) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"invalid yaml: the character {chr(error.character)!a} is not allowed", line) from error
    except RecursionError as error:
        raise YamlError("invalid yaml: nested too deeply") from error
    except (ValueError, OverflowError) as error:  # an escape or a directive with an invalid number
        raise YamlError(f"invalid yaml: {error}") from error


class _NodeConverter:
    """Converts PyYAML's nodes, at most MAX_NODES of them, and none that contains itself."""

    def __init__(self) -> None:
        self._count = 0
        self._ancestors: set[int] = set()

    def convert(self, yaml_node: Any) -> YamlNode:
        line = yaml_node.start_mark.line + 1
        self._count += 1
        if self._count > MAX_NODES:
            raise YamlError(f"invalid yaml: more than {MAX_NODES} values", line)
        if isinstance(yaml_node, yaml.ScalarNode):
            return YamlNode(_scalar(yaml_node), line)
        if id(yaml_node) in self._ancestors:
            raise YamlError("invalid yaml: an alias refers to a value that contains it", line)
        self._ancestors.add(id(yaml_node))
        converted = (
            YamlNode([self.convert(each) for each in yaml_node.value], line)
            if isinstance(yaml_node, yaml.SequenceNode)
            else YamlNode(self._mapping(yaml_node), line)
        )
        self._ancestors.discard(id(yaml_node))
        return converted

    def _mapping(self, yaml_node: Any) -> dict[str, YamlNode]:
        merged: dict[str, YamlNode] = {}
        own: dict[str, YamlNode] = {}
        for key, value in yaml_node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value == "<<" and key.tag == _PLAIN:
                merged = {**self._merged(value), **merged}
                continue
            name = _key(key)
            if name is None:
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or a map"
                raise YamlError(f"non string key found: {shown or 'null'}", line)
            converted = self.convert(value)
            own[name] = YamlNode(converted.value, converted.line, line, is_repeated=name in own)
        return {**merged, **own}

    def _merged(self, yaml_node: Any) -> Mapping[str, YamlNode]:
        """Return what `<<` merges: a map, or the maps in a list, of which earlier ones override later ones."""
        converted = self.convert(yaml_node)
        maps = converted.value if isinstance(converted.value, list) else [converted]
        merged: dict[str, YamlNode] = {}
        for each in maps:
            if not isinstance(each.value, dict):
                raise YamlError("invalid yaml: map merge requires map or sequence of maps as the value", converted.line)
            merged = {**each.value, **merged}
        return merged


def _key(yaml_node: Any) -> str | None:
    """Return a key; None if it is not text. `y` and `on` are texts here, while Cortex reads them as booleans."""
    if not isinstance(yaml_node, yaml.ScalarNode):
        return None
    value = _scalar(yaml_node)
    return str(yaml_node.value) if isinstance(value, str | bool) else None


def _scalar(yaml_node: Any) -> Scalar:
    if yaml_node.tag == _PLAIN:
        return resolve(yaml_node.value)
    return resolve_tagged(yaml_node.tag.removeprefix(_OF_YAML), yaml_node.value)


def resolve(text: str) -> Scalar:
    """Return the value of a plain scalar."""
    if text in _NULLS:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if found := _SPECIAL.fullmatch(text):
        return float(found[1] + "inf" if found[2] else "nan")
    digits = text.replace("_", "")
    if len(digits) <= _MAX_DIGITS and _INTEGER.fullmatch(digits):
        number = _parse_integer(digits)
        if -(2**63) <= number < 2**64:
            return number
    return float(digits) if len(digits) <= _MAX_DIGITS and _FLOAT.fullmatch(digits) else text


def _parse_integer(digits: str) -> int:
    sign, magnitude = (-1, digits[1:]) if digits.startswith("-") else (1, digits.removeprefix("+"))
    if len(magnitude) > 1 and magnitude[0] == "0" and magnitude[1].isdigit():
        magnitude = f"0o{magnitude[1:]}"
    return sign * int(magnitude, 0)


def resolve_tagged(tag: str, text: str) -> Scalar:
    """Return the value of a scalar with a tag of YAML's own (`!!str 5`); with any other tag, it is a text."""
    if tag in {"int", "float", "bool", "null"}:
        value = resolve(text)
        return float(value) if tag == "float" and type(value) is int else value
    return text
