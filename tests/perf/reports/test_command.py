"""`penstock perf report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.perf import command as perf
from penstock.perf.reports import document as documents
from penstock.perf.reports import extras, markup
from penstock.perf.reports.command import main
from tests.perf.reports.sample_documents import run


@pytest.fixture
def written(tmp_path: Path) -> Path:
    documents.write(run(), tmp_path / "a.json")
    documents.write(run(5, 1.3), tmp_path / "b.json")
    return tmp_path


def test_one_document_gets_its_page_next_to_it(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(written / "a.json")]) == 0

    assert (written / "a.html").read_text("utf-8").startswith("<!doctype html>")
    assert f"Page: {written / 'a.html'}" in capsys.readouterr().out


def test_the_page_is_written_where_requested_with_the_requested_target(written: Path) -> None:
    assert perf.main(["report", str(written / "a.json"), "--html", str(written / "p.html"), "--target-ms", "7.5"]) == 0

    assert "Goodput in 7.5 ms" in (written / "p.html").read_text("utf-8")
    assert not (written / "a.html").exists()


def test_several_documents_are_compared_and_get_a_page_only_on_request(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [str(written / "a.json"), str(written / "b.json")]

    assert main(both) == 0
    assert "Ratios to a:" in capsys.readouterr().out
    assert list(written.glob("*.html")) == []
    assert main([*both, "--html", str(written / "c.html")]) == 0
    assert "2 runs side by side" in (written / "c.html").read_text("utf-8")


@pytest.mark.parametrize("words", [["none.json"], ["bad.json"], ["hist.json"], ["a.json", "--html", "no/where.html"]])
def test_unreadable_or_unwritable_files_are_reported_in_one_line(
    words: list[str], written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(written)
    (written / "bad.json").write_text("{}", "utf-8")
    broken = run()
    broken.levels[0].client.histogram = "HISTF"
    documents.write(broken, written / "hist.json")

    assert main(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("penstock perf report: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["a.json", "--target-ms", "0"], ["a.json", "--target-ms", "nan"], ["--colour"]])
def test_invalid_arguments_are_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)

    assert exit_info.value.code == 2
    assert "usage: penstock perf report" in capsys.readouterr().err


def test_without_plotly_the_message_says_what_to_install(
    written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(module: str) -> None:
        raise extras.MissingExtraError(f"penstock perf needs {module}: {extras.INSTALL}")

    monkeypatch.setattr(markup, "needed", missing)

    assert main([str(written / "a.json")]) == 1
    assert "pip install 'penstock[perf]'" in capsys.readouterr().err
