from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.backends.errors import InferError
from penstock.server.environments.recipe import read_recipe


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def digest(path: Path) -> str:
    return read_recipe(path, "m").digest


def test_pip_gets_the_requirements_file_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "six\n")

    assert [install.arguments for install in read_recipe(path, "m").installs] == [("-r", str(path))]


def test_changed_requirements_make_another_environment(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "six==1.16\n")
    before = digest(path)
    path.write_text("six==1.17\n")

    assert digest(path) != before


@pytest.mark.parametrize("line", [
    "-r more.txt", "-rmore.txt", "--requirement more.txt", "--requirement=more.txt", "-c more.txt",
    "--constraint=more.txt", "six -c\\\n".replace("six ", "") + " more.txt", "  -r more.txt  # with a comment",
])  # fmt: skip
def test_a_changed_included_file_makes_another_environment(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, "requirements.txt", f"{line}\n")
    more = write(tmp_path, "more.txt", "six==1.16\n")
    before = digest(path)
    more.write_text("six==1.17\n")

    assert digest(path) != before


def test_an_included_file_is_resolved_relative_to_the_including_file(tmp_path: Path) -> None:
    path = write(tmp_path, "requirements.txt", "-r deep/one.txt\n")
    write(tmp_path, "deep/one.txt", "-c two.txt\n")
    two = write(tmp_path, "deep/two.txt", "six<2\n")
    before = digest(path)
    two.write_text("six<3\n")

    assert digest(path) != before


@pytest.mark.parametrize("line", [
    "./mine", "mine/", "-e ./mine", "--editable=./mine", "mine[extra] @ file:./mine",
    "./mine[extra] ; os_name == 'posix'", "FULL", "mine @ file://FULL",
])  # fmt: skip
def test_changed_content_of_a_local_project_makes_another_environment(tmp_path: Path, line: str) -> None:
    project = tmp_path / "mine"
    code = write(project, "mine.py", "a = 1\n")
    path = write(tmp_path, "requirements.txt", line.replace("FULL", str(project)) + "\n")
    before = digest(path)
    code.write_text("a = 2\n")

    assert digest(path) != before


@pytest.mark.parametrize(
    "artifact", ["build/lib/mine.py", "mine.egg-info/PKG-INFO", "__pycache__/mine.pyc", ".git/HEAD"]
)
def test_build_artifacts_of_a_local_project_do_not_change_the_environment(tmp_path: Path, artifact: str) -> None:
    write(tmp_path, "mine/mine.py", "a = 1\n")
    path = write(tmp_path, "requirements.txt", "./mine\n")
    before = digest(path)
    write(tmp_path / "mine", artifact, "x")

    assert digest(path) == before


def test_different_local_wheels_make_different_environments(tmp_path: Path) -> None:
    one, two = (write(tmp_path, f"{name}/requirements.txt", "-f wheels\ntiny\n") for name in ("one", "two"))
    write(tmp_path, "one/wheels/tiny.whl", "1")
    write(tmp_path, "two/wheels/tiny.whl", "2")

    assert digest(one) != digest(two)


def test_equal_requirements_share_an_environment(tmp_path: Path) -> None:
    one, two = (write(tmp_path, f"{name}/requirements.txt", "six\n# a comment\n") for name in ("one", "two"))

    assert digest(one) == digest(two)


def test_environment_variables_in_requirements_are_expanded_as_by_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write(tmp_path, "wheels/tiny.whl", "1")
    monkeypatch.setenv("WHEELS", str(tmp_path / "wheels"))
    path = write(tmp_path, "requirements.txt", "--find-links ${WHEELS}\n")
    before = digest(path)
    wheel.write_text("2")

    assert digest(path) != before


def test_a_comment_or_url_is_not_read_as_an_included_file(tmp_path: Path) -> None:
    assert digest(write(tmp_path, "requirements.txt", "# -r nowhere.txt\nsix # -r nowhere.txt\n-r https://a/b.txt\n"))


@pytest.mark.parametrize(("write_them", "says"), [
    (lambda folder: write(folder, "requirements.txt", "six\n\n-r no.txt\n"), "line 3: -r no.txt: no such file"),
    (lambda folder: write(folder, "requirements.txt", "-r requirements.txt\n"), "includes itself"),
    (lambda folder: folder / "requirements.txt", "requirements.txt: No such file"),
    (lambda folder: folder / "environment.tar.gz", "environment.tar.gz: No such file"),
])  # fmt: skip
def test_a_mistake_in_requirements_is_reported_with_its_line(
    tmp_path: Path, write_them: Callable[[Path], Path], says: str
) -> None:
    with pytest.raises(InferError, match=says) as raised:
        read_recipe(write_them(tmp_path), "the hooks of model 'm'")

    assert raised.value.message.startswith("the hooks of model 'm': ")
