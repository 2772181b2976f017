"""Parameters: the arguments of a component's constructor, from `--parameters`. Pure.

Parsed in the server, and again in its worker. Source: seldon-core 1.17.1, microservice.py.
"""

from __future__ import annotations

import json
from typing import Any

_TRUE = frozenset(("y", "yes", "t", "true", "on", "1"))
_FALSE = frozenset(("n", "no", "f", "false", "off", "0"))
_TYPES = {"INT": int, "FLOAT": float, "DOUBLE": float, "STRING": str}
_TYPE_NAMES = "INT, FLOAT, DOUBLE, STRING, BOOL"


class BadParameterError(ValueError):
    """Invalid parameters. The reason is MICROSERVICE_BAD_PARAMETER if the original had one."""


def read(text: str) -> dict[str, Any]:
    """Return the keyword arguments given in JSON: [{"name", "value", "type"}]. Raises: BadParameterError."""
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise BadParameterError(f"the parameters are not JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadParameterError('the parameters are not a list of {"name", "value", "type"}')
    arguments = {}
    for entry in entries:
        name, value, kind = entry.get("name"), entry.get("value"), entry.get("type")
        if not isinstance(name, str):
            raise BadParameterError(f"a model parameter has no name: {json.dumps(entry)}")
        arguments[name] = _value(name, value, kind)
    return arguments


def _value(name: str, value: Any, kind: Any) -> Any:
    try:
        if kind == "BOOL":
            return _boolean(str(value))
        if not isinstance(kind, str) or kind not in _TYPES:
            raise BadParameterError(f"Bad model parameter type: {kind} valid are {_TYPE_NAMES}")
        return _TYPES[kind](value)
    except BadParameterError:
        raise
    except (TypeError, ValueError, OverflowError):
        text = f"Bad model parameter: {name} with value {value} can't be parsed as a {kind}"
        raise BadParameterError(text) from None


def _boolean(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(text)
    return word in _TRUE
