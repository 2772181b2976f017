from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from penstock.perf.profiling import command
from penstock.perf.profiling.control import ControlError
from penstock.perf.profiling.measuring import EMPTY, UNSTABLE
from penstock.perf.profiling.options import Options
from penstock.perf.profiling.session import Listener
from penstock.perf.reports import document as documents
from penstock.perf.reports.document import Document
from tests.perf.profiling.scripted import document, level


def run_of(monkeypatch: pytest.MonkeyPatch, document: Document) -> None:
    def profile(options: Options, listener: Listener) -> Document:
        return document

    monkeypatch.setattr(command, "profile", profile)


def test_help_lists_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "--concurrency-range START:END:STEP" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--version"]) == 0
    assert "penstock perf " in capsys.readouterr().out


def test_wrong_usage_has_the_exit_status_of_perf_analyzer(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["-m", "iris", "-b", "0"]) == 99
    assert "Error: Failed to parse -b (batch size). The value must be > 0." in capsys.readouterr().err


def test_a_run_that_cannot_begin_reports_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(options: Options, listener: Listener) -> Document:
        raise ControlError("no such model")

    monkeypatch.setattr(command, "profile", profile)

    assert command.main(["-m", "iris"]) == 99
    assert capsys.readouterr().err == "error: no such model\n"


@pytest.mark.parametrize(("missing", "words"), [("hdrh.histogram", []), ("plotly", ["--html", "a.html"])])
def test_a_missing_extra_is_reported_before_the_run(
    missing: str, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)

    assert command.main(["-m", "iris", *words]) == 99
    assert capsys.readouterr().err.endswith("pip install 'penstock[perf]'\n")


@pytest.mark.parametrize(
    ("document", "status"),
    [
        (document(level(1, 10)), 0),
        (document(level(1, 10), level(2, 10, stable=False, ended=UNSTABLE)), 0),
        (document(level(1, 10, stable=False, ended=UNSTABLE)), 2),
        (document(level(1, 10, settled=0, ended=EMPTY)), 3),
        (document(level(1, 10), level(2, 10, settled=0, ended="the server was lost in window 2: reset")), 99),
        (document(level(1, 10, stable=False, ended="interrupted")), 130),
    ],
)
def test_the_exit_status_is_that_of_perf_analyzer_except_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, document: Document, status: int
) -> None:
    last = document.levels[-1].ended
    document.interrupted = last == "interrupted"
    document.failed = last if not document.levels[-1].settled else ""
    run_of(monkeypatch, document)

    assert command.main(["-m", "iris"]) == status


def test_every_requested_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_of(monkeypatch, document(level(1, 10)))
    names = {"-f": "a.csv", "--json": "a.json", "--profile-export-file": "a.prof"}
    words = [word for flag, name in names.items() for word in (flag, str(tmp_path / name))]

    assert command.main(["-m", "iris", *words]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(names.values())
    assert documents.read(tmp_path / "a.json").levels[0].client.requests == 300


def test_a_file_that_cannot_be_written_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(run: Document, options: Options, path: Path) -> None:
        raise OSError(28, "No space left on device")

    run_of(monkeypatch, document(level(1, 10)))
    monkeypatch.setattr("penstock.perf.profiling.csv.write", full)
    words = ["-f", str(tmp_path / "a.csv"), "--json", str(tmp_path / "a.json")]

    assert command.main(["-m", "iris", *words]) == 99
    assert documents.read(tmp_path / "a.json").levels
    assert "a.csv: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["-f", "--json", "--html", "--profile-export-file"])
def test_an_unwritable_file_is_reported_before_the_run(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "profile", None)

    assert command.main(["-m", "iris", flag, str(tmp_path / "nowhere" / "a")]) == 99
    assert "nowhere/a" in capsys.readouterr().err


def test_checking_whether_a_file_is_writable_keeps_its_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def profile(options: Options, listener: Listener) -> Document:
        raise ControlError("no such model")

    monkeypatch.setattr(command, "profile", profile)
    old, new = tmp_path / "old.json", tmp_path / "new.csv"
    old.write_text("of the last run", "ascii")

    assert command.main(["-m", "iris", "--json", str(old), "-f", str(new)]) == 99
    assert old.read_text("ascii") == "of the last run"
    assert not new.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_interrupt_requests_an_end_and_the_second_ends_at_once(number: signal.Signals) -> None:
    lines: list[str] = []
    before = signal.getsignal(number)
    with command.Interrupts(lines.append) as interrupts:
        assert not interrupts.is_interrupted()
        os.kill(os.getpid(), number)
        assert interrupts.is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)

    assert signal.getsignal(number) == before
    assert lines == ["Interrupted: waiting for requests under way, then writing what there is. Again: end at once."]
