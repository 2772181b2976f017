"""Rows and their table."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.gpu import rows
from penstock.perf.gpu.rows import Row

_TEXT = st.text(max_size=20)
ROWS = st.builds(
    Row,
    part=_TEXT,
    what=_TEXT,
    value=st.one_of(_TEXT, st.integers(-(10**9), 10**9), st.floats(allow_nan=False)),
    unit=_TEXT,
    wanted=_TEXT,
    held=st.sampled_from([None, True, False]),
    note=_TEXT,
)


@given(ROWS)
@settings(max_examples=30)
def test_a_row_survives_being_written_as_a_line(row: Row) -> None:
    line = row.line()

    assert "\n" not in line
    assert rows.parse_row(line) == row


@given(st.text(max_size=40))
@settings(max_examples=30)
def test_output_of_a_library_is_not_parsed_as_a_row(line: str) -> None:
    assert rows.parse_row(line) is None


@pytest.mark.parametrize(
    "line",
    [
        '{"part": "x"}',
        '{"part": 1, "what": "x", "value": 1}',
        '{"part": "x", "what": "x", "value": []}',
        '{"part": "x", "what": "x", "value": 1, "held": []}',
        '{"part": "x", "what": "x", "value": 1, "more": 1}',
        "[1]",
    ],
)
def test_a_line_that_is_almost_a_row_is_not_parsed(line: str) -> None:
    assert rows.parse_row(line) is None


def test_a_figure_is_compared_with_its_target() -> None:
    assert rows.at_least("p", "w", 0.95, 0.95).held is True
    assert rows.at_least("p", "w", 0.94, 0.95).held is False
    assert rows.at_most("p", "w", 4.0, 4.0).held is True
    assert rows.at_most("p", "w", 4.1, 4.0).held is False
    assert rows.at_most("p", "w", math.nan, 4.0).held is False


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (0.123456, "0.1235"), (3, "3"), ("there", "there"), (-1234.0, "-1,234")]
)
def test_figures_are_formatted_for_readers(value: float | str, text: str) -> None:
    assert rows.figure(value) == text


def test_the_table_has_a_line_per_row_and_marks_failures() -> None:
    row_list = [
        Row("engine", "rate", 12345.6, "rows/s", note="a | b\nc"),
        rows.at_least("engine", "ratio", 0.5, 0.95),
        rows.at_least("served", "ratio", 0.96, 0.95),
    ]
    text = rows.table("2026-11-23", row_list, {"GPU": "one"})

    assert text.startswith("## 2026-11-23\n\n- GPU: one\n\n| part |")
    assert "| engine | rate | 12,346 rows/s |  | a \\| b c |" in text
    assert "| engine | ratio | 0.5 | >= 0.95 | **DOES NOT HOLD** |" in text
    assert "| served | ratio | 0.96 | >= 0.95 | holds |" in text
    assert "1 of 2 rows hold. Not: engine: ratio." in text


def test_a_failure_states_its_reason_in_one_line() -> None:
    row = rows.failed("faults", "memory", ValueError("first\nsecond"))

    assert (row.held, row.note) == (False, "ValueError: first second")
