"""The fault table in docs/reliability.md: each row names existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (?P<fault>[^|]+) \|(?P<told>.+)\| (?P<tests>`[^|]+`) \|$", re.MULTILINE)
TEST = re.compile(r"`([\w/]+\.py)((?:::\w+)+)`")
PAGE = (ROOT / "docs" / "reliability.md").read_text("utf-8")
ROWS = {found["fault"].strip(): found["tests"] for found in ROW.finditer(PAGE)}

FAULTS = (
    "`kill -9` of a worker", "`kill -9` of a front end", "`kill -9` of the engine", "`kill -9` of the supervisor",
    "SIGSTOP of a worker", "SIGSTOP of a front end", "SIGSTOP of the engine", "SIGSTOP of the supervisor",
    "user code that loops for ever", "user code that holds the GIL", "user code that exits", "user code that segfaults",
    "user code that floods stdout", "user code that returns a wrong thing", "user code that leaks",
    "the arena is exhausted", "the client goes while its request is in a worker", "stale files at start",
    "a port is taken",
)  # fmt: skip
"""The faults that the table must have, at least."""


def there_is(path: str, names: list[str]) -> bool:
    if not (ROOT / path).is_file():
        return False
    body = ast.parse((ROOT / path).read_text("utf-8")).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name
        ]
        if not found:
            return False
        body = found[0].body
    return True


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_has_a_row_in_the_table(fault: str) -> None:
    assert fault in ROWS


@pytest.mark.parametrize("fault", ROWS)
def test_every_row_names_only_existing_tests(fault: str) -> None:
    named = TEST.findall(ROWS[fault])

    assert named
    assert [path + names for path, names in named if not there_is(path, names.split("::")[1:])] == []
