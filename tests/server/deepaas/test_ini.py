"""Configuration files are read as oslo.config reads them; the expected results were recorded from it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server.deepaas.ini import default_files, default_folders, files_in, read_ini, substitute
from penstock.server.settings import SettingError


def read(folder: Path, text: str) -> dict[str, str]:
    path = folder / "deepaas.conf"
    path.write_text(text)
    return read_ini(path)


def test_names_are_followed_by_an_equals_sign_or_a_colon(tmp_path: Path) -> None:
    assert read(tmp_path, "# of the API\n[DEFAULT]\nworkers = 3\nwarm: off\n; that is all\n") == {
        "workers": "3",
        "warm": "off",
    }


def test_only_the_default_section_is_read(tmp_path: Path) -> None:
    text = "[default]\nworkers = 7\n[DEFAULT]\nworkers = 2\n[other]\nworkers = 5\n[DEFAULT]\ndebug = 1\n"

    assert read(tmp_path, text) == {"workers": "2", "debug": "1"}


def test_the_last_of_several_values_wins(tmp_path: Path) -> None:
    assert read(tmp_path, "[DEFAULT]\nworkers = 2\nworkers = 5\n") == {"workers": "5"}


def test_matching_quotes_around_a_value_are_removed(tmp_path: Path) -> None:
    options = read(tmp_path, '[DEFAULT]\na = "quoted name"\nb = \'x\'\nc = "half\nd = \'a"\n')

    assert options == {"a": "quoted name", "b": "x", "c": '"half', "d": "'a\""}


def test_a_value_continues_on_lines_that_begin_with_a_space(tmp_path: Path) -> None:
    assert read(tmp_path, "[DEFAULT]\nbase_path = /a # b\n   /c\nworkers =\n") == {
        "base_path": "/a # b\n/c",
        "workers": "",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("listen_port = 1\n", ":1, Section must be started before assignment: 'listen_port = 1'"),
        ("[DEFAULT]\nnonsense\n", ":2, No ':' or '=' found in assignment: 'nonsense'"),
        ("[DEFAULT]\n listen_port = 5\n", ":2, Unexpected continuation line: ' listen_port = 5'"),
        ("[DEFAULT]\na = 1\n\n 2\n", ":4, Unexpected continuation line: ' 2'"),
        ("[DEFAULT]\na = 1\n# b\n 2\n", ":4, Unexpected continuation line: ' 2'"),
        ("[DEFAULT]\n= 5\n", ":2, Key cannot be empty: '= 5'"),
        ("[DEFAULT\n", ":1, Invalid section (must end with ]): '[DEFAULT'"),
        ("[]\n", ":1, Empty section name: '[]'"),
    ],
    ids=[
        "no section",
        "no sign",
        "continued",
        "after a blank line",
        "after a comment",
        "no name",
        "open section",
        "empty section",
    ],
)
def test_the_error_for_an_invalid_line_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError) as error:
        read(tmp_path, text)

    assert str(error.value).endswith(f"deepaas.conf{message}")


def test_the_error_for_an_unreadable_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "bytes.conf").write_bytes(b"\xff")

    with pytest.raises(SettingError, match="No such file"):
        read_ini(tmp_path / "none.conf")
    with pytest.raises(SettingError, match="is not UTF-8"):
        read_ini(tmp_path / "bytes.conf")


def test_the_first_existing_default_file_of_each_kind_is_read(tmp_path: Path) -> None:
    own = tmp_path / ".deepaas"
    own.mkdir()
    for path in (own / "deepaas.conf", tmp_path / "deepaas.conf", tmp_path / "deepaas-run.conf"):
        path.touch()
    (tmp_path / "deepaas.conf.d").mkdir()

    assert default_files({"HOME": str(tmp_path)}, "deepaas-run") == [
        own / "deepaas.conf",
        tmp_path / "deepaas-run.conf",
    ]
    assert default_folders({"HOME": str(tmp_path)}, "deepaas-run") == [tmp_path / "deepaas.conf.d"]


def test_a_user_without_a_home_folder_has_no_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)

    assert default_folders({}, "deepaas-run-of-nobody") == []


def test_the_conf_files_of_a_folder_are_read_in_order_of_their_names(tmp_path: Path) -> None:
    for name in ("2.conf", "1.conf", "3.ini"):
        (tmp_path / name).touch()

    assert [path.name for path in files_in(tmp_path)] == ["1.conf", "2.conf"]
    with pytest.raises(SettingError, match="Failed to read config file directory"):
        files_in(tmp_path / "none")


@pytest.mark.parametrize(
    ("text", "stands_for"),
    [
        ("/x$listen_port", "/x5000"),
        ("${workers}a", "1a"),
        (r"\$a$$b", "$a$b"),
        ("$ 5", "$ 5"),
        ("a$", "a$"),
    ],
    ids=["name", "braces", "escaped", "a blank after", "at the end"],
)
def test_a_dollar_sign_and_a_name_are_replaced_by_a_value(text: str, stands_for: str) -> None:
    assert substitute(text, {"listen_port": "5000", "workers": "1"}.__getitem__) == stands_for


WORDS = st.text("[]DEFAULT=:#;'\" \t\n\r\x0b\u2028$\\{}abé", max_size=60)


@given(WORDS)
def test_any_file_is_either_read_or_rejected(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.conf"
    path.write_text(f"[DEFAULT]\n{text}", "utf-8")
    options: dict[str, str] = {}
    with contextlib.suppress(SettingError):
        options = read_ini(path)
    assert all(name and name == name.strip() for name in options)


@given(WORDS)
def test_substitution_uses_only_names_in_the_text(text: str) -> None:
    found: list[str] = []

    def value_of(name: str) -> str:
        found.append(name)
        return ""

    substituted = substitute(text, value_of)
    assert len(substituted) <= len(text)
    assert all(name in text for name in found)
    if "$" not in text:
        assert (substituted, found) == (text, [])
