"""config.pbtxt: parses protobuf text into tritonclient's ModelConfig, with the line of each field.

Used by scan.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.server.protobuf import model_config_pb2

from .findings import Finding, MistakeError, read_text

_TOKEN = re.compile(r"#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|[{}<>\[\]]|\n")
_QUOTED_ENUM = re.compile(r"has no value named (\"\w+\"|'\w+')\.$")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
"""A byte that is not UTF-8, as decoded by errors="surrogateescape"."""
_MAPS = ("parameters", "metric_tags", "cc_model_filenames")


def parse(path: Path) -> tuple[Any, dict[str, int]]:
    """Read a config.pbtxt.

    Returns: the ModelConfig, and the line of the first mention of each field (`dynamic_batching.priority_levels`).
    Raises: MistakeError with the line of the error.
    """
    from google.protobuf import text_format

    text = _read_text(path)
    config = model_config_pb2().ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        message = re.sub(r"^(\d+:)*\d* ?: ?", "", str(error))
        if _QUOTED_ENUM.search(message):
            message = f"{message.rstrip('.')}: enum values must not be quoted"
        raise MistakeError(Finding(path, message, error.GetLine() or 0)) from error
    except (ValueError, RecursionError) as error:
        raise MistakeError(Finding(path, str(error))) from error
    _drop_empty(config)
    return config, field_lines(text)


def _drop_empty(config: Any) -> None:
    """Drop the entry that `metric_tags: {}` adds: empty in JSON, but an entry without name and value in protobuf text.

    Triton prints a model's configuration as such JSON. Triton too accepts it pasted, with the entry, to no effect.
    """
    configured = config.optimization.execution_accelerators
    accelerators = [*configured.gpu_execution_accelerator, *configured.cpu_execution_accelerator]
    for entries in (*(getattr(config, name) for name in _MAPS), *(each.parameters for each in accelerators)):
        if "" in entries and not str(entries[""]):
            del entries[""]


def _read_text(path: Path) -> str:
    """Read a config.pbtxt. Its comments may be in any encoding, since Triton's parser skips them.

    Raises: MistakeError if the file cannot be read, or, with the line, if anything but comments is not UTF-8.
    """
    text = read_text(path, errors="surrogateescape")
    if _NOT_UTF8.search(text):
        text = _TOKEN.sub(lambda piece: _NOT_UTF8.sub("?", piece[0]) if piece[0][0] == "#" else piece[0], text)
    if match := _NOT_UTF8.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise MistakeError(Finding(path, "is not UTF-8: only comments may use another encoding", line))
    return text


def parse_json(text: str | bytes) -> Any:
    """Parse a ModelConfig from its JSON. Raises: InferError (INVALID)."""
    from google.protobuf import json_format

    config = model_config_pb2().ModelConfig()
    try:
        json_format.Parse(text, config)
    except json_format.ParseError as error:
        raise InferError(Code.INVALID, f"the configuration cannot be read: {error}") from error
    return config


def find_mention(text: str, names: Sequence[str]) -> int:
    """Return the first line of a protobuf text that has one of these names in quotes, the rarest; 0 if none."""
    lines: dict[str, list[int]] = {name: [] for name in names}
    line = 1
    for piece in _TOKEN.findall(text):
        if piece == "\n":
            line += 1
        elif piece[0] in "\"'":
            lines.get(piece[1:-1], []).append(line)
    return min((found for found in lines.values() if found), key=len, default=[0])[0]


def field_lines(text: str) -> dict[str, int]:
    """Return the line on which each field of a protobuf text is first named, by its dotted path.

    String values have entries of their own: `parameters.key=threads` distinguishes one `parameters.key` from others.
    """
    lines: dict[str, int] = {}
    open_brackets: list[tuple[str, str]] = []
    name, line = "", 1
    for piece in _TOKEN.findall(text):
        if piece == "\n":
            line += 1
        elif piece in {"{", "<", "["}:
            open_brackets.append((piece, name or (open_brackets[-1][1] if open_brackets else "")))
            name = ""
        elif piece in {"}", ">", "]"}:
            if open_brackets:
                open_brackets.pop()
            name = ""
        elif piece[0] != "#":
            is_string = piece[0] in "\"'"
            name = name if is_string else piece
            dotted = ".".join([*(field for bracket, field in open_brackets if bracket != "["), name])
            lines.setdefault(f"{dotted}={piece[1:-1]}" if is_string else dotted, line)
    return lines
