"""ModelSettings: the part of the settings that is about which models there are. Settings has it.

Read by the composition root. Names are Triton's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ModelSettings:
    """Where models are found, and how they come and go."""

    model_repository: tuple[str, ...] = setting(
        (), "Models",
        "What to serve: a model repository, here or at a URL, or a single .onnx file or SavedModel. Repeatable; the "
        "same as PATH arguments.",
        unit="path",
    )  # fmt: skip
    model_load_thread_count: int = setting(
        4, "Models", "How many models load at the same time.", unit="models", bounds=(1, 256)
    )
    default_max_batch_size: int = setting(
        64, "Models", "The max_batch_size of a model whose configuration does not say and whose graph has room for "
        "rows (Triton: 4, in --backend-config).", unit="rows", bounds=(1, 2**20),
    )  # fmt: skip
    model_control_mode: str = setting(
        "none", "Models", "How models come and go. none: as they are found at start. poll: as their files change. "
        "explicit: as load and unload requests say, and only --load-model at start.",
        choices=("none", "poll", "explicit"),
    )  # fmt: skip
    load_model: tuple[str, ...] = setting(
        (), "Models", "A model to load at start in mode explicit; `*` for all. Repeatable.", unit="NAME"
    )
    repository_poll_secs: float = setting(
        15.0, "Models", "How often the files are looked at in mode poll, at most 20 times a second. 0: never.",
        unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    model_load_retry_count: int = setting(
        0, "Models", "How often a version that does not load is tried again.", unit="times", bounds=(0, 1000)
    )
    model_config_name: str = setting(
        "", "Models", "A model's configs/NAME.pbtxt, where there is one, stands in for its config.pbtxt.", unit="NAME"
    )
    exit_on_error: bool = setting(
        False, "Models", "Stop the server when a model cannot be served at start. Off here (Triton: on): a broken "
        "model is UNAVAILABLE and does not stop the others.",
    )  # fmt: skip
    strict_readiness: bool = setting(
        True, "Models", "Ready only when every model is ready. Off: ready as soon as loading has ended."
    )
    id: str = setting(
        "triton", "Models", "The name in the server metadata. Triton's by default: its example clients demand it."
    )
