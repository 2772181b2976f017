"""Defaults: what the server decides where configurations are silent. Made by mirrors.py from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.batching.spec import DEFAULT_MAX_BATCH_ROWS

from .gpus import Gpus


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the server decides where configurations are silent. `gpus`: those that are there, and which are the default.

    `config_name`: a model's configs/<config_name>.pbtxt, where there is one, stands in for its config.pbtxt.
    `auto_complete`: whether inputs and outputs that are not declared are taken from the model.
    `hold_requests`: so many have to wait, once, before a model with a scheduler runs anything. `hold_backlog`: and so
    many for a place, of a model with sequences.
    `cpu_fallback`: a model that asks for a GPU may run on the CPU. `gpu_limits`: by GPU, the part of its memory that
    may be in use before a load.
    `linked`: the folder whose models are links to others' folders, and have the links' names, whatever their
    configurations call them.
    `tensorflow_rows` and `tensorflow_options` are for TensorFlow models; None: as many rows as for others.
    """

    max_batch_rows: int = DEFAULT_MAX_BATCH_ROWS
    tensorflow_rows: int | None = None
    tensorflow_options: Mapping[str, str] = field(default_factory=dict)
    gpus: Gpus = field(default_factory=partial(Gpus.told, None), compare=False)
    cpu_fallback: bool = False
    gpu_limits: Mapping[int, float] = field(default_factory=dict)
    config_name: str = ""
    hold_requests: int = 0
    hold_backlog: int = 0
    auto_complete: bool = True
    linked: Path | None = None

    @property
    def of_tensorflow(self) -> tuple[int, Mapping[str, str]]:
        """What is decided for TensorFlow models: their rows and their options."""
        rows = self.max_batch_rows if self.tensorflow_rows is None else self.tensorflow_rows
        return rows, self.tensorflow_options
