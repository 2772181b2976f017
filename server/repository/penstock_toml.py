"""penstock.toml: the native configuration of one model, read strictly. Called by scan.py."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.batching.spec import InstanceGroup

from .findings import Finding, MistakeError, inside, read_text
from .statement import Statement

_DEVICE = re.compile(r"cpu|cuda:(0|[1-9]\d*)")
_WORD_LINE = re.compile(r"""\s*["']?([\w.\- ]+?)["']?\s*=""")
_TABLE_LINE = re.compile(r"""\s*\[\s*["']?([\w.\- ]+?)["']?\s*\]""")
_INT64 = 2**63 - 1

Check = Callable[[Any], Any]
"""Takes what the file gives, returns it as a Statement holds it; raises ValueError with what it takes instead."""


def _integer(low: int, high: int = _INT64) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"an integer, {low} or more" if high == _INT64 else f"an integer from {low} to {high}")
        return value

    return check


def _seconds(value: Any) -> float:
    if type(value) not in {int, float} or not 0 < value <= 86400:
        raise ValueError("a number of seconds above 0, at most 86400")
    return float(value)


def _word(value: Any) -> str:
    if type(value) is not str or not value:
        raise ValueError("a string")
    return value


def _file_name(value: Any) -> str:
    if type(value) is not str or not is_file_name(value):
        raise ValueError("the name of a file in the version's folder")
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("true or false")
    return value


def _flag(value: Any) -> str:
    return "1" if _boolean(value) else "0"


def _threads(value: Any) -> str:
    return str(_integer(1, 4096)(value))


def _choice(**values: Any) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not str or value not in values:
            raise ValueError("one of " + ", ".join(f'"{name}"' for name in values))
        return values[value]

    return check


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not list or not value or not all(type(size) is int and 0 < size <= _INT64 for size in value):
        raise ValueError("a list of integers above 0")
    return tuple(sorted(set(value)))


def _versions(value: Any) -> tuple[str, Any]:
    if value == "all":
        return "all", ()
    if type(value) is list and value and all(type(item) is int and 0 < item <= _INT64 for item in value):
        return "specific", tuple(sorted(set(value)))
    if type(value) is dict and list(value) == ["latest"] and type(value["latest"]) is int and value["latest"] > 0:
        return "latest", min(value["latest"], 2**32 - 1)
    raise ValueError('"all", a list of versions, or { latest = n }')


def _devices(value: Any) -> tuple[str, ...]:
    if type(value) is not list or not value or len(set(map(str, value))) < len(value):
        raise ValueError('a list of devices, each once ("cpu", "cuda:0", ...)')
    for device in value:
        if type(device) is not str or not _DEVICE.fullmatch(device):
            raise ValueError('a list of devices ("cpu", "cuda:0", ...)')
    return tuple(value)


def _replicas(value: Any) -> int | str:
    if value == "shared":
        return "shared"
    if type(value) is not int or not 1 <= value <= 4096:
        raise ValueError('an integer from 1 to 4096, or "shared"')
    return value


def _anything(value: Any) -> Any:
    if type(value) is not dict:
        raise ValueError("a table")
    return value


KEYS: dict[str, dict[str, Check]] = {
    "model": {"backend": _word, "file": _file_name, "versions": _versions},
    "batching": {
        "max_batch_size": _integer(0, 2**31 - 1),
        "cap": _integer(1),
        "max_queue_delay_us": _integer(0),
        "preferred": _sizes,
        "executor": _choice(auto="auto", thread="thread", loop="loop"),
        "max_queue_rows": _integer(1),
        "max_queue_bytes": _integer(1),
        "max_queue_requests": _integer(0),
        "default_timeout_us": _integer(0),
        "allow_timeout_override": _boolean,
    },
    "instances": {"count": _integer(1, 1024), "devices": _devices},
    "hooks": {"file": _word, "replicas": _replicas, "timeout_s": _seconds, "metadata": _anything},
    "runtime": {
        "intra_op_threads": _threads,
        "inter_op_threads": _threads,
        "execution_mode": _choice(sequential="0", parallel="1"),
        "mem_arena": _flag,
        "mem_pattern": _flag,
        "graph_level": _choice(all="all", extended="extended", basic="basic", disabled="disabled"),
    },
}
"""Every table and key, with what it takes. docs/repository.md explains each; a test holds the two together."""


