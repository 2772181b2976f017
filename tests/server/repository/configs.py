"""ModelConfigs in protobuf text, read for the tests of their fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format

from penstock.server.protobuf import model_config_pb2
from penstock.server.repository.findings import Finding
from penstock.server.repository.gpus import Gpus
from penstock.server.repository.model_config import read
from penstock.server.repository.parsed_config import ParsedConfig
from penstock.server.repository.pbtxt import field_lines

Numbers = tuple[int, ...] | None
"""The GPUs present; None if unknown."""


def parse_text(text: str) -> Any:
    """Return a ModelConfig."""
    return text_format.Parse(text, model_config_pb2().ModelConfig())


def read_text(text: str, gpus: Numbers = (), folder: Path = Path("m")) -> tuple[ParsedConfig, list[Finding]]:
    """Read a ModelConfig as the config.pbtxt of a folder."""
    return read(folder, folder / "config.pbtxt", parse_text(text), field_lines(text), Gpus.from_numbers(gpus))


def read_values(text: str, gpus: Numbers = (), folder: Path = Path("m")) -> tuple[dict[str, Any], list[str]]:
    """Return the values read, and the messages of all findings."""
    parsed, findings = read_text(text, gpus, folder)
    return dict(parsed.values), [finding.message for finding in findings]
