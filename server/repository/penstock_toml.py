"""penstock.toml: the native configuration of one model, read strictly. Called by scan.py."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.batching.spec import InstanceGroup, PaddedAxis

from . import takes
from .fields.accelerators import OPTIONS
from .fields.instances import ASKED
from .findings import Finding, MistakeError, inside, is_there, read_text
from .placing import ANY_DEVICE
from .statement import Statement

_PART = r"""(?:"[^"\n]*"|'[^'\n]*'|[\w-]+)"""
_NAME = rf"({_PART}(?:\s*\.\s*{_PART})*)"
_WORD_LINE = re.compile(rf"\s*{_NAME}\s*=")
_TABLE_LINE = re.compile(rf"\s*\[\s*{_NAME}\s*\]")

_ELSEWHERE = frozenset({"enable_cuda_graph"})
"""Options of providers that have a key of their own: gpu_graphs."""

PADDING = "padding.<input>"
"""The table of one input's padded axis, as it is written of: `[padding.input_ids]`, for one."""

KEYS: dict[str, dict[str, takes.Check]] = {
    "model": {"backend": takes.word, "file": takes.file_name, "versions": takes.versions},
    "batching": {
        "max_batch_size": takes.integer(0, 2**31 - 1),
        "cap": takes.integer(1),
        "max_queue_delay_us": takes.integer(0),
        "preferred": takes.sizes,
        "executor": takes.choice(auto="auto", thread="thread", loop="loop"),
        "max_queue_rows": takes.integer(1),
        "max_queue_bytes": takes.integer(1),
        "max_queue_requests": takes.integer(0),
        "default_timeout_us": takes.integer(0),
        "allow_timeout_override": takes.boolean,
        "latency_target_ms": takes.milliseconds,
        "allowed_sizes": takes.sizes,
        "split": takes.boolean,
        "invariance": takes.choice(off=False, strict=True),
        "run_limit_ms": takes.milliseconds,
    },
    "instances": {"count": takes.count, "devices": takes.devices, "memory_budget_mb": takes.megabytes},
    PADDING: {
        "axis": takes.integer(0),
        "buckets": takes.buckets,
        "value": takes.number,
        "mask": takes.word,
        "outputs": takes.axes,
    },
    "worker": {
        "interpreter": takes.word,
        "requirements": takes.word,
        "timeout_s": takes.seconds,
        "memory_mb": takes.megabytes,
    },
    "hooks": {
        "file": takes.word,
        "replicas": takes.replicas,
        "timeout_s": takes.seconds,
        "metadata": takes.anything,
        "workers": takes.integer(0, 256),
        "interpreter": takes.word,
        "requirements": takes.word,
        "worker_memory_mb": takes.megabytes,
    },
    "runtime": {
        "intra_op_threads": takes.threads,
        "inter_op_threads": takes.threads,
        "execution_mode": takes.choice(sequential="0", parallel="1"),
        "mem_arena": takes.flag,
        "mem_pattern": takes.flag,
        "graph_level": takes.choice(all="all", extended="extended", basic="basic", disabled="disabled"),
        "custom_op_libraries": takes.words,
        "isolated": takes.flag,
        "signature": takes.word,
        "graph_tag": takes.word,
        "gpu_memory_fraction": takes.fraction,
        "cpu_fallback": takes.flag,
        "gpu_graphs": takes.graphs,
        "gpu_memory": takes.size,
        "pinned": takes.flag,
    },
}
"""Every table and key, with what it takes. docs/repository.md explains each; a test holds the two together."""


PROVIDERS: dict[str, dict[str, takes.Check]] = {
    f"runtime.{provider}": {name: takes.option(check) for name, check in options.items() if name not in _ELSEWHERE}
    for provider, options in OPTIONS.items()
}
"""The tables of ONNX Runtime's providers, likewise."""


def read_toml(path: Path) -> tuple[Statement, list[Finding]]:
    """Read a penstock.toml; what is wrong in it is found all at once.

    Raises: MistakeError when it is no TOML at all.
    """
    text = read_text(path)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of an integer with thousands of digits
        place = re.search(r"\(at line (\d+), column \d+\)", str(error))
        raise MistakeError(Finding(path, f"is not valid TOML: {error}", int(place[1]) if place else 0)) from error
    lines = key_lines(text)
    values: dict[str, Any] = {}
    findings: list[Finding] = []
    for name, value, problem in _entries(document):
        if problem:
            findings.append(Finding(path, problem, _line(lines, name)))
        else:
            values[name] = value
    places = {name: (path, line) for name, line in lines.items()}
    return _composed(Statement(path, values, places), findings), findings


def _line(lines: Mapping[str, int], name: str) -> int:
    """Give the line of a key, or of the table it is in."""
    while name and name not in lines:
        name = name.rpartition(".")[0]
    return lines.get(name, 0)


