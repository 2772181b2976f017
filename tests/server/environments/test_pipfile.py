from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from penstock.backends.errors import InferError
from penstock.server.environments.pipfile import _hash, _parse_toml
from penstock.server.environments.recipe import Recipe, read_recipe


def read(folder: Path, text: str) -> Recipe:
    (folder / "Pipfile").write_text(text)
    return read_recipe(folder / "Pipfile", "m")


def lines(recipe: Recipe) -> list[str]:
    return [line for install in recipe.installs for line in install.text.splitlines()]


@pytest.mark.parametrize(("entry", "line"), [
    ('"*"', "six"),
    ('">=1.2,<2"', "six>=1.2,<2"),
    ('{version = "==1.16", extras = ["a", "b"]}', "six[a,b]==1.16"),
    ('{version = "*", markers = "os_name == \'posix\' or a"}', "six ; (os_name == 'posix' or a)"),
    ('{version = "*", sys_platform = "== \'linux\'", python_version = "> \'3\'"}',
     "six ; sys_platform == 'linux' and python_version > '3'"),
    ('{git = "https://x/six.git", ref = "v1"}', "six @ git+https://x/six.git@v1"),
    ('{git = "git+ssh://x/six.git", subdirectory = "sub"}', "six @ git+ssh://x/six.git#subdirectory=sub"),
    ('{git = "https://x/six.git", extras = ["a"]}', "six[a] @ git+https://x/six.git"),
    ('{file = "https://x/six.whl"}', "https://x/six.whl"),
    ('{file = "https://x/six.whl", extras = ["a"]}', "six[a] @ https://x/six.whl"),
    ('{path = "./mine", extras = ["a"]}', "FOLDER/mine[a]"),
    ('{path = "mine", editable = true}', "file://FOLDER/mine"),
    ('{path = "mine", subdirectory = "sub", extras = ["a"]}', "six[a] @ file://FOLDER/mine#subdirectory=sub"),
    ('{path = "mine", os_name = "== \'posix\'"}', "file://FOLDER/mine ; os_name == 'posix'"),
])  # fmt: skip
def test_a_pipfile_entry_becomes_a_line_for_pip(tmp_path: Path, entry: str, line: str) -> None:
    (tmp_path / "mine").mkdir()

    recipe = read(tmp_path, f"[packages]\nsix = {entry}\n")

    assert lines(recipe) == [line.replace("FOLDER", str(tmp_path))]
    assert recipe.installs[0].arguments == ()


def test_dev_packages_are_left_out(tmp_path: Path) -> None:
    assert lines(read(tmp_path, '[packages]\nsix = "*"\n[dev-packages]\npytest = "*"\n')) == ["six"]


def test_only_sources_other_than_pypi_are_passed_to_pip(tmp_path: Path) -> None:
    public = '[[source]]\nurl = "https://pypi.org/simple"\nverify_ssl = true\nname = "pypi"\n'
    own = '[[source]]\nurl = "https://me:pw@own.example/simple"\nverify_ssl = false\nname = "own"\n'
    packages = '[packages]\nsix = "*"\n'
    trusted = ("https://me:pw@own.example/simple", "--trusted-host", "own.example")

    assert read(tmp_path, public + packages).installs[0].arguments == ()
    assert read(tmp_path, public + own + packages).installs[0].arguments == ("--extra-index-url", *trusted)
    assert read(tmp_path, own + public + packages).installs[0].arguments == ("--index-url", *trusted)


def test_the_python_version_that_a_pipfile_requires_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, '[requires]\npython_version = "3.11"\n').python == "3.11"
    assert read(tmp_path, '[requires]\npython_full_version = "3.11.7"\npython_version = "3.11"\n').python == "3.11.7"
    assert not read(tmp_path, "").python


def test_a_lock_file_is_installed_with_its_hashes_and_without_dependencies(tmp_path: Path) -> None:
    pipfile = '[packages]\nsix = "*"\n'
    (tmp_path / "Pipfile").write_text(pipfile)
    lock = {
        "_meta": {"hash": {"sha256": _hash(_parse_toml(tmp_path / "Pipfile"))}, "requires": {"python_version": "3.11"}},
        "default": {
            "six": {"version": "==1.16.0", "hashes": ["sha256:aa", "sha256:bb"], "index": "pypi"},
            "tool": {"git": "https://x/tool.git", "ref": "abc"},
        },
        "develop": {"pytest": {"version": "==9"}},
    }
    (tmp_path / "Pipfile.lock").write_text(json.dumps(lock))

    recipe = read_recipe(tmp_path / "Pipfile", "m")

    assert [install.text for install in recipe.installs] == [
        "six==1.16.0 --hash=sha256:aa --hash=sha256:bb\n",
        "tool @ git+https://x/tool.git@abc\n",
    ]
    assert {install.arguments for install in recipe.installs} == {("--no-deps",)}
    assert (recipe.python, recipe.source.name) == ("3.11", "Pipfile.lock")


def test_an_outdated_lock_file_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "Pipfile.lock").write_text('{"_meta": {"hash": {"sha256": "old"}}, "default": {}}')
    with caplog.at_level(logging.WARNING, "penstock"):
        recipe = read(tmp_path, '[packages]\nsix = "*"\n')

    assert recipe.installs == ()
    assert "run `pipenv lock` to update it" in caplog.text


@pytest.mark.parametrize(("text", "says"), [
    ('[packages]\nsix = {versoin = "*"}\n', "six: no such key 'versoin'"),
    ('[packages]\nsix = "1.2"\n', r"six: version '1.2': expected '\*' or a comparison"),
    ('[packages]\nsix = {path = "./nowhere"}\n', "six: path './nowhere': no such file"),
    ("[packages\n", "Pipfile: Expected"),
    ('[[source]]\nname = "x"\n[packages]\nsix = "*"\n', "a source without a url"),
])  # fmt: skip
def test_a_mistake_in_a_pipfile_is_reported_with_its_entry(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InferError, match=says):
        read(tmp_path, text)


def test_changed_content_of_a_path_entry_makes_another_environment(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    text = '[packages]\nmine = {path = "./mine"}\n'
    before = read(tmp_path, text).digest
    (tmp_path / "mine" / "mine.py").write_text("a = 1\n")

    assert read(tmp_path, text).digest != before