def is_file_name(name: str) -> bool:
    """Tell whether `name` is one component: it names something in a folder, never the folder or a place outside."""
    return bool(name) and name not in {".", ".."} and not set(name) & {"/", "\\", "\0"}


def read_toml(path: Path) -> tuple[Statement, list[Finding]]:
    """Read a penstock.toml; what is wrong in it is found all at once.

    Raises: MistakeError when it is no TOML at all.
    """
    text = read_text(path)
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        place = re.search(r"\(at line (\d+), column \d+\)", str(error))
        raise MistakeError(Finding(path, f"is not TOML: {error}", int(place[1]) if place else 0)) from error
    lines = key_lines(text)
    values: dict[str, Any] = {}
    findings: list[Finding] = []
    for name, value, problem in _entries(document):
        if problem:
            line = lines.get(name) or lines.get(name.partition(".")[0], 0)
            findings.append(Finding(path, problem, line))
        else:
            values[name] = value
    places = {name: (path, line) for name, line in lines.items()}
    return _composed(Statement(path, values, places), findings), findings


def _entries(document: dict[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for table, content in document.items():
        if table not in KEYS:
            yield table, None, _unknown(table)
        elif not isinstance(content, dict):
            yield table, None, f"{table}: got {_given(content)}, takes a table: [{table}]"
        else:
            for key, value in content.items():
                name = f"{table}.{key}"
                check = KEYS[table].get(key)
                if check is None:
                    yield name, None, _unknown(name)
                    continue
                try:
                    yield name, check(value), ""
                except ValueError as error:
                    yield name, None, f"{name}: got {_given(value)}, takes {error}"


def _unknown(name: str) -> str:
    table, _, key = name.partition(".")
    kind = "key" if key else "table"
    every = {known: f"{owner}.{known}" for owner, keys in KEYS.items() for known in keys}
    here = {known: f"{table}.{known}" for known in KEYS[table]} if key else {known: known for known in KEYS}
    for known, likeness in ((every, 1.0), (here, 0.6), (every, 0.6)):
        near = difflib.get_close_matches(key or table, known, 1, likeness)
        if near:
            return f"unknown {kind} {name}, the nearest known is {known[near[0]]}"
    return f"unknown {kind} {name}, known here: {', '.join(here)}"


def _given(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list", dict: "table"}
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({kinds.get(type(value), 'date or time')})"


def _composed(statement: Statement, findings: list[Finding]) -> Statement:
    """Put together what takes two keys to say, and find the hooks' file."""
    values = dict(statement.values)
    count, devices = values.pop("instances.count", None), values.pop("instances.devices", None)
    if count or devices:
        values["instances"] = tuple(InstanceGroup(count or 1, (device,)) for device in devices or ("cpu",))
    if "hooks.file" in values:
        name = values.pop("hooks.file")
        path = inside(statement.path.parent, name)
        if path is None or not path.is_file():
            where = "lies outside the model's folder" if path is None else "is not there"
            findings.append(statement.mistake("hooks.file", f"hooks.file: '{name}' {where}"))
        else:
            values["hooks.file"] = path
    elif any(name.startswith("hooks.") for name in values) and not findings:
        findings.append(statement.mistake("hooks", "[hooks] must name a file"))
    return Statement(statement.path, values, statement.places)


def key_lines(text: str) -> dict[str, int]:
    """Find the line of each table and key. Best effort: lines inside multi-line strings may be taken for keys."""
    lines: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _TABLE_LINE.match(line):
            table = heading[1].strip()
            lines.setdefault(table, number)
            lines.setdefault(table.partition(".")[0], number)
        elif word := _WORD_LINE.match(line):
            lines.setdefault(f"{table}.{word[1]}" if table else word[1], number)
    return lines
