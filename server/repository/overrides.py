"""Overrides: what a load request sends to replace what is on disk. Checks the names and writes the files.

Used by ModelControl. Nothing received over the network names a place outside a folder made for it.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.server.json_text import TOO_MANY_VALUES, has_more_values
from penstock.server.protobuf import model_config_pb2

from .key_checks import NAME_MAX_BYTES, is_file_name
from .penstock_toml import NATIVE_FILE
from .scan import CONFIG_FILE

PATH_PARTS = 8
_TEXT_CHARS = 500
_LENIENT_TOKEN = re.compile(r"""("(?:[^"\\]|\\.)*"?)|'((?:[^'\\]|\\.)*)'?|([A-Za-z_]\w*)(\s*:)?""", re.DOTALL)
"""A string in JSON or single quotes, or an unquoted name. The pattern never backtracks, so it takes linear time."""


def check_name(name: str) -> None:
    """Check that a model's name is one path component. Raises: InferError (INVALID)."""
    if not is_component(name) or not name.strip() or name.startswith("."):
        raise InferError(Code.INVALID, f"invalid model name {name[:NAME_MAX_BYTES]!a}: it must be the name of a folder")


def is_component(name: str) -> bool:
    """Return whether a name is one path component that every file system accepts."""
    return is_file_name(name) and name.isprintable()


def check_files(model: str, files: Mapping[str, bytes]) -> None:
    """Check that every name is a path inside the model's folder, and that no name is also a folder of another.

    Raises: InferError (INVALID).
    """
    folders = {"/".join(parts[:end]) for parts in (name.split("/") for name in files) for end in range(1, len(parts))}
    for name in files:
        parts = name.split("/")
        if len(parts) > PATH_PARTS or not all(map(is_component, parts)) or any(part.startswith(".") for part in parts):
            raise _file_error(model, name, "must be a path inside the model's folder, such as 1/model.onnx")
        if name in folders:
            raise _file_error(model, name, "is also the name of a folder in another file's path")
        if name == CONFIG_FILE or parts[0] == "configs":
            raise _file_error(model, name, "must be passed as the parameter 'config'")
        if name == NATIVE_FILE:
            # its hooks would run in the server itself, while a model.py runs in its own process, as in Triton
            raise _file_error(model, name, "cannot be given with a request")


def _file_error(model: str, name: str, problem: str) -> InferError:
    return InferError(
        Code.INVALID, f"failed to load '{model}': load parameter {'file:' + name[:_TEXT_CHARS]!a} {problem}"
    )


def read_config(model: str, text: str) -> Any:
    """Parse a model's ModelConfig from its JSON. Raises: InferError (INVALID)."""
    from google.protobuf import json_format

    config = model_config_pb2().ModelConfig()
    try:
        document = _parse_json(text)
        if not isinstance(document, dict):
            raise TypeError("it must be an object")
        json_format.ParseDict(_wrap_repeated(document, config.DESCRIPTOR), config)
    except (json_format.ParseError, ValueError, TypeError, AttributeError, RecursionError) as error:
        # protobuf lists the available fields, by names that no configuration uses
        reason = " ".join(str(error).partition(" Available Fields")[0].split())[:_TEXT_CHARS]
        # one of Triton's example clients looks for "failed to load"
        message = f"failed to load '{model}': load parameter 'config' is not a ModelConfig in JSON: {reason}"
        raise InferError(Code.INVALID, message) from error
    return config


def _parse_json(text: str) -> Any:
    """Parse JSON, also accepting unquoted names and single quotes. Raises: ValueError.

    Source: protobuf's C++ JSON parser, which Triton uses. Triton's own tests rely on this.
    """
    if has_more_values(text.encode("utf-8", "replace")):
        raise ValueError(TOO_MANY_VALUES)
    try:
        return json.loads(text)
    except ValueError:
        try:
            return json.loads(_LENIENT_TOKEN.sub(_requote, text))
        except ValueError:
            pass
        raise


def _requote(match: re.Match[str]) -> str:
    double, single, bare, colon = match.groups()
    if single is not None:
        return '"' + single.replace("\\'", "'").replace('"', '\\"') + '"'
    return match[0] if double is not None or colon is None else f'"{bare}"{colon}'


def _wrap_repeated(document: Any, message: Any) -> Any:
    """Wrap single values of repeated fields in lists: Triton's parser accepts them unwrapped, Python's does not."""
    if isinstance(document, list):
        return [_wrap_repeated(each, message) for each in document]
    if not isinstance(document, dict) or message is None:
        return document
    fields = {name: field for field in message.fields for name in (field.name, field.json_name)}
    listed = {}
    for name, value in document.items():
        field = fields.get(name)
        if field is None or _is_map(field):
            listed[name] = value
            continue
        inner = _wrap_repeated(value, field.message_type)
        listed[name] = [inner] if field.is_repeated and not isinstance(value, list | None) else inner
    return listed


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def write_files(name: str, files: Mapping[str, bytes]) -> Path:
    """Write files, which were checked, as a model's folder.

    Returns: that folder, inside a private folder. The caller owns it and removes it with `remove_folder`.
    """
    root = Path(tempfile.mkdtemp(prefix="penstock-"))
    try:
        for file, content in files.items():
            path = root / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return root / name


def remove_folder(folder: Path) -> None:
    """Remove what `write_files` wrote."""
    shutil.rmtree(folder.parent, ignore_errors=True)
