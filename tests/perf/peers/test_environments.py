"""An environment is used again while what is wanted is unchanged; what pip says is told in a line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.perf.peers import environments, roster
from penstock.perf.peers.environments import InstallError

WANTED = ("mosec==1.0", "onnxruntime==2.0")


def test_an_environment_with_the_same_requirements_is_current(tmp_path: Path) -> None:
    progress: list[str] = []
    commands: list[list[str]] = []

    def run(command: list[str], say: object) -> None:
        commands.append(command)
        (tmp_path / "peer").mkdir(exist_ok=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environments, "_run", run)
        environments._install(tmp_path / "peer", WANTED, progress.append)

    assert environments.is_current(tmp_path / "peer", WANTED)
    assert not environments.is_current(tmp_path / "peer", ("mosec==1.1", "onnxruntime==2.0"))
    assert [command[1:3] for command in commands] == [["-m", "venv"], ["-m", "pip"]]
    assert commands[1][-2:] == list(WANTED)
    assert progress == ["installing mosec==1.0, onnxruntime==2.0"]


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_an_environment_with_an_unreadable_stamp_is_not_current(tmp_path: Path, text: str) -> None:
    (tmp_path / "installed.json").write_text(text)

    assert not environments.is_current(tmp_path, WANTED)


def test_penstock_needs_no_environment(tmp_path: Path) -> None:
    environment = environments.provide(roster.OURS, (), tmp_path / "none", lambda text: None)

    assert environment.python == Path(sys.executable)
    assert "numpy" in environment.versions
    assert not (tmp_path / "none").exists()


def test_a_failed_install_reports_the_last_error_of_pip() -> None:
    program = "print('ERROR: no such version'); raise SystemExit(1)"

    with pytest.raises(InstallError, match=r"^no such version$"):
        environments._run([sys.executable, "-c", program], lambda text: None)


def test_a_missing_python_is_reported() -> None:
    with pytest.raises(InstallError, match="nowhere"):
        environments._run(["/nowhere/python"], lambda text: None)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["ERROR: first", "ERROR: second", "hint"], "second"),
        (["error: subprocess-exited", ""], "error: subprocess-exited"),
        (["killed", ""], "killed"),
        ([], "it said nothing"),
    ],
)
def test_the_failure_reason_is_one_line(lines: list[str], reason: str) -> None:
    assert environments.failure_reason(lines) == reason


def test_only_the_steps_of_pip_are_reported() -> None:
    progress: list[str] = []
    environments._run([sys.executable, "-c", "print('Collecting mosec'); print('noise')"], progress.append)

    assert progress == ["Collecting mosec"]
