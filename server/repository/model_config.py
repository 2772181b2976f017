"""What a ModelConfig says, field by field: honoured, documentation, or refused. Nothing is accepted and ignored.

Called by scan.py. docs/compatibility-triton.md has one row per field; a test holds the three together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.backends.datatypes import BY_CONFIG_NAME
from penstock.backends.signature import TensorSpec
from penstock.batching.spec import InstanceGroup

from .findings import Finding, MistakeError, inside, read_text
from .statement import Statement
from .takes import is_file_name

PLATFORM, BACKEND = "onnxruntime_onnx", "onnxruntime"
MODEL_FILE = "model.onnx"
MAX_INSTANCES = 1024
"""Of one group, as in penstock.toml: a configuration may come over the network, and an Instance is a thread."""

REFUSED = (
    "runtime", "input.reshape", "input.is_shape_tensor", "input.allow_ragged_batch", "input.is_non_linear_format_io",
    "output.reshape", "output.is_shape_tensor", "output.is_non_linear_format_io", "batch_input", "batch_output",
    "optimization.priority", "optimization.cuda", "optimization.gather_kernel_buffer_threshold",
    "optimization.eager_batching", "optimization.execution_accelerators.cpu_execution_accelerator",
    "dynamic_batching.preserve_ordering", "dynamic_batching.priority_levels",
    "dynamic_batching.default_priority_level", "dynamic_batching.priority_queue_policy", "sequence_batching",
    "ensemble_scheduling", "instance_group.rate_limiter", "instance_group.secondary_devices",
    "instance_group.profile", "instance_group.passive", "instance_group.host_policy", "cc_model_filenames",
    "model_warmup", "model_operations", "model_transaction_policy.decoupled",
    "model_repository_agents", "response_cache.enable", "model_metrics",
)  # fmt: skip
DOCUMENTATION = ("input.format", "instance_group.name")
HONOURED = (
    "name", "platform", "backend", "version_policy", "max_batch_size", "input.name", "input.data_type", "input.dims",
    "input.optional", "output.name", "output.data_type", "output.dims", "output.label_filename",
    "optimization.graph.level", "optimization.execution_accelerators.gpu_execution_accelerator",
    "optimization.input_pinned_memory", "optimization.output_pinned_memory",
    "dynamic_batching.preferred_batch_size", "dynamic_batching.max_queue_delay_microseconds",
    "dynamic_batching.default_queue_policy", "instance_group.kind", "instance_group.count", "instance_group.gpus",
    "default_model_filename", "metric_tags", "parameters",
)  # fmt: skip

_GRAPH_LEVELS = {-1: "basic", 0: "all", 1: "extended", 2: "disabled"}
_TRUE, _FALSE = frozenset({"true", "1"}), frozenset({"false", "0"})


def _thread_count(value: str) -> str | None:
    if not value.isascii() or not value.isdigit() or int(value) > 4096:
        raise ValueError("an integer from 0 to 4096")
    return str(int(value)) if int(value) else None


def _zero_or_one(value: str) -> str:
    if value not in {"0", "1"}:
        raise ValueError("0 or 1")
    return value


def _boolean(value: str) -> str:
    if value.lower() not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return "1" if value.lower() in _TRUE else "0"


PARAMETERS: dict[str, tuple[str, Callable[[str], str | None]]] = {
    "intra_op_thread_count": ("runtime.intra_op_threads", _thread_count),
    "inter_op_thread_count": ("runtime.inter_op_threads", _thread_count),
    "execution_mode": ("runtime.execution_mode", _zero_or_one),
    "enable_mem_arena": ("runtime.mem_arena", _boolean),
    "enable_mem_pattern": ("runtime.mem_pattern", _boolean),
}
"""The `parameters` that are honoured, each with what it says and its check."""
ENTRIES = ("session.use_device_allocator_for_initializers", "memory.enable_memory_arena_shrinkage")
"""The `parameters` that are handed to ONNX Runtime as they are."""


class Reader:
    """Reads one ModelConfig into a Statement, collecting every mistake.

    `folder` is the model's, `path` the configuration's. `gpus`: those that are there; None where nobody has looked,
    and the runtime will be the judge.
    """

    def __init__(
        self, folder: Path, path: Path, config: Any, lines: Mapping[str, int], gpus: tuple[int, ...] | None
    ) -> None:
        self._folder = folder
        self._path = path
        self._config = config
        self._lines = lines
        self._gpus = gpus
        self._name = config.name
        self._values: dict[str, Any] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        self.findings: list[Finding] = []

    def read(self, name: str) -> Statement:
        """Read it all. `name` is the folder's."""
        self._name = name
        for field in REFUSED:
            if any(_given(self._config, field.split("."))):
                self._mistake(field, f"field '{field}' is not supported")
        self._identity(name)
        self._versions()
        self._batching()
        self._tensors()
        self._instances()
        self._optimization()
        self._parameters()
        self._tags()
        return Statement(self._path, self._values, self._places)

    def _mistake(self, field: str, message: str) -> None:
        self.findings.append(Finding(self._path, message, self._line(field)))

    def _line(self, field: str) -> int:
        while field and field not in self._lines:
            field = field.rpartition(".")[0]
        return self._lines.get(field, 0)

    def _say(self, name: str, value: Any, field: str) -> None:
        self._values[name] = value
        self._places[name] = (self._path, self._line(field))

    def _identity(self, name: str) -> None:
        config = self._config
        if config.name not in {"", name}:
            text = f"unexpected directory name '{name}' for model '{config.name}', directory name must equal model name"
            self._mistake("name", text)
        if config.platform not in {"", PLATFORM}:
            self._mistake("platform", f"platform '{config.platform}' is not supported, known: {PLATFORM}")
        if config.backend not in {"", BACKEND}:
            self._mistake("backend", f"backend '{config.backend}' is not supported, known: {BACKEND}")
        if config.backend or config.platform:
            self._say("model.backend", BACKEND, "backend" if config.backend else "platform")
        if config.default_model_filename:
            if not is_file_name(config.default_model_filename):
                text = f"'{config.default_model_filename}' is not the name of a file in the version's folder"
                self._mistake("default_model_filename", text)
            self._say("model.file", config.default_model_filename, "default_model_filename")

    def _versions(self) -> None:
        chosen = self._config.version_policy.WhichOneof("policy_choice")
        field = f"version_policy.{chosen}"
        if chosen == "all":
            self._say("model.versions", ("all", ()), field)
        elif chosen == "latest":
            count = self._config.version_policy.latest.num_versions
            if not count:
                self._mistake(field, "version_policy.latest.num_versions must be 1 or more")
            self._say("model.versions", ("latest", count), field)
        elif chosen == "specific":
            versions = tuple(sorted(set(self._config.version_policy.specific.versions)))
            if not versions or versions[0] < 1:
                self._mistake(field, "version_policy.specific.versions must be integers above 0")
            self._say("model.versions", ("specific", versions), field)

    def _batching(self) -> None:
        config = self._config
        if config.max_batch_size < 0:
            self._mistake("max_batch_size", f"'max_batch_size' must be non-negative value for {self._name}")
        elif config.max_batch_size:
            self._say("batching.max_batch_size", config.max_batch_size, "max_batch_size")
        batching = config.dynamic_batching
        if batching.preferred_batch_size:
            field = "dynamic_batching.preferred_batch_size"
            if min(batching.preferred_batch_size) < 1:
                self._mistake(field, f"dynamic batching preferred size must be positive for {self._name}")
            self._say("batching.preferred", tuple(sorted(set(batching.preferred_batch_size))), field)
        if batching.max_queue_delay_microseconds:
            field = "dynamic_batching.max_queue_delay_microseconds"
            self._say("batching.max_queue_delay_us", batching.max_queue_delay_microseconds, field)
        if batching.HasField("default_queue_policy"):
            self._queue_policy(batching.default_queue_policy)

    def _queue_policy(self, queue: Any) -> None:
        field = "dynamic_batching.default_queue_policy"
        if queue.timeout_action:
            self._mistake(f"{field}.timeout_action", f"field '{field}.timeout_action' is supported as REJECT only")
        if queue.default_timeout_microseconds:
            text = f"{field}.default_timeout_microseconds"
            self._say("batching.default_timeout_us", queue.default_timeout_microseconds, text)
        if queue.max_queue_size:
            self._say("batching.max_queue_requests", queue.max_queue_size, f"{field}.max_queue_size")
        self._say("batching.allow_timeout_override", queue.allow_timeout_override, f"{field}.allow_timeout_override")

    def _tensors(self) -> None:
        for kind, tensors in (("input", self._config.input), ("output", self._config.output)):
            specs = [spec for tensor in tensors if (spec := self._tensor(kind, tensor))]
            twice = {spec.name for spec in specs if sum(other.name == spec.name for other in specs) > 1}
            for name in sorted(twice):
                self._mistake(kind, f"{kind} '{name}' is declared more than once")
            if specs:
                self._say(f"{kind}s", tuple(specs), kind)
        labels = {output.name: output.label_filename for output in self._config.output if output.label_filename}
        if labels:
            self._say("labels", {name: self._labels(file) for name, file in labels.items()}, "output.label_filename")

    def _tensor(self, kind: str, tensor: Any) -> TensorSpec | None:
        if not tensor.name:
            self._mistake(f"{kind}.name", f"model {kind} must specify 'name' for {self._name}")
            return None
        datatype = BY_CONFIG_NAME.get(_enum_name(tensor, "data_type"))
        if datatype is None:
            self._mistake(kind, f"model {kind} '{tensor.name}' must specify 'data_type' for {self._name}")
            return None
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            text = "dimension must be integer >= 1, or -1 to indicate a variable-size dimension"
            self._mistake(f"{kind}.dims", f"model {kind} '{tensor.name}' {text} for {self._name}")
        if kind == "input" and tensor.format and len(tensor.dims) != 3:
            self._mistake("input.format", f"model input NHWC/NCHW require 3 dims for {self._name}")
        return TensorSpec(tensor.name, datatype.name, tuple(tensor.dims), kind == "input" and tensor.optional)

    def _labels(self, name: str) -> tuple[str, ...]:
        path = inside(self._folder, name)
        if path is None:
            self._mistake("output.label_filename", f"'{name}' lies outside the model's folder")
            return ()
        try:
            return tuple(line.rstrip() for line in read_text(path).splitlines())
        except MistakeError as error:
            self.findings.append(error.finding)
            return ()

    def _instances(self) -> None:
        groups: list[InstanceGroup] = []
        for number, group in enumerate(self._config.instance_group):
            count = group.count or 1
            if not 0 < count <= MAX_INSTANCES:
                text = f"instance group {number}: count must be from 1 to {MAX_INSTANCES}"
                self._mistake("instance_group.count", text)
                continue
            kind = _enum_name(group, "kind").removeprefix("KIND_")
            if group.gpus and kind in {"CPU", "MODEL"}:
                text = f"instance group {number} has kind KIND_{kind} but specifies one or more GPUs"
                self._mistake("instance_group.gpus", text)
            groups += [InstanceGroup(count, (device,)) for device in self._devices(number, kind, tuple(group.gpus))]
        if groups:
            self._say("instances", tuple(groups), "instance_group")

    def _devices(self, number: int, kind: str, gpus: tuple[int, ...]) -> list[str]:
        known = self._gpus
        wanted = gpus or known or ()
        if kind == "AUTO":
            kind = "GPU" if wanted and (known is None or set(wanted) <= set(known)) else "CPU"
        if kind != "GPU":
            return ["cpu"]
        absent = sorted(set(wanted) - set(wanted if known is None else known))
        if absent or not wanted:
            none = "but names no gpus" if known is None else "but no GPUs are available"
            text = f"specifies gpu {absent[0]}, which is not there" if absent else none
            self._mistake("instance_group.gpus", f"instance group {number} has kind KIND_GPU {text}")
            return ["cpu"]
        return [f"cuda:{gpu}" for gpu in wanted]

    def _optimization(self) -> None:
        optimization = self._config.optimization
        for side in ("input_pinned_memory", "output_pinned_memory"):
            if optimization.HasField(side) and not getattr(optimization, side).enable:
                self._mistake(f"optimization.{side}", f"field 'optimization.{side}' is supported as enable: true only")
        if optimization.HasField("graph"):
            level = _GRAPH_LEVELS.get(optimization.graph.level)
            if level is None:
                text = f"optimization.graph.level {optimization.graph.level} is unknown, known: -1, 0, 1, 2"
                self._mistake("optimization.graph.level", text)
            self._say("runtime.graph_level", level or "all", "optimization.graph.level")
        field = "optimization.execution_accelerators.gpu_execution_accelerator"
        for accelerator in optimization.execution_accelerators.gpu_execution_accelerator:
            if accelerator.name != "cuda":
                self._mistake(
                    f"{field}.name", f"execution accelerator '{accelerator.name}' is not supported, known: cuda"
                )
                continue
            if all(group.devices == ("cpu",) for group in self._values.get("instances", (InstanceGroup(),))):
                self._mistake(field, "execution accelerator 'cuda' needs an instance_group with a GPU")
            parameters = {f"cuda.{name}": value for name, value in accelerator.parameters.items()}
            self._say("runtime.cuda", parameters, field)

    def _tags(self) -> None:
        tags = tuple(sorted(self._config.metric_tags.items()))
        for name, _ in tags:
            if not re.fullmatch("[a-zA-Z0-9_]+", name):
                self._mistake("metric_tags", f"metric tag '{name}' cannot be a label: letters, digits and _ only")
        if tags:
            self._say("metrics.tags", tags, "metric_tags")

    def _parameters(self) -> None:
        for name, parameter in sorted(self._config.parameters.items()):
            if name in ENTRIES:
                entries = {**self._values.get("runtime.entries", {}), name: parameter.string_value}
                self._say("runtime.entries", entries, "parameters")
                continue
            if name not in PARAMETERS:
                known = ", ".join((*PARAMETERS, *ENTRIES))
                self._mistake("parameters", f"parameter '{name}' is not supported, known: {known}")
                continue
            said, check = PARAMETERS[name]
            try:
                value = check(parameter.string_value)
            except ValueError as error:
                self._mistake("parameters", f"parameter '{name}' is '{parameter.string_value}', takes {error}")
                continue
            if value is not None:
                self._say(said, value, "parameters")


def _enum_name(message: Any, field: str) -> str:
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(getattr(message, field))
    return value.name if value else ""


def _given(message: Any, names: list[str]) -> Iterator[bool]:
    """Yield whether the field at the end of a dotted path is set, in every element on the way."""
    field = message.DESCRIPTOR.fields_by_name[names[0]]
    value = getattr(message, names[0])
    if len(names) == 1:
        yield message.HasField(names[0]) if field.has_presence else bool(value)
        return
    inner: Iterable[Any] = value if field.is_repeated else [value]
    for element in inner:
        yield from _given(element, names[1:])
