"""RunningSettings: the part of the settings that is about how models run. Settings has it.

Read by the composition root. Names are Triton's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .setting import setting


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RunningSettings:
    """What answers are remembered, and what Instances share."""

    backend_config: tuple[str, ...] = setting(
        (), "Models", "`default-max-batch-size=N`, of all backends or, as in `onnxruntime,default-max-batch-size=N`, "
        "of one: Triton's way of saying --default-max-batch-size, which it goes before. "
        "`tensorflow,gpu-memory-fraction=F`: the part of a GPU's memory that each TensorFlow model's process takes at "
        "once. Repeatable.", unit="RULE",
    )  # fmt: skip
    disable_auto_complete_config: bool = setting(
        False, "Models", "Take nothing from the model that its configuration leaves out: one that does not declare its "
        "inputs and outputs does not load.",
    )  # fmt: skip
    cache_config: tuple[str, ...] = setting(
        (), "Models", "`local,size=BYTES`: remember so many bytes of answers of models whose configuration says "
        "`response_cache { enable: true }`.", unit="RULE",
    )  # fmt: skip
    rate_limit: str = setting(
        "off", "Models", "execution_count: Instances run only while they hold the resources of their `rate_limiter`, "
        "those of lower priority less often.", choices=("off", "execution_count"),
    )  # fmt: skip
    rate_limit_resource: tuple[str, ...] = setting(
        (), "Models", "`NAME:COUNT[:DEVICE]`: how much there is of a resource, on each device or on one. If it says "
        "anything, there is none of what it does not name; silent, as much as the Instance that needs most. "
        "Repeatable.", unit="RULE",
    )  # fmt: skip
    host_policy: tuple[str, ...] = setting(
        (), "Models", "`NAME,cpu-cores=0-3` or `NAME,numa-node=0`: Instances of this `host_policy` load and run on "
        "these CPUs. Those that name none are `cpu`, or `gpu_0` and so on. Repeatable.", unit="RULE",
    )  # fmt: skip
