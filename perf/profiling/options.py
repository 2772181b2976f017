"""Options: the settings of a run. Made by `command_line.py` from a command line, and directly by tuning and peers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.perf.generator.orders import Tls


@dataclass(frozen=True, slots=True)
class Rule:
    """When a level is stable: the last three windows are within `percentage` in throughput and latency.

    Units: `interval_ms`; `requests`: the least in a window, if windows are counted (`by_count`). `percentile` 0: the
    mean latency decides. `total_requests`: the number for the whole run, in one window; 0: use windows. `threshold_ms`:
    a latency that ends the level once a window reaches it; 0: none. `warmup_requests`: the number before the first
    window.
    """

    interval_ms: int = 5000
    by_count: bool = False
    requests: int = 50
    percentage: float = 10.0
    trials: int = 10
    percentile: int = 0
    total_requests: int = 0
    threshold_ms: float = 0.0
    warmup_requests: int = 0


@dataclass(frozen=True, slots=True)
class Range:
    """Levels to visit: from `start` to `end` by `step`. `end` 0: until the latency threshold is exceeded.

    `start` is always visited, even if `end` is below it.
    """

    start: float = 1
    end: float = 1
    step: float = 1


@dataclass(frozen=True, slots=True)
class Input:
    """The input to send. `source`: random, zero, or files and folders in perf_analyzer's format.

    `sequence_length` None: 20, or the number of steps in the user's own input. `sequence_ids`: the first id, and the
    number of ids (0: unlimited).
    """

    source: tuple[str, ...] = ("random",)
    batch: int = 1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    string_length: int = 128
    string: str | None = None
    binary_input: bool = True
    binary_output: bool = True
    shared_memory: str = "none"
    output_shared_memory_bytes: int = 102_400
    parameters: tuple[tuple[str, str | int | float | bool], ...] = ()
    sequence_length: int | None = None
    sequence_variation: float = 20.0
    sequence_ids: tuple[int, int] = (1, 0)
    seed: int = 0


_SECRET = re.compile("auth|cookie|token|key|secret|password", re.IGNORECASE)


def hidden(header: tuple[str, str]) -> tuple[str, str]:
    """Return a header as a report may show it: without what is likely a secret."""
    name, value = header
    return name, "..." if _SECRET.search(name) else value


@dataclass(frozen=True, slots=True)
class Options:
    """One run. `sequences`: the number of concurrent sequences in an open loop.

    `composing`: names and versions of the models that a model calls itself. `inputs`: metadata entries for a model
    whose metadata has no inputs. `trace`: trace settings to apply before the run. `command`: the words that repeat the
    run.
    `verbose`: 0 to 2.
    """

    model: str
    version: str = ""
    url: str = ""
    grpc: bool = False
    tls: Tls | None = None
    headers: tuple[tuple[str, str], ...] = ()
    streaming: bool = False
    compression: str = "none"
    concurrency: Range | None = field(default_factory=Range)
    rate: Range | None = None
    poisson: bool = False
    intervals: Path | None = None
    binary_search: bool = False
    sequences: int = 4
    rule: Rule = field(default_factory=Rule)
    input: Input = field(default_factory=Input)
    processes: int = 1
    connections: int = 0
    target_ms: float | None = None
    collect_metrics: bool = False
    metrics_url: str = "localhost:8002/metrics"
    metrics_interval_ms: int = 1000
    csv: Path | None = None
    verbose_csv: bool = False
    export: Path | None = None
    json: Path | None = None
    html: Path | None = None
    composing: tuple[tuple[str, str], ...] = ()
    inputs: tuple[dict[str, Any], ...] = ()
    trace: tuple[tuple[str, tuple[str, ...]], ...] = ()
    verbose: int = 0
    progress: bool = True
    command: tuple[str, ...] = ()
