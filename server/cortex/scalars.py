"""Scalars: the values of plain scalars in a cortex.yaml, by the rules of Cortex's YAML reader. Called by yaml_nodes.py.

They differ from PyYAML's: `1e-3` is a number, `12:30` and `2019-01-02` are texts. Source: go-yaml 2, resolve.go.
"""

from __future__ import annotations

import re

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"})
_FALSE = frozenset({"n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"})
_SPECIAL = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INTEGER = re.compile(r"[-+]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|0[0-7]*|[1-9][0-9]*)")
_MAX_DIGITS = 64

Scalar = str | int | float | bool | None


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
