"""The configuration of a loaded model, as Triton reports it: ModelConfig and its JSON. Used by Repository."""

from __future__ import annotations

from typing import Any

from penstock.backends.signature import TensorSpec
from penstock.batching.devices.fallback import CPU_FALLBACK
from penstock.batching.spec import ModelSpec
from penstock.server.protobuf import model_config_pb2

from .fields import sequences
from .fields.identity import BACKEND, PYTHON, TENSORFLOW
from .fields.instances import group_name
from .fields.optimization import PARAMETERS, TENSORFLOW_PARAMETERS
from .parsed_config import OPTIONS

_GRAPH_LEVELS = {"basic": -1, "all": 0, "extended": 1, "disabled": 2}


def complete_config(declared: Any, spec: ModelSpec, platform: str) -> Any:
    """Build the ModelConfig of a loaded version: the declared configuration and everything that was completed.

    `spec` is that of the loaded version; its instances are those that run, whether measured or configured.
    """
    config = model_config_pb2().ModelConfig()
    config.CopyFrom(declared)
    config.name, config.platform = spec.name, platform
    config.backend = "" if spec.ensemble is not None else spec.backend or BACKEND
    if config.backend == PYTHON:
        config.platform = ""
    signature = spec.signature
    # calls of user code share batches even if no tensor has an axis for rows
    config.max_batch_size = (spec.policy.max_batch_rows or 0) if signature is None or signature.batched else 0
    if signature is not None:
        _complete_tensors(config.input, signature.inputs, signature.batched)
        _complete_tensors(config.output, signature.outputs, signature.batched)
    _complete_batching(config, spec)
    _complete_instances(config, spec)
    if spec.ensemble is not None:
        # Source: ValidateEnsembleConfig of Triton's core, which overwrites the declared value
        if spec.decoupled or config.HasField("model_transaction_policy"):
            config.model_transaction_policy.decoupled = spec.decoupled
    else:
        # Source: NormalizeModelConfig of Triton's core
        for side in ("input_pinned_memory", "output_pinned_memory"):
            memory, is_set = getattr(config.optimization, side), config.optimization.HasField(side)
            memory.enable = (memory.enable or not is_set) and spec.options.get("penstock.pinned") != "0"
    parameters = TENSORFLOW_PARAMETERS if config.backend == TENSORFLOW else PARAMETERS
    for name, (key, _) in parameters.items():
        value = spec.options.get(OPTIONS[key])
        if value is not None:
            config.parameters[name].string_value = value
    if spec.fallback_reason:
        config.parameters[CPU_FALLBACK].string_value = "true"
    if "graph_optimization_level" in spec.options:
        config.optimization.graph.level = _GRAPH_LEVELS[spec.options["graph_optimization_level"]]
    return config


def _complete_instances(config: Any, spec: ModelSpec) -> None:
    """Complete the groups: names, counts, the kind chosen for KIND_AUTO, and GPUs.

    If no group is declared, all that run are added. A group declared for GPUs that runs on the CPU is reported as such.
    """
    if not config.instance_group:
        for kind, count, gpus in _running_groups(spec):
            config.instance_group.add(kind=kind, count=count, gpus=gpus)
    elif spec.fallback_reason:
        _move_to_cpu(config, spec)
    else:
        for number, group in enumerate(config.instance_group):
            devices = [device for running in spec.instances if running.number == number for device in running.devices]
            gpus = _gpu_numbers(devices)
            if group.kind == group.KIND_AUTO:
                group.kind = group.KIND_GPU if gpus else group.KIND_CPU
            group.gpus[:] = gpus
    for number, group in enumerate(config.instance_group):
        group.name = group_name(spec.name, number, group)
        group.count = group.count or 1


def _running_groups(spec: ModelSpec) -> list[tuple[str, int, list[int]]]:
    """Return what runs as groups of kind, count and GPUs; GPUs with the same count share a group."""
    gpus_by_group: dict[tuple[str, int], list[int]] = {}
    for group in spec.instances:
        for device in group.devices:
            kind = "KIND_CPU" if device == "cpu" else "KIND_GPU"
            gpus_by_group.setdefault((kind, group.count), []).extend(_gpu_numbers([device]))
    return [(kind, count, gpus) for (kind, count), gpus in gpus_by_group.items()]


def _move_to_cpu(config: Any, spec: ModelSpec) -> None:
    """Keep only the declared groups that run, all of which are on the CPU."""
    declared = list(config.instance_group)
    del config.instance_group[:]
    for group in spec.instances:
        reported = config.instance_group.add()
        if group.number < len(declared):
            reported.CopyFrom(declared[group.number])
        reported.kind, reported.count = reported.KIND_CPU, group.count
        del reported.gpus[:]


def _gpu_numbers(devices: list[str]) -> list[int]:
    """Return the numbers of the GPUs among `devices`, without duplicates."""
    return list(dict.fromkeys(int(device.partition(":")[2]) for device in devices if device != "cpu"))


def _complete_tensors(field: Any, tensors: tuple[TensorSpec, ...], batched: bool) -> None:
    """Rewrite `input` or `output` in the signature's order, keeping the declared fields other than the shape."""
    declared = {tensor.name: type(tensor).FromString(tensor.SerializeToString()) for tensor in field}
    del field[:]
    for tensor in tensors:
        if not tensor.is_tensor:
            continue
        entry = field.add()
        if tensor.name in declared:
            entry.CopyFrom(declared[tensor.name])
        entry.name = tensor.name
        entry.data_type = model_config_pb2().DataType.Value(tensor.type.config_name)
        entry.dims[:] = tensor.shape[1:] if batched else tensor.shape
        if tensor.optional:
            entry.optional = True


def _complete_batching(config: Any, spec: ModelSpec) -> None:
    """Report dynamic batching if requests are batched, declared or not: perf_analyzer tests for its presence.

    A model whose requests run alone has it only if it was declared. Levels and policies are reported as declared.
    """
    policy, kind = spec.policy, config.WhichOneof("scheduling_choice")
    rows = config.max_batch_size
    if kind == "sequence_batching":
        sequences.complete(config, rows)
    if kind not in {None, "dynamic_batching"}:
        return
    if kind is None and (rows < 2 or spec.backend == PYTHON):
        return
    batching = config.dynamic_batching
    batching.preferred_batch_size[:] = policy.preferred_rows or ((rows,) if rows else ())
    batching.max_queue_delay_microseconds = policy.max_queue_delay_us
    if policy.default_timeout_us or policy.max_queue_requests or batching.HasField("default_queue_policy"):
        queue = batching.default_queue_policy
        queue.timeout_action = queue.DELAY if policy.timeout_delays else queue.REJECT
        queue.default_timeout_microseconds = policy.default_timeout_us
        queue.max_queue_size = policy.max_queue_requests
        queue.allow_timeout_override = policy.allow_timeout_override is not False


def to_json(message: Any) -> dict[str, Any]:
    """Convert a protobuf message to JSON as Triton does: snake_case, defaults included, 64-bit integers as numbers.

    Unset messages and oneof members are absent, since clients test for their presence.
    """
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name["value"]
            result[field.name] = {str(key): _json_value(entry, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            result[field.name] = [_json_value(field, element) for element in value]
        else:
            result[field.name] = _json_value(field, value)
    return result


def _json_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return value
