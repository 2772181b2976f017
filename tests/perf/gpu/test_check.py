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


def kept(folder: Path) -> list[str]:
    lines = (folder / parts.ROWS).read_text("utf-8").splitlines()
    return [row.part for row in map(parse_row, lines) if row is not None]


def check(*words: str) -> int:
    return gpu_check.main(["--device", "cpu", "--quick", *words])


@pytest.mark.usefixtures("parts_found")
def test_rows_the_table_and_the_figures_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = check("--folder", str(tmp_path))
    document = json.loads((tmp_path / "gpu_check.json").read_text("utf-8"))
    table = (tmp_path / "gpu_check.md").read_text("utf-8")

    assert status == 1
    assert kept(tmp_path) == [part.name for part in parts.PARTS]
    assert [row["part"] for row in document["rows"]] == kept(tmp_path)
    assert table in capsys.readouterr().out


@pytest.mark.usefixtures("parts_found")
def test_what_a_stand_in_gives_is_named_so(tmp_path: Path) -> None:
    check("--folder", str(tmp_path), "--only", "machine")

    assert (tmp_path / "gpu_check.md").read_text("utf-8").startswith("## NOT A GPU'S FIGURES")


@pytest.mark.usefixtures("parts_found")
def test_a_part_that_runs_again_keeps_what_the_others_found(tmp_path: Path) -> None:
    check("--folder", str(tmp_path), "--only", "machine", "engine")
    check("--folder", str(tmp_path), "--only", "engine")

    assert kept(tmp_path) == ["machine", "engine"]


@pytest.mark.usefixtures("parts_found")
def test_what_is_found_is_where_the_lender_of_the_machine_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setenv("OUT", str(out))
    (tmp_path / "machine.log").write_text("a warning", "utf-8")

    assert check("--only", "machine", "--folder", str(tmp_path)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["gpu_check.json", "gpu_check.md", "logs.txt", parts.ROWS]
    assert (out / "logs.txt").read_text("utf-8") == "== machine.log\na warning"


def test_a_part_that_is_not_there_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("--only", "gpu") == 2
    assert "machine, offline" in capsys.readouterr().err


def test_answers_through_the_engine_are_the_cpu_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct, "CHECKED", (("mlp", "fp32"), ("mlp", "fp16"), ("mlp", "bf16")))
    rows = list(correct.report(CheckContext("cpu", tmp_path, quick=True)))

    assert [row.held for row in rows] == [True, True, True, True, None]


def test_the_engine_s_rate_is_put_beside_offline_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_SECONDS", 0.02)
    context = CheckContext("cpu", tmp_path, quick=True)
    variant = context.variant("cnn", "fp16")
    monkeypatch.setattr(CheckContext, "measured", lambda self: (("cnn", "fp16"),))
    found = Row("offline", best_rate(variant), 10.0)
    rate, ratio, plain = engine.report(CheckContext("cpu", tmp_path, quick=True, earlier=(found,)))

    assert isinstance(rate.value, float)
    assert ratio.value == pytest.approx(rate.value / 10)
    assert ratio.held is None  # of a stand-in no speed is wanted
    assert "times that" in plain.note
