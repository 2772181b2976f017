"""The document: all results of a run, as JSON. The HTML page, comparisons, peers and tuning are made from it.

Units are in the names; latencies are microseconds. What was not measured is None, never 0; a figure that is not a
number is null in the file. Histograms of latencies are HdrHistogram's own text (V2, base64): nanoseconds, three digits,
from when a request was due or sent to its answer.

The format's number changes when a field is removed or changes its meaning. New fields have a default and leave it
unchanged: a file of an older penstock can be read, and one of a later penstock is rejected, naming the unknown field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "penstock-perf/1"


class DocumentError(Exception):
    """A file is not a document of this format."""


@dataclass(slots=True)
class Offered:
    """The load of a level. `kind`: concurrency, rate or intervals.

    `value`: concurrent requests, or requests a second.
    """

    kind: str
    value: float
    distribution: str = ""


@dataclass(slots=True)
class Client:
    """The generator's measurements. `latency_us`: mean, std, min, max, p50, p75, p90, p95, p99, p99.9.

    `late_us`: the lateness of requests in sending (p50, p99, max), None in a closed loop; `errors`: the number of
    failed requests by error text, which are in no other figure. `cores`: the generator's.
    `responses_per_s`: of a decoupled model's responses; None if each request has one.
    """

    requests: int
    rows: int
    seconds: float
    requests_per_s: float
    rows_per_s: float
    latency_us: dict[str, float]
    histogram: str
    errors: dict[str, int] = field(default_factory=dict)
    late_us: dict[str, float] | None = None
    cpu_us_per_request: float = 0.0
    cores: float = 0.0
    responses_per_s: float | None = None


@dataclass(slots=True)
class ServerSide:
    """The server's statistics for the same time. Times are means per request.

    `batches`: executions by their rows. `overhead_us`: the part of a request in none of the others. `version`: of the
    model.
    `request_us`: of a whole request; `cache_*_us`: of a hit, and of a miss in addition to its compute.
    """

    inferences: int
    executions: int
    requests: int
    queue_us: float
    compute_input_us: float
    compute_infer_us: float
    compute_output_us: float
    overhead_us: float
    rows_per_batch: float
    cache_hits: int = 0
    failed: int = 0
    batches: dict[str, int] = field(default_factory=dict)
    composing: dict[str, ServerSide] = field(default_factory=dict)
    version: str = ""
    request_us: float = 0.0
    cache_misses: int = 0
    cache_hit_us: float = 0.0
    cache_miss_us: float = 0.0


@dataclass(slots=True)
class Samples:
    """Samples taken about once a second: `at_s` from the level's start, and as many values in each series.

    Names of series: `gpu.<uuid>.utilization` (0 to 1), `gpu.<uuid>.power_w`, `gpu.<uuid>.memory_bytes`,
    `gpu.<uuid>.memory_total_bytes`, `cpu.utilization` (0 to 1, the machine), `memory.used_bytes`, `server.cores`,
    `server.rss_bytes`, `throughput` (answers/s), and any other.
    """

    at_s: list[float] = field(default_factory=list)
    series: dict[str, list[float | None]] = field(default_factory=dict)


@dataclass(slots=True)
class Level:
    """One load. `windows`: each measurement window, of which the last `settled` make up the figures.

    `ended`: why it ended before it was stable: empty, unstable, interrupted, or what went wrong with the server.
    `gpus`: by UUID, over the settled windows: mean `utilization` (0 to 1) and `power_w`, maximum `memory_bytes`, and
    `memory_total_bytes`, as far as known. `notes`: why something is None, and other remarks.
    """

    offered: Offered
    stable: bool
    client: Client
    settled: int = 0
    windows: list[Client] = field(default_factory=list)
    server: ServerSide | None = None
    samples: Samples | None = None
    server_cpu_s_per_1000: float | None = None
    server_rss_bytes: float | None = None
    energy_j_per_1000: float | None = None
    ended: str = ""
    gpus: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Model:
    """The model that was driven. `fingerprint`: of its configuration, to tell whether two runs had the same."""

    name: str
    version: str
    platform: str
    max_batch_size: int
    inputs: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""


@dataclass(slots=True)
class Document:
    """A run. `command`: repeats it; `failed`: why it ended before all levels were done, or empty."""

    model: Model
    command: list[str]
    made_at: str
    url: str
    protocol: str
    batch: int = 1
    levels: list[Level] = field(default_factory=list)
    server: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False
    failed: str = ""
    target_ms: float | None = None
    format: str = FORMAT


def write(document: Document, path: Path) -> None:
    """Write it as JSON. Raises: OSError."""
    path.write_text(text(document), "utf-8")


def text(document: Document) -> str:
    """Return its JSON. Values that JSON cannot represent are written as text: an option must never lose a run."""
    return json.dumps(_to_json(dataclasses.asdict(document)), indent=1, allow_nan=False) + "\n"


def read(path: Path) -> Document:
    """Read it, strictly: every field known, present and of its type. Raises: DocumentError, OSError."""
    try:
        value = json.loads(path.read_text("utf-8"))
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise DocumentError(f"not a report of `penstock perf` ({FORMAT})")
        document: Document = _make(Document, value, "")
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise DocumentError(f"{path}: {error}") from error
    except DocumentError as error:
        raise DocumentError(f"{path}: {error}") from error
    return document


def _to_json(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _to_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    return value if value is None or isinstance(value, int | str) else str(value)


@functools.cache
def _union_members(kind: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _make(kind: type[Any], members: Any, where: str) -> Any:
    if not isinstance(members, dict):
        raise DocumentError(_type_error(where, "an object", members))
    kinds = _union_members(typing.cast("Hashable", kind))
    if unknown := members.keys() - kinds.keys():
        raise DocumentError(f"{_member_path(where, min(unknown))}: not known; was it made by a later penstock?")
    missing = dataclasses.MISSING
    for each in dataclasses.fields(kind):
        if each.name not in members and each.default is missing and each.default_factory is missing:
            raise DocumentError(f"{_member_path(where, each.name)}: missing")
    return kind(**{name: _read_value(kinds[name], value, _member_path(where, name)) for name, value in members.items()})


def _read_value(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):
        return None if value is None else _read_value(typing.get_args(kind)[0], value, where)
    if dataclasses.is_dataclass(kind):
        return _make(typing.cast("type[Any]", kind), value, where)
    if kind is float:
        return _read_number(value, where)
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if not isinstance(value, origin) or (isinstance(value, bool) and origin is not bool):
        raise DocumentError(_type_error(where, _TYPE_NAMES[origin], value))
    if origin is list:
        return [_read_value(inner[0], each, f"{where}[{index}]") for index, each in enumerate(value)]
    if origin is dict:
        return {name: _read_value(inner[1], each, _member_path(where, name)) for name, each in value.items()}
    return value


_TYPE_NAMES = {list: "a list", dict: "an object", str: "a string", int: "a whole number", bool: "true or false"}


def _read_number(value: Any, where: str) -> float:
    if value is None:
        return math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            return float(value)
    raise DocumentError(_type_error(where, "a number", value))


def _member_path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _type_error(where: str, expected: str, value: Any) -> str:
    return f"{where} must be {expected}, not {json.dumps(value)[:60]}"
