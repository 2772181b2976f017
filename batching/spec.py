"""ModelSpec: the complete configuration of one model version, including how it is batched. Frozen.

Made by `server/repository`, completed from the model itself by `completion.py`, read by the Engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.backends.signature import Signature, TensorSpec

DEFAULT_MAX_BATCH_ROWS = 64
THREADS_OPTION = "intra_op_thread_count"
"""The Loader option for the number of threads per operation."""
_THREAD_OPTIONS = "TF_NUM_INTRA_THREADS", THREADS_OPTION  # as backends/tensorflow.py reads them
FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Source: Triton core, first_response_histogram's default buckets."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How requests of one priority level wait. Source: Triton's ModelQueuePolicy.

    Units: microseconds. `default_timeout_us` and `max_requests`: 0 means no limit. `delays_on_timeout`: a request that
    times out stays queued behind all of its level that have not; otherwise it fails. `allow_timeout_override` is None
    if unset; timeouts.py defines what applies then.
    """

    default_timeout_us: int = 0
    allow_timeout_override: bool | None = None
    max_requests: int = 0
    delays_on_timeout: bool = False


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How requests of one model share batches.

    Units: rows, bytes, microseconds as named.
    `max_batch_rows`: 0 if the model has no axis for rows; None if unset, to be completed with `default_max_batch_rows`
    if the model allows. `cap_rows`: None means learned from measured run times. `executor`: "auto" (learned), "thread"
    or "loop". `max_queue_rows` and `max_queue_bytes`: 0 means unset, with the defaults in queue_limits.py;
    `max_queue_requests`: 0 means no such limit.
    `latency_target_us`: 0 means none. `allowed_rows`: the only sizes that run; a batch is padded up to the next one.
    `split`: a request of more rows than a batch may have runs in parts. `invariant`: the bytes of an answer do not
    depend on the other requests in its batch. `run_limit_us`: a run is ended after this long; 0 means never.
    `priority_levels`: 0 means none. `level_policies` maps each level that has its own QueuePolicy to it; the others use
    the model's (`default_timeout_us`, `allow_timeout_override`, `max_queue_requests`, `timeout_delays`).
    `preserve_ordering`: answers leave in the order in which their requests came. `hold_requests`: for tests; the
    first run waits until this many requests are queued.
    """

    max_batch_rows: int | None = None
    preferred_rows: tuple[int, ...] = ()
    max_queue_delay_us: int = 0
    max_queue_rows: int = 0
    max_queue_bytes: int = 0
    max_queue_requests: int = 0
    default_timeout_us: int = 0
    allow_timeout_override: bool | None = None
    cap_rows: int | None = None
    executor: str = "auto"
    default_max_batch_rows: int = DEFAULT_MAX_BATCH_ROWS
    latency_target_us: int = 0
    allowed_rows: tuple[int, ...] = ()
    split: bool = False
    invariant: bool = False
    run_limit_us: int = 0
    timeout_delays: bool = False
    priority_levels: int = 0
    default_priority: int = 0
    level_policies: Mapping[int, QueuePolicy] = field(default_factory=dict, hash=False)
    preserve_ordering: bool = False
    hold_requests: int = 0


@dataclass(frozen=True, slots=True)
class PaddedAxis:
    """One free axis of one input, padded up to the next of `buckets` so that different lengths share a Lane.

    `axis` counts from 0 after the rows, as dims in a configuration do. `buckets` ascend; if empty, `padding.bucket`
    supplies the defaults. Lengths beyond the last bucket run unpadded. `mask` names an input that is 1 where a row is
    real and 0 where it is padding; callers need not send it. `outputs` gives the axis of each output that is trimmed
    back to the length; None means those with the same symbolic dimension in the model.
    """

    input: str
    axis: int
    buckets: tuple[int, ...] = ()
    value: float = 0.0
    mask: str = ""
    outputs: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Resource:
    """A rate limiter resource that an Instance holds while it runs. `shared`: counted once for all devices."""

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` Instances on each of `devices` ("cpu", "cuda:0", ...). 0: chosen by measurement at load.

    `passive` Instances are loaded and never run. The rate limiter uses `resources` and `rate_priority`, which have no
    effect without it; an Instance of priority 2 has half the chances of one of priority 1, and 0 means 1. `host_policy`
    names the CPUs that its threads are pinned to; "" means `cpu`, or `gpu_0` and so on. `number` is the group's
    position in the configuration.
    """

    count: int = 1
    devices: tuple[str, ...] = ("cpu",)
    passive: bool = False
    resources: tuple[Resource, ...] = ()
    rate_priority: int = 0
    host_policy: str = ""
    number: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Control:
    """An input that tells the model about sequences. `kind`: "start", "end", "ready" or "corrid".

    `false_true` are its two values; a "corrid" input carries the sequence id instead, as `datatype`.
    """

    name: str
    kind: str
    datatype: str
    false_true: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a sequence keeps between requests: the value of `output` becomes the next request's `input`.

    Shapes: `shape` is without rows. `initial` is the file with the first value's bytes; None means zeros.
    `initial_shape` is the shape of that value, if configured; otherwise free axes start at 1.
    """

    input: str
    output: str
    datatype: str
    shape: tuple[int, ...]
    initial: Path | None = None
    initial_shape: tuple[int, ...] | None = None

    @property
    def first_shape(self) -> tuple[int, ...]:
        """The shape of the first value."""
        return tuple(map(abs, self.shape)) if self.initial_shape is None else self.initial_shape


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """How sequences of requests are run. Source: Triton's ModelSequenceBatching.

    `direct`: each sequence has its own row of the batch; otherwise the oldest requests share batches. `max_candidates`:
    the most sequences under way per Instance (oldest); 0 means as many as a batch has rows. `iterative`: each request
    is its own sequence and runs until the model is done with it (iterations.py).
    `hold_backlog`: for tests; when requests are held, they are held until this many also wait for a slot.
    Units: a sequence is forgotten after `idle_us` without a request. With `direct`, a batch may be held open for
    `max_delay_us`, until a share `min_utilization` (0 to 1) of its rows has requests.
    """

    direct: bool = True
    idle_us: int = 1_000_000
    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    max_delay_us: int = 0
    min_utilization: float = 0.0
    max_candidates: int = 0
    hold_backlog: int = 0
    iterative: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One model of an ensemble. `inputs`, `outputs`: its names to the ensemble's. `version`: "" means the latest."""

    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EnsembleSpec:
    """A model made of models. `max_inflight`: the most requests of one call at a step at once; 0 means no limit."""

    steps: tuple[Step, ...]
    max_inflight: int = 0


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """A tensor that describes a ragged batch. `kind`: Triton's (BATCH_ELEMENT_COUNT, ...); `sources`: its subjects."""

    name: str
    kind: str
    datatype: str
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleInput:
    """One input of a warm-up sample, without rows. `source`: "zero", "random" or the file with its bytes."""

    datatype: str
    shape: tuple[int, ...]
    source: str | Path


