"""ModelSpec: all that is said about one model version, and the policy it is batched by. Frozen.

Made by `server/repository`, completed from the model itself by `completion.py`, read by the Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.backends.signature import Signature, TensorSpec

DEFAULT_MAX_BATCH_ROWS = 64
DEFAULT_QUEUE_ROWS = 1024
DEFAULT_QUEUE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How requests of one model share batches.

    Units: rows, bytes, microseconds as named. `max_batch_rows` 0: the model has no axis for rows; None: not said,
    to be completed with `default_max_batch_rows` if the model allows. `cap_rows` None: learned from measured run
    times. `executor`: "auto" (learned), "thread" or "loop".

    `latency_target_us` 0: none. `allowed_rows`: the only sizes that run, a batch being padded up to the next one.
    `split`: a request of more rows than a batch may have runs in parts. `invariant`: the bytes of an answer do not
    depend on who shared its batch. `run_limit_us`: a run is ended after so long; 0: never.
    """

    max_batch_rows: int | None = None
    preferred_rows: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    max_queue_rows: int = DEFAULT_QUEUE_ROWS
    max_queue_bytes: int = DEFAULT_QUEUE_BYTES
    max_queue_requests: int = 0
    default_timeout_us: int = 0
    allow_timeout_override: bool = True
    cap_rows: int | None = None
    executor: str = "auto"
    default_max_batch_rows: int = DEFAULT_MAX_BATCH_ROWS
    latency_target_us: int = 0
    allowed_rows: tuple[int, ...] = ()
    split: bool = False
    invariant: bool = False
    run_limit_us: int = 0


@dataclass(frozen=True, slots=True)
class PaddedAxis:
    """One free axis of one input, padded up to the next of `buckets` so that different lengths share a Lane.

    `axis` counts from 0 after the rows, as dims in a configuration do. `buckets` ascend; empty: as `padding.bucket` has
    them. Lengths beyond the last bucket run as they are. `mask` names an input that is 1 where a row is real and 0
    where it is padding; a caller need not send it. `outputs` says which axis of which output is trimmed back to the
    length; None: those that carry the same symbolic dimension in the model.
    """

    input: str
    axis: int
    buckets: tuple[int, ...] = ()
    value: float = 0.0
    mask: str = ""
    outputs: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` Instances on each of `devices` ("cpu", "cuda:0", ...). 0: chosen by measurement when it is loaded."""

    count: int = 1
    devices: tuple[str, ...] = ("cpu",)


@dataclass(frozen=True, slots=True)
class HookSpec:
    """The user's file with `pre_inference` and/or `post_inference`.

    `replicas` None: decided at load by whether the module writes globals. Units: `timeout_s` per hook call.
    """

    path: Path
    replicas: int | str | None = None
    timeout_s: float = 30.0
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One version of one model.

    `inputs`/`outputs` are what the configuration declares, empty where it is silent; their shapes leave the row
    axis out, as config.pbtxt does. `signature` is None until completed.
    """

    name: str
    version: int
    path: Path
    backend: str = "onnxruntime"
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    policy: BatchPolicy = field(default_factory=BatchPolicy)
    instances: tuple[InstanceGroup, ...] = (InstanceGroup(),)
    memory_budget_bytes: int = 0
    padding: tuple[PaddedAxis, ...] = ()
    hooks: HookSpec | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    metric_tags: tuple[tuple[str, str], ...] = ()
    signature: Signature | None = None
