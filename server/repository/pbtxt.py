"""config.pbtxt: protobuf text into tritonclient's ModelConfig, with the line of each field.

Called by scan.py and completed.py, which alone touch protobuf.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from .findings import Finding, MistakeError, read_text

_MODULE = "tritonclient.grpc.model_config_pb2"
_TOKEN = re.compile(r"#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|[{}<>\[\]]|\n")


def model_config_pb2() -> Any:
    """Give the generated module that tritonclient ships.

    It is loaded by its path, because importing its package needs grpcio, which Penstock does without. It is entered
    in `sys.modules` under its own name, so that whoever imports it later gets the same message classes.
    """
    if _MODULE in sys.modules:
        return sys.modules[_MODULE]
    package = importlib.util.find_spec("tritonclient")
    folder = next(iter((package.submodule_search_locations if package else None) or ()), "")
    spec = importlib.util.spec_from_file_location(_MODULE, Path(folder, "grpc", "model_config_pb2.py"))
    if spec is None or spec.loader is None:
        raise ImportError("tritonclient/grpc/model_config_pb2.py is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_MODULE]
        raise
    return module


def parse(path: Path) -> tuple[Any, dict[str, int]]:
    """Read a config.pbtxt.

    Returns: the ModelConfig, and the line of the first mention of each field (`dynamic_batching.priority_levels`).
    Raises: MistakeError with the line where the text is wrong.
    """
    from google.protobuf import text_format

    text = read_text(path)
    config = model_config_pb2().ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        message = re.sub(r"^(\d+:)*\d* ?: ?", "", str(error))
        raise MistakeError(Finding(path, message, error.GetLine() or 0)) from error
    except (ValueError, RecursionError) as error:
        raise MistakeError(Finding(path, str(error))) from error
    return config, field_lines(text)


def field_lines(text: str) -> dict[str, int]:
    """Find the line on which each field of a protobuf text is first named, by its dotted path."""
    lines: dict[str, int] = {}
    opened: list[tuple[str, str]] = []
    name, line = "", 1
    for piece in _TOKEN.findall(text):
        if piece == "\n":
            line += 1
        elif piece in {"{", "<", "["}:
            opened.append((piece, name or (opened[-1][1] if opened else "")))
            name = ""
        elif piece in {"}", ">", "]"}:
            if opened:
                opened.pop()
            name = ""
        elif piece[0] not in "#\"'":
            name = piece
            dotted = ".".join([*(field for bracket, field in opened if bracket != "["), name])
            lines.setdefault(dotted, line)
    return lines
