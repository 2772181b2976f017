"""Writing: converts a configuration to a config.pbtxt and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def to_pbtxt(config: Mapping[str, Any], comment: str = "") -> str:
    """Return a configuration as the text of a config.pbtxt, after `comment`. Raises: ValueError."""
    from google.protobuf import json_format, text_format

    from penstock.server.protobuf import model_config_pb2

    message = model_config_pb2().ModelConfig()
    try:
        json_format.ParseDict(dict(config), message)
    except json_format.ParseError as error:
        raise ValueError(f"the configuration that the server reports cannot be written: {error}") from error
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + str(text_format.MessageToString(message))


def parse_pbtxt(text: str) -> dict[str, Any]:
    """Parse it again, into the JSON that a load request takes. Raises: ValueError."""
    from google.protobuf import text_format

    from penstock.server.protobuf import model_config_pb2
    from penstock.server.repository.completed_config import to_json

    message = model_config_pb2().ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        raise ValueError(str(error)) from error
    return to_json(message)
