"""DialectSettings: the part of the settings that says in which format what is served was written.

Settings descends from it. Read by the composition root.
"""

from __future__ import annotations

from dataclasses import dataclass

from .running_settings import RunningSettings
from .setting import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectSettings(RunningSettings):
    """What the paths hold, if no model repositories."""

    dialect: str = setting(
        "triton", "Dialects", "What PATHs hold: triton, model repositories; cortex, project folders with a cortex.yaml "
        "(docs/cortex.md), whose clients are answered as Cortex did.", choices=("triton", "cortex"),
    )  # fmt: skip
    s3_root: str = setting(
        "", "Dialects", "Folder that stands for S3: `s3://bucket/key` is `bucket/key` in it; empty: models at such "
        "addresses are fetched, where s3fs is installed.", unit="path",
    )  # fmt: skip


def lacks(dialect: str, *, fronts: bool) -> str:
    """Say what a dialect does not have; "" if nothing that was asked for. `fronts`: --http-workers was given."""
    if dialect == "cortex" and fronts:
        return "--http-workers: Cortex projects are served by one process: leave it out"
    return ""
