"""The command: what it writes as it goes and at the end, and the cheapest parts run here on the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.perf import gpu_check
from penstock.perf.gpu import correct, engine, parts
from penstock.perf.gpu.context import CheckContext, best_rate
from penstock.perf.gpu.rows import Row, parse_row


@pytest.fixture
def parts_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that find a row each, in this process."""

    def run(name: str, context: CheckContext) -> Iterator[Row]:
        yield Row(name, "found", 1.0, held=name != "offline")

    monkeypatch.setattr(parts, "in_process", run)
    monkeypatch.delenv("OUT", raising=False)


def part_names(folder: Path) -> list[str]:
    lines = (folder / parts.ROWS).read_text("utf-8").splitlines()
    return [row.part for row in map(parse_row, lines) if row is not None]


def check(*words: str) -> int:
    return gpu_check.main(["--device", "cpu", "--quick", *words])


@pytest.mark.usefixtures("parts_found")
def test_rows_table_and_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = check("--folder", str(tmp_path))
    document = json.loads((tmp_path / "gpu_check.json").read_text("utf-8"))
    table = (tmp_path / "gpu_check.md").read_text("utf-8")

    assert status == 1
    assert part_names(tmp_path) == [part.name for part in parts.PARTS]
    assert [row["part"] for row in document["rows"]] == part_names(tmp_path)
    assert table in capsys.readouterr().out


@pytest.mark.usefixtures("parts_found")
def test_results_of_a_stand_in_are_labeled(tmp_path: Path) -> None:
    check("--folder", str(tmp_path), "--only", "machine")

    assert (tmp_path / "gpu_check.md").read_text("utf-8").startswith("## NOT A GPU'S FIGURES")


@pytest.mark.usefixtures("parts_found")
def test_rerunning_a_part_keeps_the_rows_of_the_others(tmp_path: Path) -> None:
    check("--folder", str(tmp_path), "--only", "machine", "engine")
    check("--folder", str(tmp_path), "--only", "engine")

    assert part_names(tmp_path) == ["machine", "engine"]


@pytest.mark.usefixtures("parts_found")
def test_results_are_written_to_the_folder_that_is_copied_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    (tmp_path / "machine.log").write_text("a warning", "utf-8")

    assert check("--only", "machine", "--folder", str(tmp_path)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.json", "gpu_check.md", "logs.txt", parts.ROWS]
    assert (out / "logs.txt").read_text("utf-8") == "== machine.log\na warning"


def test_an_unknown_part_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--only", "gpu") == 2
    assert "machine, offline" in capsys.readouterr().err


def test_answers_through_the_engine_equal_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct, "CHECKED", (("mlp", "fp32"), ("mlp", "fp16"), ("mlp", "bf16")))
    rows = list(correct.report(CheckContext("cpu", tmp_path, quick=True)))

    assert [row.held for row in rows] == [True, True, True, True, None]


def test_the_engine_rate_is_compared_with_the_offline_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_SECONDS", 0.02)
    context = CheckContext("cpu", tmp_path, quick=True)
    variant = context.variant("cnn", "fp16")
    monkeypatch.setattr(CheckContext, "measured", lambda self: (("cnn", "fp16"),))
    offline_row = Row("offline", best_rate(variant), 10.0)
    rate, ratio, row = engine.report(CheckContext("cpu", tmp_path, quick=True, earlier=(offline_row,)))

    assert isinstance(rate.value, float)
    assert ratio.value == pytest.approx(rate.value / 10)
    assert ratio.held is None  # of a stand-in no speed is wanted
    assert "times that" in row.note
