"""RunningSettings: the part of the settings that is about how models run. Settings descends from it.

Read by the composition root. Names are Triton's where the meaning is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from .observing_settings import ObservingSettings
from .setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSettings(ObservingSettings):
    """What answers are remembered, and what Instances share."""

    cache_config: tuple[str, ...] = setting(
        (), "Models", "`local,size=BYTES`: remember so many bytes of answers of models whose configuration says "
        "`response_cache { enable: true }`.", unit="RULE",
    )  # fmt: skip
    rate_limit: str = setting(
        "off", "Models", "execution_count: Instances run only while they hold the resources of their `rate_limiter`, "
        "those of lower priority less often.", choices=("off", "execution_count"),
    )  # fmt: skip
    rate_limit_resource: tuple[str, ...] = setting(
        (), "Models", "`NAME:COUNT[:DEVICE]`: how much there is of a resource, on each device or on one. Silent: as "
        "much as the Instance that needs most. Repeatable.", unit="RULE",
    )  # fmt: skip