def _entries(document: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for table, content in document.items():
        if table == "padding":
            yield from _padding_entries(content)
        elif table not in KEYS:
            yield table, None, _unknown("", table)
        elif not isinstance(content, dict):
            yield table, None, f"{table} must be a table, [{table}], not {_given(content)}"
        else:
            yield from _table_entries(table, table, content)


def _padding_entries(content: Any) -> Iterator[tuple[str, Any, str]]:
    tables = content if isinstance(content, dict) else {"": content}
    for tensor, keys in tables.items():
        name = f"padding.{tensor}" if tensor else "padding"
        if not isinstance(keys, dict):
            yield name, None, f"{name} must be a table per input, [{PADDING}], not {_given(keys)}"
        else:
            yield from _table_entries(PADDING, name, keys)
            if "axis" not in keys:
                yield name, None, f"[{name}] must set axis"


def _table_entries(table: str, place: str, content: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Check the keys of a table of KEYS; `place` is how the file names it."""
    for key, value in content.items():
        name = f"{place}.{key}"
        if name in PROVIDERS:
            yield from _provider_entries(name, value)
            continue
        check = _keys(table).get(key)
        if check is None:
            yield name, None, _unknown(table, key, name)
            continue
        try:
            yield name, check(value), ""
        except ValueError as error:
            yield name, None, f"{name} must be {error}, not {_given(value)}"


def _provider_entries(name: str, content: Any) -> Iterator[tuple[str, Any, str]]:
    """Check the table of a provider, which is asked for by being there."""
    if not isinstance(content, dict):
        yield name, None, f"{name} must be a table, [{name}], not {_given(content)}"
        return
    yield name, True, ""
    yield from _table_entries(name, name, content)


def _keys(table: str) -> Mapping[str, takes.Check]:
    return KEYS.get(table) or PROVIDERS.get(table, {})


def _unknown(table: str, word: str, name: str = "") -> str:
    """Say what is unknown, `name` a key of `table` or else a table, and what of a like name there is."""
    every = {known: f"{owner}.{known}" for owner, keys in [*PROVIDERS.items(), *KEYS.items()] for known in keys}
    tables = {known.partition(".")[0]: known for known in KEYS}
    here = {known: f"{table}.{known}" for known in _keys(table)} if table else tables
    unknown = f"unknown key {name}" if table else f"unknown table {word}"
    inside = [f"{table}.{known}" for known in _keys(table) if known.endswith(f"_{word}")]
    if inside:
        return f"{unknown}, the nearest known is {inside[0]}"
    for known, likeness in ((every, 1.0), (here, 0.6), (every, 0.6)):
        near = difflib.get_close_matches(word, known, 1, likeness)
        if near:
            return f"{unknown}, the nearest known is {known[near[0]]}"
    return f"{unknown}, known here: {', '.join(here)}"


def _given(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "table"}
    try:
        text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # Python writes no integer of so many digits
        text = "a number of thousands of digits"
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({kinds.get(type(value), 'date or time')})"


def _composed(statement: Statement, findings: list[Finding]) -> Statement:
    """Put together what takes two keys to say, and find the hooks' file."""
    values = dict(statement.values)
    count, devices = values.pop("instances.count", None), values.pop("instances.devices", None)
    if count is not None or devices:
        count = 1 if count is None else count
        values["instances"] = tuple(InstanceGroup(count, (device,)) for device in devices or (ANY_DEVICE,))
        values |= {ASKED: True} if devices else {}
    if "instances.memory_budget_mb" in values and count != 0:
        text = 'instances.memory_budget_mb requires instances.count = "auto"'
        findings.append(statement.mistake("instances.memory_budget_mb", text))
    if padding := _padding(values):
        values["padding"] = padding
    if "worker.requirements" in values:
        name = values["worker.requirements"]
        values["worker.requirements"] = found = statement.path.parent / name
        if not is_there(found):
            findings.append(statement.mistake("worker.requirements", f"worker.requirements: '{name}' does not exist"))
    if "hooks.file" in values:
        name = values.pop("hooks.file")
        path = inside(statement.path.parent, name)
        if path is None or not is_there(path) or not path.is_file():
            where = "is outside the model's folder" if path is None else "does not exist"
            findings.append(statement.mistake("hooks.file", f"hooks.file: '{name}' {where}"))
        else:
            values["hooks.file"] = path
    elif any(name.startswith("hooks.") for name in values) and not findings:
        findings.append(statement.mistake("hooks", "[hooks] must set file"))
    findings += _workers(statement, values)
    return Statement(statement.path, values, statement.places)


def _workers(statement: Statement, values: dict[str, Any]) -> Iterator[Finding]:
    """Find what is wrong with the processes that hooks are to run in, and put their requirements' path together."""
    workers, replicas = values.get("hooks.workers"), values.get("hooks.replicas", "shared")
    for key in ("interpreter", "requirements", "worker_memory_mb"):
        if f"hooks.{key}" in values and not workers:
            yield statement.mistake(f"hooks.{key}", f"hooks.{key} requires hooks.workers of at least 1")
    if workers and replicas not in {"shared", workers}:
        text = (
            f"hooks.replicas is {replicas}, but each of the {workers} hooks.workers is a replica: remove one of the two"
        )
        yield statement.mistake("hooks.replicas", text)
    if (name := values.get("hooks.requirements")) is not None:
        values["hooks.requirements"] = path = statement.path.parent / name
        if not is_there(path):
            yield statement.mistake("hooks.requirements", f"hooks.requirements: '{name}' does not exist")


def _padding(values: dict[str, Any]) -> tuple[PaddedAxis, ...]:
    """Take out what is said of inputs to be padded."""
    axes: dict[str, dict[str, Any]] = {}
    for name in [name for name in values if name.startswith("padding.")]:
        tensor, _, key = name.removeprefix("padding.").rpartition(".")
        axes.setdefault(tensor, {})[key] = values.pop(name)
    return tuple(PaddedAxis(tensor, **said) for tensor, said in axes.items() if "axis" in said)


def key_lines(text: str) -> dict[str, int]:
    """Find the line of each table and key. Best effort: lines inside multi-line strings may be taken for keys."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _TABLE_LINE.match(line):
            table = name = _plain(heading[1])
            while name:
                lines.setdefault(name, number)
                name = name.rpartition(".")[0]
        elif word := _WORD_LINE.match(line):
            name = _plain(word[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def _plain(name: str) -> str:
    """Write a dotted key without quotes."""
    return ".".join(part.strip("\"'") for part in re.findall(_PART, name))
