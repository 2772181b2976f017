"""`deepaas-predict` calls the methods of version 1, if a model has them, and stores the result."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from penstock.server.cli import main

MODEL = """
import io

warmed = []
GIVEN = {
    "application/zip": io.BytesIO(b"PK"),
    "image/png": b"PNG",
    "text/plain": "caf\\u00e9",
    "application/pdf": None,
}

def warm():
    warmed.append(1)

def predict_data(args):
    if args["accept"] in GIVEN:
        return GIVEN[args["accept"]]
    with open(args["files"][0].filename) as file:
        return {"read": file.read(), "warmed": warmed}

def predict_url(args):
    return args
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("old", "new", "deepaas", "deepaas.model", "deepaas.model.v2", "deepaas.model.v2.wrapper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "old.py").write_text(MODEL)
    (tmp_path / "new.py").write_text("def predict(**arguments): return 5\n")
    (tmp_path / "a.png").write_text("a picture")
    return tmp_path


def test_the_result_for_a_file_is_stored_as_python_prints_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepaas-predict", "m=old", "-i", "a.png", "-o", "out"]) == 0

    assert (folder / "out" / "out_a.json").read_text() == "{'read': 'a picture', 'warmed': [1]}\n"
    assert capsys.readouterr().out == "Output saved at out/out_a.json\n"


def test_a_url_is_passed_to_predict_url_and_nowarm_is_respected(folder: Path) -> None:
    words = ["-i", "http://example.com/b.png", "-u", "-o", "out/", "--nowarm"]

    assert main(["deepaas-predict", "m=old", *words]) == 0

    expected = "{'urls': ['http://example.com/b.png'], 'accept': 'application/json'}\n"
    assert (folder / "out" / "out_b.json").read_text() == expected


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [
        ("application/zip", "out_a.zip", b"PK"),
        ("image/png", "out_a.png", b"PNG"),
        ("text/plain", "out_a.txt", "café".encode()),
    ],
)
def test_a_result_that_is_not_a_file_is_stored_under_the_name_of_the_input(
    kind: str, name: str, content: bytes, folder: Path
) -> None:
    assert main(["deepaas-predict", "m=old", "-i", "a.png", "-ct", kind, "-o", "out"]) == 0

    assert (folder / "out" / name).read_bytes() == content


def test_an_empty_result_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepaas-predict", "m=old", "-i", "a.png", "-ct", "application/pdf", "-o", "out"]) == 1

    assert capsys.readouterr().err == "ERROR: Content type application/pdf not valid.\n"
    assert not (folder / "out").exists()


def test_a_model_without_version_1_methods_gets_a_hint_to_the_newer_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepaas-predict", "m=new", "-i", "a.png", "-o", "out"]) == 1

    assert "penstock deepaas-cli predict" in capsys.readouterr().err
