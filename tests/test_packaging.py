"""The packages listed in pyproject.toml match the folders."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = ("server", "batching", "backends", "perf")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _folders_with_code() -> set[str]:
    return {
        ".".join(("penstock", *path.parent.relative_to(ROOT).parts)) for root in ROOTS for path in _modules(ROOT / root)
    }


def _modules(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.py") if "__pycache__" not in path.parts]


def test_the_listed_packages_are_exactly_the_folders_with_code() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == _folders_with_code()


def test_every_listed_package_has_an_init() -> None:
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert (ROOT / Path(*package.split(".")[1:]) / "__init__.py").is_file(), package


def test_the_four_folders_are_mapped_under_penstock() -> None:
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {f"penstock.{root}": root for root in ROOTS}


@pytest.mark.parametrize("root", ROOTS)
def test_every_top_level_package_is_marked_typed_and_linked_for_type_checkers(root: str) -> None:
    assert (ROOT / root / "py.typed").is_file()
    assert (ROOT / ".typing" / "penstock" / root).readlink() == Path(f"../../{root}")


def test_the_typing_folder_holds_exactly_the_four_links() -> None:
    assert {path.name for path in (ROOT / ".typing" / "penstock").iterdir()} == set(ROOTS)


def test_every_file_besides_python_modules_is_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["*"]
    for root in ROOTS:
        for path in (ROOT / root).rglob("*"):
            hidden = "__pycache__" in path.parts or any(part.startswith(".") for part in path.parts)
            if path.is_file() and path.suffix != ".py" and not hidden:
                assert any(path.match(pattern) for pattern in patterns), path


def test_the_core_dependencies_include_no_model_runtime() -> None:
    names = " ".join(PROJECT["project"]["dependencies"])

    assert "onnxruntime" not in names
    assert "tensorflow" not in names
