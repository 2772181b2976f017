"""Every capability and every case of Cortex has existing tests, and every capability has a row in the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.clients.test_feature_table import defined_in
from tests.cortex.case_table import CAPABILITIES, CASES, NOT_THERE

PAGE = Path(__file__).parents[2] / "docs" / "compatibility-cortex.md"
NAMED = [(row, test) for row, tests in CAPABILITIES.items() for test in tests] + list(CASES.items())


@pytest.mark.parametrize(("row", "test"), NAMED)
def test_the_test_that_a_row_names_exists(row: str, test: str) -> None:
    module, _, inner = test.partition("::")

    assert inner in defined_in(module), f"{row}: there is no {test}"


def test_every_capability_has_a_test_or_is_listed_as_not_supported() -> None:
    assert {*CAPABILITIES, *NOT_THERE} == {f"F{number}" for number in range(1, 46)}
    assert not NOT_THERE & set(CAPABILITIES)
    assert all(CAPABILITIES.values())


def test_every_capability_has_a_row_in_the_docs_with_its_status() -> None:
    rows = re.findall(r"^\| (F[0-9]+) \| ([^|]+) \| ([^|]+) \|[^|]*\|$", PAGE.read_text("utf-8"), re.MULTILINE)

    assert [row for row, _, _ in rows] == [f"F{number}" for number in range(1, 46)]
    assert {row for row, _, status in rows if status == "not supported"} == NOT_THERE
