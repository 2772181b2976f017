"""Errors for a component or graph passed to the wrong dialect, and for a component that cannot be parsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server import cli
from penstock.server.repository.mirrors import Mirrors
from penstock.server.seldon.components import Components
from penstock.server.settings import Settings

CLASS = "class Ident:\n    def predict(self, X, names):\n        return X\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A component as s2i built it."""
    (tmp_path / "Ident.py").write_text(CLASS)
    (tmp_path / ".s2i").mkdir()
    (tmp_path / ".s2i" / "environment").write_text("MODEL_NAME=Ident\n")
    return tmp_path


def wrong(path: Path) -> str:
    found = Mirrors.from_paths([str(path)]).invalid_path()
    return "" if found is None else found.message


def test_a_component_served_without_dialect_seldon_is_an_error_that_names_the_dialect(folder: Path) -> None:
    assert wrong(folder) == "is a Seldon component: serve it with --dialect seldon"


def test_a_model_repository_may_contain_an_s2i_environment_file(folder: Path) -> None:
    (folder / "model" / "1").mkdir(parents=True)
    (folder / "model" / "1" / "model.onnx").write_bytes(b"")

    assert not wrong(folder)


@pytest.mark.parametrize("name", ["Ident.py", "deployment.yaml", "deployment.yml", "deployment.json"])
def test_the_error_for_a_python_or_yaml_file_suggests_dialect_seldon(name: str, folder: Path) -> None:
    (folder / name).write_text("")

    assert wrong(folder / name) == (
        "neither a model repository nor an .onnx file; for a Seldon Core graph, set --dialect seldon"
    )


def test_the_error_for_other_files_does_not_mention_seldon(folder: Path) -> None:
    (folder / "notes.txt").write_text("")

    assert wrong(folder / "notes.txt") == "neither a model repository nor an .onnx file"


def test_a_syntax_error_in_a_component_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "Ident.py").write_text("class Ident:\n    def predict(self, X, names)\n        return X\n")

    _, broken = Components(Settings(model_repository=(str(tmp_path),), dialect="seldon"), {}).mistakes()

    assert str(broken) == f"{tmp_path / 'Ident.py'}:2: expected ':'"


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("class Ident:\n    def Predict(self, X, names): ...\n", True),
        ("class Ident(object):\n    x = 1\n", True),
        ("class Ident:\n    async def predict(self, X, names): ...\n", False),
        ("class Ident:\n    def predict_raw(self, message): ...\n", False),
        ("class Ident:\n    transform_input = print\n", False),
        ("class Ident(Base):\n    x = 1\n", False),
        ("from models import Ident\n", False),
        ("Ident = make()\n", False),
    ],
)
def test_check_warns_about_a_class_without_component_methods(
    text: str, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Ident.py").write_text(text)

    assert cli.main(["check", "--dialect", "seldon", str(tmp_path / "Ident.py")]) == 0

    assert ("warning: Ident has none of a component's methods" in capsys.readouterr().out) is warned


def test_check_prints_the_parameters_of_a_graph_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Ident.py").write_text(CLASS)
    graph = tmp_path / "graph.yaml"
    graph.write_text("graph: {name: one, component: Ident, parameters: {depth: 3}}\n")

    assert cli.main(["check", "--dialect", "seldon", str(graph)]) == 0

    printed = capsys.readouterr().out
    assert "  component  Ident(depth=3)\n" in printed
    assert printed.count("depth") == 1


def test_the_only_predictor_that_is_not_a_shadow_gets_all_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "Ident.py").write_text(CLASS)
    graph = tmp_path / "graph.yaml"
    graph.write_text(
        "apiVersion: machinelearning.seldon.io/v1\nkind: SeldonDeployment\nmetadata:\n  name: d\n"
        "  annotations: {penstock.io/one: Ident}\nspec:\n  predictors:\n"
        "  - {name: light, graph: {name: one, type: MODEL}}\n"
        "  - {name: dark, shadow: true, graph: {name: one, type: MODEL}}\n"
    )

    assert cli.main(["check", "--dialect", "seldon", str(graph)]) == 0

    printed = capsys.readouterr().out
    assert "d, predictor light: 100 % of the requests\n" in printed
    assert "d, predictor dark: a shadow\n" in printed


def test_a_graph_in_json_may_be_indented_with_tabs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "Ident.py").write_text(CLASS)
    graph = tmp_path / "graph.json"
    graph.write_text('{\n\t"graph": {\n\t    "name":\t"one",\n\t\t"component": "Ident"\n\t}\n}\n\t\n')

    assert cli.main(["check", "--dialect", "seldon", str(graph)]) == 0
    assert "  one: MODEL\n" in capsys.readouterr().out
