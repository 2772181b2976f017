"""Every row of Triton's scheduling, models and lifecycle names tests, and these tests exist."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.clients.feature_table import LIFECYCLE, SCHEDULING

TESTS = Path(__file__).parents[1]
NAMED = [
    (row, name, test)
    for table in (SCHEDULING, LIFECYCLE)
    for row, names in table.items()
    for name, tests in names.items()
    for test in tests
]


@functools.cache
def defined_in(module: str) -> frozenset[str]:
    """Return the tests of a module, by function and by class; "" stands for the module itself."""
    path = TESTS / (f"{module}.py" if "/" in module else f"clients/{module}.py")
    if not path.is_file():
        return frozenset()
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.ClassDef):
            inner = [f"{node.name}::{each.name}" for each in node.body if _is_test(each) and hasattr(each, "name")]
            found |= {*inner, node.name} if inner else set()
        elif _is_test(node):
            found.add(getattr(node, "name", ""))
    return frozenset({*found, ""} if found else ())


def _is_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


@pytest.mark.parametrize(("row", "name", "test"), NAMED)
def test_every_test_named_in_the_table_exists(row: str, name: str, test: str) -> None:
    module, _, inner = test.partition("::")

    assert inner in defined_in(module), f"{row}, {name}: there is no {test}"


def test_every_feature_in_the_table_has_a_test() -> None:
    assert [name for table in (SCHEDULING, LIFECYCLE) for names in table.values() for name, tests in names.items()
            if not tests] == []  # fmt: skip


def test_a_missing_test_would_be_detected() -> None:
    assert "TestCancellation::test_requests_canceled_over_grpc_never_run" in defined_in("test_lifecycle")
    assert "test_requests_canceled_over_grpc_never_run" not in defined_in("test_lifecycle")
    assert defined_in("test_nothing_of_the_kind") == frozenset()
