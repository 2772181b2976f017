"""The v2 protocol's answers about models: metadata and statistics, as plain objects. Used by the control plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import TensorSpec
from penstock.batching.model import Model
from penstock.batching.scheduling.costs import RunTime
from penstock.batching.statistics import BatchSizeStatistics, Duration
from penstock.server.engines import FindsModels

MAX_REPORTED_KEYS = 32
"""The number of shapes per model whose run times are reported: those that ran most."""
_MS = 1_000_000


def model_metadata(engine: FindsModels, model: Model, version: str) -> dict[str, Any]:
    """Describe a model; without a requested version, `versions` lists all that are served.

    Outputs that are not tensors reach only hooks and are omitted.
    """
    versions = [version] if version else [each.version for each in engine.models() if each.name == model.name]
    return {
        "name": model.name,
        "versions": versions,
        "platform": model.platform,
        "inputs": _tensors(model.signature.inputs),
        "outputs": _tensors(model.signature.outputs),
    }


def model_statistics(model: Model, epoch_offset_ns: int) -> dict[str, Any]:
    """Return a model's statistics, with Triton's members in Triton's order.

    Every member is present and every number is an integer: perf_analyzer reads them with typed getters and aborts
    otherwise. Units: adding `epoch_offset_ns` converts a monotonic stamp to time since the epoch.
    """
    statistics = model.statistics.snapshot()
    last_ns = statistics.last_inference_ns
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": (last_ns + epoch_offset_ns) // _MS if last_ns else 0,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": _duration(statistics.success),
            "fail": _duration(statistics.fail),
            "queue": _duration(statistics.queue),
            "compute_input": _duration(statistics.compute_input),
            "compute_infer": _duration(statistics.compute_infer),
            "compute_output": _duration(statistics.compute_output),
            "cache_hit": _duration(statistics.cache_hit),
            "cache_miss": _duration(statistics.cache_miss),
        },
        "response_stats": {} if model.statistics.answers is None else model.statistics.answers.snapshot(),
        "batch_stats": [_batch_size(entry) for entry in statistics.batch_stats],
        "memory_usage": [],
    }


def requested_models(engine: FindsModels, name: str, version: str = "") -> list[Model]:
    """Return the models whose statistics are requested: all models without a name, all versions without a version.

    Raises: InferError (INVALID; NOT_READY while the server loads its models). Source of the texts: Triton core.
    """
    models = engine.models()
    if not name:
        return models
    named = [model for model in models if model.name == name]
    found = [model for model in named if version in {"", model.version}]
    if found:
        return found
    try:
        engine.model(name, version)
    except InferError as error:
        if error.code is Code.NOT_READY:
            raise
    if named:
        raise InferError(Code.INVALID, f"requested model version is not available for model '{name}'")
    raise InferError(Code.INVALID, f"requested model '{name}' is not available")


def run_times(model: Model) -> list[dict[str, Any]]:
    """Return the learned run times of a model: Penstock's own member of its statistics, over HTTP only."""
    with model.lock:
        entries = model.costs.run_times(MAX_REPORTED_KEYS)
    return [_run_time(each) for each in entries]


def _tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
    return [
        {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs if spec.is_tensor
    ]


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}


def _batch_size(entry: BatchSizeStatistics) -> dict[str, Any]:
    return {
        "batch_size": entry.rows,
        "compute_input": {"count": entry.count, "ns": entry.compute_input_ns},
        "compute_infer": {"count": entry.count, "ns": entry.compute_infer_ns},
        "compute_output": {"count": entry.count, "ns": entry.compute_output_ns},
    }


def _run_time(run_time: RunTime) -> dict[str, Any]:
    return {
        "shapes": [None if shape is None else list(shape) for shape in run_time.key],
        "rows": run_time.rows,
        "runs": run_time.runs,
        "mean_ns": run_time.mean_ns,
        "p95_ns": run_time.p95_ns,
    }
