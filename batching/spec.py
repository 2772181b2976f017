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
THREADS = "intra_op_thread_count"
"""The option of a Loader that says how many threads an operation has."""
_SAY_THREADS = "TF_NUM_INTRA_THREADS", THREADS  # as backends/tensorflow.py reads them
FIRST_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Source: Triton core, first_response_histogram's default buckets."""


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How requests of one priority level wait. Source: Triton's ModelQueuePolicy.

    Units: microseconds; `default_timeout_us` 0: no limit, `max_requests` likewise. `delays`: one whose timeout is over
    goes on waiting behind all of its level whose is not; otherwise it fails. `allow_timeout_override` None: not said,
    as timeouts.py has it.
    """

    default_timeout_us: int = 0
    allow_timeout_override: bool | None = None
    max_requests: int = 0
    delays: bool = False


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """How requests of one model share batches.

    Units: rows, bytes, microseconds as named. `max_batch_rows` 0: the model has no axis for rows; None: not said,
    to be completed with `default_max_batch_rows` if the model allows. `cap_rows` None: learned from measured run
    times. `executor`: "auto" (learned), "thread" or "loop". `max_queue_rows` and `max_queue_bytes` 0: not said, as
    room.py has them; `max_queue_requests` 0: no bound of this kind.

    `latency_target_us` 0: none. `allowed_rows`: the only sizes that run, a batch being padded up to the next one.
    `split`: a request of more rows than a batch may have runs in parts. `invariant`: the bytes of an answer do not
    depend on who shared its batch. `run_limit_us`: a run is ended after so long; 0: never.

    `priority_levels` 0: there are none. `level_policies` has the QueuePolicy of each level that has one of its own; the
    others have the model's (`default_timeout_us`, `allow_timeout_override`, `max_queue_requests`, `timeout_delays`).
    `preserve_ordering`: answers leave in the order in which their requests came. `hold_requests`: nothing runs until so
    many wait, once, for tests.
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
class Resource:
    """What an Instance holds while it runs, of what the rate limiter counts. `shared`: once for all devices."""

    name: str
    count: int
    shared: bool = False


@dataclass(frozen=True, slots=True)
class InstanceGroup:
    """`count` Instances on each of `devices` ("cpu", "cuda:0", ...). 0: chosen by measurement when it is loaded.

    `passive` ones are loaded and never run. `resources` and `rate_priority` (1 or more: an Instance of priority 2 has
    half the chances of one of priority 1; 0 is 1) are the rate limiter's, and idle without it. `host_policy` names the
    CPUs that its threads are kept to; "": `cpu`, or `gpu_0` and so on. `number`: which one of the configuration it is.
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

    `false_true` are its two values; a corrid has the id instead, as `datatype`.
    """

    name: str
    kind: str
    datatype: str
    false_true: tuple[float, float] = (0, 1)


