"""The plan of parts, their processes, and what becomes of one that fails or does not end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.perf.gpu import parts
from penstock.perf.gpu.context import CheckContext, from_arguments
from penstock.perf.gpu.parts import PARTS, TOTAL_S, Part
from penstock.perf.gpu.rows import Row

_FOUND = Row("machine", "GPUs", 1)


def context(folder: Path, seconds: float = 20.0) -> CheckContext:
    return CheckContext("cpu", folder, quick=True, end_s=time.monotonic() + seconds)


def program(*lines: str) -> list[str]:
    return [sys.executable, "-S", "-c", "\n".join(lines)]


def test_all_parts_together_end_in_nine_minutes() -> None:
    assert sum(part.seconds for part in PARTS) <= TOTAL_S <= 9 * 60


def test_the_documentation_names_each_part_and_its_time() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gpu-check.md").read_text("utf-8")

    assert [f"| `{part.name}` | {part.seconds:.0f} |" in page for part in PARTS] == [True] * len(PARTS)
    assert f"never more than {TOTAL_S:.0f} s" in page


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_each_part_has_a_report_function(part: Part) -> None:
    assert callable(part.report())


@given(st.lists(st.floats(0.1, 100), max_size=8), st.floats(0, 1e6))
@settings(max_examples=30)
def test_a_part_may_use_time_left_over_by_earlier_parts_but_not_that_of_later_ones(
    lengths: list[float], start_s: float
) -> None:
    plan = [Part(f"p{number}", seconds) for number, seconds in enumerate(lengths)]
    ends = list(parts.deadlines(plan, start_s).values())

    assert ends == sorted(ends)
    assert ends == pytest.approx([start_s + sum(lengths[: number + 1]) for number in range(len(lengths))])


def test_parts_are_selected_by_name_and_keep_their_order() -> None:
    assert [part.name for part in parts.chosen(["served", "machine"])] == ["machine", "served"]
    assert parts.chosen([]) == PARTS
    with pytest.raises(ValueError, match="'machines'"):
        parts.chosen(["machines"])


def test_an_exception_in_a_part_becomes_a_row_after_those_it_yielded(tmp_path: Path) -> None:
    def report(context: CheckContext) -> Iterator[Row]:
        yield _FOUND
        raise RuntimeError("no driver")

    first, last = parts.reported(report, "machine", context(tmp_path))

    assert first == _FOUND
    assert (last.part, last.held, last.note) == ("machine", False, "RuntimeError: no driver")


def test_rows_of_a_process_are_read_and_its_other_output_is_ignored(tmp_path: Path) -> None:
    lines = program(f"print({_FOUND.line()!r})", "print('EP Error: something')", "print()", f"print({_FOUND.line()!r})")

    assert list(parts.in_process("machine", context(tmp_path), lines)) == [_FOUND, _FOUND]


def test_a_process_that_fails_becomes_a_row_with_the_end_of_its_log(tmp_path: Path) -> None:
    lines = program(
        f"print({_FOUND.line()!r}, flush=True)", "import os", "os.write(2, b'illegal address')", "os._exit(3)"
    )
    first, last = parts.in_process("machine", context(tmp_path), lines)

    assert first == _FOUND
    assert last.held is False
    assert "status 3" in last.note
    assert last.note.endswith("illegal address")


def test_a_process_that_hangs_is_ended_and_its_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = program("import time", f"print({_FOUND.line()!r}, flush=True)", "time.sleep(60)")
    remaining = iter((20.0, 20.0, 0.0))  # to begin, for the first line, and for the next
    monkeypatch.setattr(CheckContext, "remaining_s", lambda self: next(remaining))

    first, last = parts.in_process("machine", context(tmp_path), lines)

    assert first == _FOUND
    assert "had not ended" in last.note


def test_a_part_without_time_left_is_not_started(tmp_path: Path) -> None:
    (row,) = parts.in_process("machine", context(tmp_path, 0.0), ["/nonexistent"])

    assert (row.held, row.note) == (False, "no time was left for it")


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", ["machine"]), ("cpu", ["machine", "offline"])])
def test_a_gpu_that_does_not_work_ends_the_check(
    device: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_process(name: str, context: CheckContext) -> Iterator[Row]:
        yield Row(name, "CUDA runtime", "none", held=False)

    monkeypatch.setattr(parts, "in_process", in_process)
    rows_reported: list[Row] = []

    rows = parts.run_all(PARTS[:2], CheckContext(device, tmp_path, end_s=1.0), rows_reported.append, 0.0)

    assert [row.part for row in rows] == expected
    assert rows_reported == rows


def test_a_context_passes_to_another_process_with_the_earlier_rows(tmp_path: Path) -> None:
    sent = context(tmp_path)
    (tmp_path / parts.ROWS).write_text(f"{_FOUND.line()}\nnoise\n", "utf-8")
    (words,) = sent.words()
    passed = from_arguments(words, tmp_path / parts.ROWS)

    assert (passed.device, passed.folder, passed.quick, passed.end_s) == ("cpu", tmp_path, True, sent.end_s)
    assert passed.figure_of("GPUs") == 1
    assert passed.figure_of("anything else") is None
    assert json.loads(words)["device"] == "cpu"
