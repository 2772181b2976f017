"""ModelSettings: which models are served, and how they run. Settings inherits them.

Read by the composition root. Names are Triton's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ModelSettings:
    """Where models are found, when they are loaded and unloaded, and what their Instances share."""

    model_repository: tuple[str, ...] = setting(
        (), "Models", "What to serve: a model repository, local or at a URL, or a single .onnx file or SavedModel. "
        "Repeatable; equivalent to PATH arguments.", unit="path",
    )  # fmt: skip
    model_load_thread_count: int = setting(
        4, "Models", "Maximum number of models that load at the same time.", unit="models", bounds=(1, 256)
    )
    default_max_batch_size: int = setting(
        64, "Models", "max_batch_size for models whose configuration omits it and whose graph has a batch dimension "
        "(Triton: 4, in --backend-config).", unit="rows", bounds=(1, 2**20),
    )  # fmt: skip
    model_control_mode: str = setting(
        "none", "Models", "When models are loaded and unloaded. none: once, at startup. poll: when their files change. "
        "explicit: on load and unload requests; only --load-model models are loaded at startup.",
        choices=("none", "poll", "explicit"),
    )  # fmt: skip
    load_model: tuple[str, ...] = setting(
        (), "Models", "A model to load at startup in explicit mode; `*` loads all. Repeatable.", unit="NAME"
    )
    repository_poll_secs: float = setting(
        15.0, "Models", "Interval between checks for changed files in poll mode, limited to 20 checks a second. 0: "
        "never.", unit="seconds", bounds=(0.0, 86400.0),
    )  # fmt: skip
    model_load_retry_count: int = setting(
        0, "Models", "How many times to retry loading a version that fails to load.", unit="times", bounds=(0, 1000)
    )
    model_config_name: str = setting(
        "", "Models", "Use a model's configs/NAME.pbtxt, if it exists, instead of its config.pbtxt.", unit="NAME"
    )
    exit_on_error: bool = setting(
        False, "Models", "Exit if a model cannot be served at startup. Off by default (Triton: on): a broken model is "
        "UNAVAILABLE and the others are served.",
    )  # fmt: skip
    strict_readiness: bool = setting(
        True, "Models", "Report ready only when every model is ready. Off: report ready once loading has finished."
    )
    id: str = setting(
        "triton", "Models", "Server name reported in the server metadata. The default is Triton's, which its example "
        "clients require.",
    )  # fmt: skip

    backend_config: tuple[str, ...] = setting(
        (), "Models", "`[BACKEND,]default-max-batch-size=N`: Triton's form of --default-max-batch-size, which it "
        "overrides, for one backend or for all; `onnxruntime,default-max-batch-size=N`, for example. "
        "`tensorflow,gpu-memory-fraction=F`: fraction of a GPU's memory that each TensorFlow model's process reserves "
        "up front. Repeatable.", unit="RULE",
    )  # fmt: skip
    disable_auto_complete_config: bool = setting(
        False, "Models", "Do not complete a model's configuration from the model itself: a model that does not declare "
        "its inputs and outputs fails to load.",
    )  # fmt: skip
    cache_config: tuple[str, ...] = setting(
        (), "Models", "`local,size=BYTES`: size of the response cache, used by models whose configuration sets "
        "`response_cache { enable: true }`.", unit="RULE",
    )  # fmt: skip
    rate_limit: str = setting(
        "off", "Models", "execution_count: an Instance runs only while it holds the resources in its `rate_limiter`; "
        "Instances of lower priority run less often.", choices=("off", "execution_count"),
    )  # fmt: skip
    rate_limit_resource: tuple[str, ...] = setting(
        (), "Models", "`NAME:COUNT[:DEVICE]`: amount of a resource on each device, or on one. If the flag is given, "
        "resources it does not name do not exist. If it is omitted, each resource defaults to the largest amount any "
        "one Instance requires. Repeatable.", unit="RULE",
    )  # fmt: skip
    host_policy: tuple[str, ...] = setting(
        (), "Models", "`NAME,cpu-cores=0-3` or `NAME,numa-node=0`: Instances with this `host_policy` load and run on "
        "these CPUs. The policy of an Instance that names none is `cpu`, or `gpu_0` and so on. Repeatable.",
        unit="RULE",
    )  # fmt: skip