@dataclass(frozen=True, slots=True)
class State:
    """A tensor that a sequence has between its requests: what comes out as `output` goes in as `input`.

    Shapes: `shape` is without rows. `initial` is the file with the first value's bytes; None: zeros. `initial_shape` is
    the shape of that value, where it is said; otherwise free axes begin as 1.
    """

    input: str
    output: str
    datatype: str
    shape: tuple[int, ...]
    initial: Path | None = None
    initial_shape: tuple[int, ...] | None = None

    @property
    def begin(self) -> tuple[int, ...]:
        """The shape that it begins with."""
        return tuple(map(abs, self.shape)) if self.initial_shape is None else self.initial_shape


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """How sequences of requests are run. Source: Triton's ModelSequenceBatching.

    `direct`: each sequence has a row of the batch to itself; otherwise the oldest requests share batches. Units:
    `idle_us` without a request after which a sequence is forgotten, `max_delay_us` that a batch may be held open, until
    `min_utilization` (0 to 1) of its rows are there (direct). `max_candidates`: the most sequences under way per
    Instance (oldest); 0: as many as a batch has rows. `hold_backlog`: where requests are held for a test, they are held
    until so many wait for a place, too. `iterative`: a request is a sequence of its own, which runs until its model is
    done with it (iterations.py).
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
    """One model of an ensemble. `inputs` and `outputs`: its names to the ensemble's. `version` "": the latest."""

    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class EnsembleSpec:
    """A model made of models. `max_inflight`: the most requests of one at a step at once; 0: no limit."""

    steps: tuple[Step, ...]
    max_inflight: int = 0


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """A tensor about a ragged batch. `kind` is Triton's (BATCH_ELEMENT_COUNT, ...), `sources` what it is about."""

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
    """A warm-up sample: run `count` times by each Instance before ready, with so many rows; 1 if the model has none."""

    name: str
    rows: int
    count: int
    inputs: Mapping[str, SampleInput]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Where a model's user code runs when it has processes of its own.

    `interpreter` is the Python to run, "": the server's own. `requirements` is the file that says what its environment
    holds: a requirements.txt, a Pipfile, or a packed environment (.tar.gz); None: the interpreter's own. `packages` are
    installed beside what a requirements.txt or a Pipfile says, or alone. `path` comes first on sys.path; `environment`
    are variables. Units: `timeout_s` per call, `memory_bytes` resident; 0: no limit.
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
    """The user's file with `pre_inference` and/or `post_inference`; Path(): none, only the rules of the dialect.

    `replicas` None: decided at load by whether the module writes globals. Units: `timeout_s` per hook call. `workers`
    is how many processes it runs in, as `worker` says; 0: in the server, None: in the server until it is measured to
    hold the loop. `roots` are folders whose modules are imported as those beside the file are, instead of those.
    `mounts`: paths that user code finds elsewhere, in workers only: what it opens under a key is under its value.
    `dialect` names the component format whose rules turn values into tensors and errors into words, with
    `dialect_settings`, which are JSON (server/hooks/conversions.py); "": our own.
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
        """Whether there is user code at all."""
        return self.path != Path()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One version of one model.

    `inputs`/`outputs` are what the configuration declares, empty where it is silent; their shapes leave the row
    axis out, as config.pbtxt does. `signature` is None until completed; so is `bound`, what a Binding takes and gives,
    where that is another: in the model's own shapes, with derived inputs and kept outputs after the clients'.
    `samples` are run before it is ready. `cached`: answers are remembered. `decoupled`: a request has any number of
    answers. `device_priority`: its weight in the device's turns. `auto_complete`: whether inputs and outputs that are
    not declared are taken from the model. `worker` is where a model that is Python code runs, and `declared` its
    ModelConfig as JSON, which such code is given. `frees_rows`: where the graph fixes the first axis of every tensor to
    1, that is made the axis of rows, if running the model shows that its answers stay the same (freeing.py).
    `fallback`: why a model that asked for a GPU runs on the CPU, as its configuration allows; "": it does not.
    `first_response_ms`: the bounds of its histogram of first answers.
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
    bound: Signature | None = None
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
    declared: str = ""
    frees_rows: bool = False
    fallback: str = ""

    @property
    def threads(self) -> int:
        """How many threads its sessions are said to have; 0: as many as they like."""
        said = (self.options.get(option, "") for option in _SAY_THREADS)
        return next((int(each) for each in said if each.isdecimal() and int(each)), 0)

    @property
    def takes_parameters(self) -> bool:
        """Whether somebody reads the parameters of its requests: its own code, or that of a step it may have."""
        return bool(self.declared or self.ensemble)

    @property
    def streams(self) -> bool:
        """Whether running it gives any number of answers: it is user code, or a step of it is."""
        return self.decoupled and self.takes_parameters

    @property
    def too_preferred(self) -> str:
        """What is said of a preferred size that is more than a batch may have. Source: Triton core's own checks."""
        size = "dynamic batching preferred size" if self.sequence is None else "sequence batching preferred batch size"
        return f"{size} must be <= max batch size for {self.name}"
