"""AbejaFolder: which folder is served, what is installed for it, and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.abeja.folder import AbejaFolder, requirements_of, working_folder
from penstock.server.settings import Settings


def folder(path: Path | None, settings: Settings | None = None, **environ: str) -> AbejaFolder:
    settings = settings or Settings(model_repository=(str(path),) if path else ())
    return AbejaFolder(settings, environ)


@pytest.mark.parametrize(
    ("marked", "found"),
    [
        ([], "."), (["."], "."), (["a"], "a"), (["a/b", "a"], "a"), (["a/b/c"], "a/b/c"), (["a/b/c/d"], "."),
        (["b", "a/a"], "b"), ([".hidden"], ".hidden"), (["b", "a"], "a"), ([".", "a"], "."),
    ],
)  # fmt: skip
def test_the_working_folder_is_the_nearest_marked_folder(tmp_path: Path, marked: list[str], found: str) -> None:
    for place in marked:
        (tmp_path / place / ".abeja").mkdir(parents=True)

    assert working_folder(tmp_path) == tmp_path / found
    assert folder(tmp_path).spec().path == tmp_path / found


def test_a_marker_file_is_ignored_and_a_symlink_cycle_does_not_hang(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".abeja").touch()
    (tmp_path / "a" / "back").symlink_to(tmp_path)

    assert working_folder(tmp_path) == tmp_path


def test_a_pipfile_takes_precedence_over_requirements_txt(tmp_path: Path) -> None:
    assert requirements_of(tmp_path) is None
    (tmp_path / "Pipfile.lock").touch()
    assert requirements_of(tmp_path) is None
    (tmp_path / "requirements.txt").touch()
    assert requirements_of(tmp_path) == tmp_path / "requirements.txt"
    (tmp_path / "Pipfile").touch()
    assert requirements_of(tmp_path) == tmp_path / "Pipfile"


def test_requirements_of_the_marked_folder_are_installed_unless_disabled(tmp_path: Path) -> None:
    (tmp_path / "a" / ".abeja").mkdir(parents=True)
    (tmp_path / "a" / "requirements.txt").touch()
    (tmp_path / "Pipfile").touch()
    path = (str(tmp_path),)

    installs, without = (folder(None, Settings(model_repository=path, abeja_install=on)) for on in (True, False))
    assert installs.spec().worker.requirements == tmp_path / "a" / "requirements.txt"
    assert without.spec().worker.requirements is None


def test_the_handler_comes_from_the_settings_or_the_environment(tmp_path: Path) -> None:
    assert folder(tmp_path).handler == "main:handler"
    assert folder(tmp_path, HANDLER="a:b").spec().worker.environment["HANDLER"] == "a:b"
    assert folder(tmp_path, HANDLER="").handler == ""
    assert folder(tmp_path, Settings(abeja_handler="c:d"), HANDLER="a:b").handler == "c:d"


@pytest.mark.parametrize(
    ("training_result_dir", "found"),
    [("", "abejainc_training_result"), (".", "."), ("a/../b", "b"), ("/results/x/", "/results/x/")],
)
def test_the_training_result_dir_is_relative_to_the_starting_folder(
    tmp_path: Path, training_result_dir: str, found: str
) -> None:
    (tmp_path / "a" / ".abeja").mkdir(parents=True)
    place = (
        folder(tmp_path, ABEJA_TRAINING_RESULT_DIR=training_result_dir)
        .spec()
        .worker.environment["ABEJA_TRAINING_RESULT_DIR"]
    )

    assert place == (found if found.startswith("/") else str(tmp_path / found))


def test_the_root_is_the_argument_or_the_environment_variable_or_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder(None).path == tmp_path
    assert folder(None, ABEJA_USER_MODEL_ROOT="a").path == tmp_path / "a"
    assert folder(Path("b"), ABEJA_USER_MODEL_ROOT="a").path == tmp_path / "b"


def test_a_missing_or_remote_folder_is_reported(tmp_path: Path) -> None:
    assert "no such folder" in str(folder(tmp_path / "missing").invalid_path())
    assert "must be in a local folder" in str(folder(None, Settings(model_repository=("s3://a/b",))).invalid_path())
    assert folder(tmp_path).invalid_path() is None