@dataclass(frozen=True, slots=True)
class Sample:
    """A warm-up sample: each Instance runs it `count` times before the model is ready. `rows`: 1 if it has none."""

    name: str
    rows: int
    count: int
    inputs: Mapping[str, SampleInput]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Where a model's user code runs if it has its own worker processes.

    `interpreter` is the Python to run; "" means the server's own. `requirements` is the file that defines its
    environment: a requirements.txt, a Pipfile, or a packed environment (.tar.gz); None means the interpreter's own.
    `packages` are installed in addition to a requirements.txt or Pipfile, or alone. `path` comes first on sys.path;
    `environment` are variables. Units: `timeout_s` per call, `memory_bytes` resident; 0 means no limit.
    """

    interpreter: str = ""
    requirements: Path | None = None
    path: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    timeout_s: float = 0.0
    memory_bytes: int = 0
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HookSpec:
    """The user's file with `pre_inference` and/or `post_inference`; Path() if there is none, only a dialect's rules.

    `replicas` None: decided at load by whether the module writes globals. Units: `timeout_s` per hook call. `workers`
    is how many processes it runs in, configured by `worker`; 0 means in the server, None means in the server until it
    is measured to block the loop. `roots` are folders whose modules the file can import, instead of those beside it.
    `mounts`, in workers only: a path that user code opens under a key is found under its value. `dialect` names the
    component format whose rules turn values into tensors and errors into texts, with the JSON `dialect_settings`
    (server/hooks/conversions.py); "" means Penstock's own.
    """

    path: Path
    replicas: int | str | None = None
    timeout_s: float = 30.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    worker: WorkerSpec = field(default_factory=WorkerSpec)
    roots: tuple[Path, ...] = ()
    mounts: Mapping[str, str] = field(default_factory=dict, hash=False)
    dialect: str = ""
    dialect_settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def has_file(self) -> bool:
        """Whether there is any user code."""
        return self.path != Path()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One version of one model.

    `inputs` and `outputs` are what the configuration declares, empty if it declares nothing; as in config.pbtxt, their
    shapes omit the row axis. `signature` is None until completed. `binding_signature` is what a Binding takes and
    returns, if that differs: the model's own shapes, with derived inputs and kept outputs after the clients'.
    `samples` run before the model is ready. `cached`: answers are cached. `decoupled`: a request has any number of
    answers. `device_priority`: its weight when models take turns on a device. `auto_complete`: whether inputs and
    outputs that are not declared are taken from the model. `worker` is where a model that is Python code runs, and
    `declared_config` the ModelConfig, as JSON, passed to that code. `frees_rows`: if the graph fixes the first axis of
    every tensor to 1, that axis becomes the row axis, provided that running the model shows unchanged answers
    (freeing.py). `fallback_reason`: why a model configured for a GPU runs on the CPU, if its configuration allows that;
    "" if it does not. `first_response_ms`: the bounds of its first-response histogram.
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
    first_response_ms: tuple[float, ...] = FIRST_RESPONSE_BOUNDS_MS
    signature: Signature | None = None
    binding_signature: Signature | None = None
    sequence: SequenceSpec | None = None
    ensemble: EnsembleSpec | None = None
    batch_inputs: tuple[BatchTensor, ...] = ()
    batch_outputs: tuple[BatchTensor, ...] = ()
    samples: tuple[Sample, ...] = ()
    cached: bool = False
    decoupled: bool = False
    device_priority: float = 1.0
    auto_complete: bool = True
    worker: WorkerSpec = field(default_factory=WorkerSpec)
    declared_config: str = ""
    frees_rows: bool = False
    fallback_reason: str = ""

    @property
    def threads(self) -> int:
        """The configured number of threads per session; 0 if unset, which leaves it to the runtime."""
        values = (self.options.get(option, "") for option in _THREAD_OPTIONS)
        return next((int(each) for each in values if each.isdecimal() and int(each)), 0)

    @property
    def reads_parameters(self) -> bool:
        """Whether the parameters of its requests are read: by its own code or by that of a step it may have."""
        return bool(self.declared_config or self.ensemble)

    @property
    def is_streaming(self) -> bool:
        """Whether a request may get any number of answers: it is user code, or one of its steps is."""
        return self.decoupled and self.reads_parameters

    @property
    def preferred_size_error(self) -> str:
        """The error text for a preferred size larger than a batch may be. Source: Triton core's own checks."""
        size = "dynamic batching preferred size" if self.sequence is None else "sequence batching preferred batch size"
        return f"{size} must be <= max batch size for {self.name}"
