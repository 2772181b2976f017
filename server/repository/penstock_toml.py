"""penstock.toml: the native configuration of one model, parsed strictly. Used by scan.py."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.batching.spec import InstanceGroup, PaddedAxis

from . import key_checks
from .fields.accelerators import OPTIONS
from .fields.instances import DEVICES_CONFIGURED
from .findings import Finding, MistakeError, path_exists, read_text, resolve_inside
from .parsed_config import ParsedConfig
from .placing import ANY_DEVICE

NATIVE_FILE = "penstock.toml"
_PART = r"""(?:"[^"\n]*"|'[^'\n]*'|[\w-]+)"""
_NAME = rf"({_PART}(?:\s*\.\s*{_PART})*)"
_WORD_LINE = re.compile(rf"\s*{_NAME}\s*=")
_TABLE_LINE = re.compile(rf"\s*\[\s*{_NAME}\s*\]")

_OWN_KEYS = frozenset({"enable_cuda_graph"})
"""Provider options that have a key of their own: gpu_graphs."""

PADDING = "padding.<input>"
"""The name in messages for the table of one input's padded axis, for example `[padding.input_ids]`."""

KEYS: dict[str, dict[str, key_checks.Check]] = {
    "model": {"backend": key_checks.string, "file": key_checks.file_name, "versions": key_checks.versions},
    "batching": {
        "max_batch_size": key_checks.integer(0, 2**31 - 1),
        "cap": key_checks.integer(1),
        "max_queue_delay_us": key_checks.integer(0),
        "preferred": key_checks.sizes,
        "executor": key_checks.choice(auto="auto", thread="thread", loop="loop"),
        "max_queue_rows": key_checks.integer(1),
        "max_queue_bytes": key_checks.integer(1),
        "max_queue_requests": key_checks.integer(0),
        "default_timeout_us": key_checks.integer(0),
        "allow_timeout_override": key_checks.boolean,
        "latency_target_ms": key_checks.milliseconds,
        "allowed_sizes": key_checks.sizes,
        "split": key_checks.boolean,
        "invariance": key_checks.choice(off=False, strict=True),
        "run_limit_ms": key_checks.milliseconds,
    },
    "instances": {"count": key_checks.count, "devices": key_checks.devices, "memory_budget_mb": key_checks.megabytes},
    PADDING: {
        "axis": key_checks.integer(0),
        "buckets": key_checks.buckets,
        "value": key_checks.number,
        "mask": key_checks.string,
        "outputs": key_checks.axes,
    },
    "worker": {
        "interpreter": key_checks.string,
        "requirements": key_checks.string,
        "timeout_s": key_checks.seconds,
        "memory_mb": key_checks.megabytes,
    },
    "hooks": {
        "file": key_checks.string,
        "replicas": key_checks.replicas,
        "timeout_s": key_checks.seconds,
        "metadata": key_checks.table,
        "workers": key_checks.integer(0, 256),
        "interpreter": key_checks.string,
        "requirements": key_checks.string,
        "worker_memory_mb": key_checks.megabytes,
    },
    "runtime": {
        "intra_op_threads": key_checks.threads,
        "inter_op_threads": key_checks.threads,
        "execution_mode": key_checks.choice(sequential="0", parallel="1"),
        "mem_arena": key_checks.flag,
        "mem_pattern": key_checks.flag,
        "graph_level": key_checks.choice(all="all", extended="extended", basic="basic", disabled="disabled"),
        "custom_op_libraries": key_checks.strings,
        "isolated": key_checks.flag,
        "signature": key_checks.string,
        "graph_tag": key_checks.string,
        "gpu_memory_fraction": key_checks.fraction,
        "cpu_fallback": key_checks.flag,
        "gpu_graphs": key_checks.graphs,
        "gpu_memory": key_checks.size,
        "pinned": key_checks.flag,
    },
}
"""Every table and key, with its Check. docs/repository.md explains each; a test keeps the two consistent."""


PROVIDERS: dict[str, dict[str, key_checks.Check]] = {
    f"runtime.{provider}": {name: key_checks.option(check) for name, check in options.items() if name not in _OWN_KEYS}
    for provider, options in OPTIONS.items()
}
"""The tables of ONNX Runtime's providers, in the same form."""


