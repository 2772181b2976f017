"""What they are told who gave a component, or a graph, to the wrong dialect, or a component that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server import cli
from penstock.server.repository.mirrors import Mirrors

CLASS = "class Ident:\n    def predict(self, X, names):\n        return X\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A component as s2i built it."""
    (tmp_path / "Ident.py").write_text(CLASS)
    (tmp_path / ".s2i").mkdir()
    (tmp_path / ".s2i" / "environment").write_text("MODEL_NAME=Ident\n")
    return tmp_path


def wrong(path: Path) -> str:
    found = Mirrors.of([str(path)]).wrong()
    return "" if found is None else found.message


def test_a_component_without_its_dialect_is_recognised(folder: Path) -> None:
    assert wrong(folder) == "is a Seldon component: serve it with --dialect seldon"


def test_a_model_repository_may_have_a_file_of_s2i(folder: Path) -> None:
    (folder / "model" / "1").mkdir(parents=True)
    (folder / "model" / "1" / "model.onnx").write_bytes(b"")

    assert not wrong(folder)


@pytest.mark.parametrize("name", ["Ident.py", "deployment.yaml", "deployment.yml", "deployment.json"])
def test_a_file_that_may_be_of_seldon_is_told_the_dialect(name: str, folder: Path) -> None:
    (folder / name).write_text("")

    assert wrong(folder / name) == "neither a model repository nor an .onnx file; of Seldon Core? Say --dialect seldon"


def test_other_files_are_told_nothing_of_seldon(folder: Path) -> None:
    (folder / "notes.txt").write_text("")

    assert wrong(folder / "notes.txt") == "neither a model repository nor an .onnx file"


def test_the_check_of_a_graph_says_its_parameters_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Ident.py").write_text(CLASS)
    graph = tmp_path / "graph.yaml"
    graph.write_text("graph: {name: one, component: Ident, parameters: {depth: 3}}\n")

    assert cli.main(["check", "--dialect", "seldon", str(graph)]) == 0

    printed = capsys.readouterr().out
    assert "  component  Ident(depth=3)\n" in printed
    assert printed.count("depth") == 1
