"""RunningSettings: how models run. Settings inherits them.

Read by the composition root. Names are Triton's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RunningSettings:
    """Backend defaults, the response cache, and the resources that Instances share."""

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