def read_toml(path: Path) -> tuple[ParsedConfig, list[Finding]]:
    """Read a penstock.toml, collecting every mistake.

    Raises: MistakeError if it is not TOML.
    """
    text = read_text(path)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also raised for an integer with thousands of digits
        match = re.search(r"\(at line (\d+), column \d+\)", str(error))
        raise MistakeError(Finding(path, f"is not valid TOML: {error}", int(match[1]) if match else 0)) from error
    lines = key_lines(text)
    values: dict[str, Any] = {}
    findings: list[Finding] = []
    for name, value, problem in _check_entries(document):
        if problem:
            findings.append(Finding(path, problem, _line(lines, name)))
        else:
            values[name] = value
    places = {name: (path, line) for name, line in lines.items()}
    return _combine_keys(ParsedConfig(path, values, places), findings), findings


def _line(lines: Mapping[str, int], name: str) -> int:
    """Return the line of a key, or of the table that contains it."""
    while name and name not in lines:
        name = name.rpartition(".")[0]
    return lines.get(name, 0)


def _check_entries(document: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for table, content in document.items():
        if table == "padding":
            yield from _check_padding(content)
        elif table not in KEYS:
            yield table, None, _describe_unknown("", table)
        elif not isinstance(content, dict):
            yield table, None, f"{table} must be a table, [{table}], not {_format_value(content)}"
        else:
            yield from _check_table(table, table, content)


def _check_padding(content: Any) -> Iterator[tuple[str, Any, str]]:
    tables = content if isinstance(content, dict) else {"": content}
    for tensor, keys in tables.items():
        name = f"padding.{tensor}" if tensor else "padding"
        if not isinstance(keys, dict):
            yield name, None, f"{name} must be a table per input, [{PADDING}], not {_format_value(keys)}"
        else:
            yield from _check_table(PADDING, name, keys)
            if "axis" not in keys:
                yield name, None, f"[{name}] must set axis"


def _check_table(table: str, table_name: str, content: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Check the keys of a table of KEYS. `table_name` is its name in the file."""
    for key, value in content.items():
        name = f"{table_name}.{key}"
        if name in PROVIDERS:
            yield from _check_provider(name, value)
            continue
        check = _keys_of(table).get(key)
        if check is None:
            yield name, None, _describe_unknown(table, key, name)
            continue
        try:
            yield name, check(value), ""
        except ValueError as error:
            yield name, None, f"{name} must be {error}, not {_format_value(value)}"


def _check_provider(name: str, content: Any) -> Iterator[tuple[str, Any, str]]:
    """Check the table of a provider. Its presence alone enables the provider."""
    if not isinstance(content, dict):
        yield name, None, f"{name} must be a table, [{name}], not {_format_value(content)}"
        return
    yield name, True, ""
    yield from _check_table(name, name, content)


def _keys_of(table: str) -> Mapping[str, key_checks.Check]:
    return KEYS.get(table) or PROVIDERS.get(table, {})


def _describe_unknown(table: str, key: str, name: str = "") -> str:
    """Describe an unknown key of `table`, or an unknown table, and suggest a similar known one."""
    everywhere = {
        name_known: f"{owner}.{name_known}"
        for owner, keys in [*PROVIDERS.items(), *KEYS.items()]
        for name_known in keys
    }
    tables = {name_known.partition(".")[0]: name_known for name_known in KEYS}
    in_table = {name_known: f"{table}.{name_known}" for name_known in _keys_of(table)} if table else tables
    unknown = f"unknown key {name}" if table else f"unknown table {key}"
    suffixed = [f"{table}.{name_known}" for name_known in _keys_of(table) if name_known.endswith(f"_{key}")]
    if suffixed:
        return f"{unknown}, the nearest known is {suffixed[0]}"
    for name_known, cutoff in ((everywhere, 1.0), (in_table, 0.6), (everywhere, 0.6)):
        similar = difflib.get_close_matches(key, name_known, 1, cutoff)
        if similar:
            return f"{unknown}, the nearest known is {name_known[similar[0]]}"
    return f"{unknown}, known here: {', '.join(in_table)}"


def _format_value(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "table"}
    try:
        text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    except ValueError:  # Python does not print an integer with that many digits
        text = "a number of thousands of digits"
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({kinds.get(type(value), 'date or time')})"


def _combine_keys(parsed: ParsedConfig, findings: list[Finding]) -> ParsedConfig:
    """Combine keys that belong together, and locate the hooks' file."""
    values = dict(parsed.values)
    count, devices = values.pop("instances.count", None), values.pop("instances.devices", None)
    if count is not None or devices:
        count = 1 if count is None else count
        values["instances"] = tuple(InstanceGroup(count, (device,)) for device in devices or (ANY_DEVICE,))
        values |= {DEVICES_CONFIGURED: True} if devices else {}
    if "instances.memory_budget_mb" in values and count != 0:
        text = 'instances.memory_budget_mb requires instances.count = "auto"'
        findings.append(parsed.make_mistake("instances.memory_budget_mb", text))
    if padding := _take_padding(values):
        values["padding"] = padding
    if "worker.requirements" in values:
        name = values["worker.requirements"]
        values["worker.requirements"] = path = parsed.path.parent / name
        if not path_exists(path):
            findings.append(parsed.make_mistake("worker.requirements", f"worker.requirements: '{name}' does not exist"))
    if "hooks.file" in values:
        name = values.pop("hooks.file")
        path = resolve_inside(parsed.path.parent, name)
        if path is None or not path_exists(path) or not path.is_file():
            where = "is outside the model's folder" if path is None else "does not exist"
            findings.append(parsed.make_mistake("hooks.file", f"hooks.file: '{name}' {where}"))
        else:
            values["hooks.file"] = path
    elif any(name.startswith("hooks.") for name in values) and not findings:
        findings.append(parsed.make_mistake("hooks", "[hooks] must set file"))
    findings += _check_workers(parsed, values)
    return ParsedConfig(parsed.path, values, parsed.locations)


def _check_workers(parsed: ParsedConfig, values: dict[str, Any]) -> Iterator[Finding]:
    """Find mistakes about the hooks' worker processes, and resolve the path of their requirements."""
    workers, replicas = values.get("hooks.workers"), values.get("hooks.replicas", "shared")
    for key in ("interpreter", "requirements", "worker_memory_mb"):
        if f"hooks.{key}" in values and not workers:
            yield parsed.make_mistake(f"hooks.{key}", f"hooks.{key} requires hooks.workers of at least 1")
    if workers and replicas not in {"shared", workers}:
        text = (
            f"hooks.replicas is {replicas}, but each of the {workers} hooks.workers is a replica: remove one of the two"
        )
        yield parsed.make_mistake("hooks.replicas", text)
    if (name := values.get("hooks.requirements")) is not None:
        values["hooks.requirements"] = path = parsed.path.parent / name
        if not path_exists(path):
            yield parsed.make_mistake("hooks.requirements", f"hooks.requirements: '{name}' does not exist")


def _take_padding(values: dict[str, Any]) -> tuple[PaddedAxis, ...]:
    """Remove the padding entries from `values` and return them as PaddedAxis objects."""
    axes: dict[str, dict[str, Any]] = {}
    for name in [name for name in values if name.startswith("padding.")]:
        tensor, _, key = name.removeprefix("padding.").rpartition(".")
        axes.setdefault(tensor, {})[key] = values.pop(name)
    return tuple(PaddedAxis(tensor, **keys) for tensor, keys in axes.items() if "axis" in keys)


def key_lines(text: str) -> dict[str, int]:
    """Return the line of each table and key. Best effort: lines inside multi-line strings may be taken for keys."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _TABLE_LINE.match(line):
            table = name = _unquote_key(heading[1])
            while name:
                lines.setdefault(name, number)
                name = name.rpartition(".")[0]
        elif word := _WORD_LINE.match(line):
            name = _unquote_key(word[1])
            lines.setdefault(f"{table}.{name}" if table else name, number)
    return lines


def _unquote_key(name: str) -> str:
    """Return a dotted key without quotes."""
    return ".".join(part.strip("\"'") for part in re.findall(_PART, name))
