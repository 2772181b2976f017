"""Fields: a model's arguments as options of a command line. Called by cli.py.

Source: deepaas 2.6.0, cmd/cli.py: how each kind of field is parsed; no value is validated.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Mapping
from typing import Any

_PREFIX = "="
"""The prefix of an argument's name in the Namespace, which has others too."""
_TRUE = ("yes", "true", "t", "1")


def add_fields(parser: argparse.ArgumentParser, fields: Mapping[str, Any]) -> None:
    """Add fields to a parser, each under its name. A field that is neither given nor has a default is left out."""
    if not fields:
        return
    import marshmallow

    for name, field in fields.items():
        default = argparse.SUPPRESS if field.load_default is marshmallow.missing else field.load_default
        parser.add_argument(
            f"--{name}", dest=_PREFIX + name, type=_reader_of(field, marshmallow.fields), required=field.required,
            default=default() if callable(default) else default, help=_help_of(field, default), metavar="VALUE",
        )  # fmt: skip


def given_fields(given: argparse.Namespace, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that were given or have a default, in the order of declaration."""
    values = vars(given)
    return {name: values[_PREFIX + name] for name in fields if _PREFIX + name in values}


def files_of(fields: Mapping[str, Any]) -> list[str]:
    """List the arguments that are files."""
    return [name for name, field in fields.items() if field.metadata.get("type") == "file"]


def _reader_of(field: Any, fields: Any) -> Callable[[str], Any]:
    readers: dict[type, Callable[[str], Any]] = {
        fields.Boolean: _parse_bool, fields.Float: float, fields.Integer: int, fields.List: _parse_literal,
        fields.Dict: _parse_literal,
    }  # fmt: skip
    return readers.get(type(field), str)


def _parse_bool(text: str) -> bool:
    return text.lower() in _TRUE


def _parse_literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        reason = str(error).partition(": <")[0]  # without the parser object and its address
        raise argparse.ArgumentTypeError(f"{text!r} is not a Python list or dict: {reason}") from None


def _help_of(field: Any, default: Any) -> str:
    """Return the help text of a field."""
    is_file = field.metadata.get("type") == "file"
    parts = [str(field.metadata.get("description", "")), "the path of a file" if is_file else type(field).__name__]
    if field.required:
        parts.append("required")
    elif default is not argparse.SUPPRESS:
        parts.append(f"default: {default}")
    if "enum" in field.metadata:
        parts.append(f"of {field.metadata['enum']}")
    return "; ".join(each for each in parts if each).replace("%", "%%")
