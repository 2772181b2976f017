"""Defaults: values for what model configurations omit. Made by mirrors.py from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.batching.spec import DEFAULT_MAX_BATCH_ROWS

from .gpus import Gpus


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for what model configurations omit. `gpus`: the GPUs present, and which are the default.

    `config_name`: a model's configs/<config_name>.pbtxt, if it exists, replaces its config.pbtxt.
    `auto_complete`: whether undeclared inputs and outputs are taken from the model.
    `hold_requests`: the number of requests that must wait, once, before a model with a scheduler runs any.
    `hold_backlog`: the number that must wait for a place, for a model with sequences.
    `cpu_fallback`: a model that requests a GPU may run on the CPU. `gpu_limits`: by GPU, the fraction of its memory
    that may be in use before a load.
    `links_folder`: the folder whose models are links to others' folders. Its models have the names of the links,
    whatever their configurations say.
    `tensorflow_rows` and `tensorflow_options` apply to TensorFlow models. None: the same rows as for others.
    """

    max_batch_rows: int = DEFAULT_MAX_BATCH_ROWS
    tensorflow_rows: int | None = None
    tensorflow_options: Mapping[str, str] = field(default_factory=dict)
    gpus: Gpus = field(default_factory=partial(Gpus.from_numbers, None), compare=False)
    cpu_fallback: bool = False
    gpu_limits: Mapping[int, float] = field(default_factory=dict)
    config_name: str = ""
    hold_requests: int = 0
    hold_backlog: int = 0
    auto_complete: bool = True
    links_folder: Path | None = None

    @property
    def for_tensorflow(self) -> tuple[int, Mapping[str, str]]:
        """The rows and options for TensorFlow models."""
        rows = self.max_batch_rows if self.tensorflow_rows is None else self.tensorflow_rows
        return rows, self.tensorflow_options
