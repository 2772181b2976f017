"""Api: the validated description of one API of a project. Made by `project.py`, read by the rest of the dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Tracker:
    """What is counted of predictions: the value, or its `key`. `model_type` is "classification" or "regression"."""

    model_type: str
    key: str = ""


@dataclass(frozen=True, slots=True)
class Api:
    """One API of a deployment. It is served as the model `name`.

    - `endpoint` is the path for its POSTs, `/<deployment>/<name>` by default.
    - `kind` is "onnx" or "tensorflow".
    - `model` is the model's location, as written.
    - `handler` is the path of the request handler, as written, relative to `project`; "" for none. `python_path`
      likewise.
    - `metadata` is the user's own.
    - `generation` is the format of its part of the file: "0.9" or "0.10".
    - `relaxed_shapes`, an extension of Penstock's: free axes take the length of the values, where Cortex makes them 1.
    - `line` is its first line in cortex.yaml; `lines` are those of its model's keys, and of `compute`.
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
        """Return `HookSpec.dialect_settings`: what its Conversions need to know, as JSON."""
        tracker = {"model_type": self.tracker.model_type, "key": self.tracker.key} if self.tracker else None
        return {
            "kind": self.kind, "handler": self.handler, "relaxed_shapes": self.relaxed_shapes, "tracker": tracker,
        }  # fmt: skip
