"""Api: what a project says of one of its APIs, checked. Made by `project.py`, read by all else of the dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Tracker:
    """What is counted of predictions: the value, or `key` of it. `model_type`: "classification" or "regression"."""

    model_type: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Api:
    """One API of a deployment. It is served as the model `name`.

    `endpoint` is the path that it answers POSTs on, `/<deployment>/<name>` unless the project says another. `kind` is
    "onnx" or "tensorflow". `model` is where the model is, as it was written; `handler` is the request handler's path as
    it was written, relative to `project`, "" for none, and `python_path` likewise. `metadata` is the user's own.
    `generation` is the version of the format of its part of the file: "0.9" or "0.10". `relaxed_shapes`, which is ours:
    free axes are as long as the values that come, where Cortex made them 1. `line` is where in cortex.yaml it begins,
    and `lines` where the keys of its model are, and `compute`.
    """

    project: Path
    deployment: str
    name: str
    endpoint: str
    kind: str
    model: str
    handler: str = ""
    python_path: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    signature_key: str = ""
    tracker: Tracker | None = None
    compute: Mapping[str, Any] = field(default_factory=dict)
    generation: str = "0.10"
    relaxed_shapes: bool = False
    line: int = 0
    lines: Mapping[str, int] = field(default_factory=dict, compare=False)

    @property
    def settings(self) -> dict[str, Any]:
        """Give `HookSpec.dialect_settings`: what its Conversions know of it, as JSON has it."""
        tracker = {"model_type": self.tracker.model_type, "key": self.tracker.key} if self.tracker else None
        return {
            "kind": self.kind, "handler": self.handler, "relaxed_shapes": self.relaxed_shapes, "tracker": tracker,
        }  # fmt: skip
