"""`penstock check --dialect deepaas` reports what would be served and every mistake, without running a model's code."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import pytest

from penstock.server.deepaas.check import check_entries
from penstock.server.repository.check import CheckReport
from penstock.server.settings import Settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def checked(*paths: str) -> CheckReport:
    return check_entries(Settings(dialect="deepaas", model_repository=paths))


def messages_of(report: CheckReport) -> list[str]:
    return [each.message for each in report.findings]


def test_a_valid_model_is_described_without_importing_it(folder: Path) -> None:
    (folder / "mod.py").write_text("raise SystemExit('this is never run')\ndef predict(**arguments): ...\n")
    report = checked("m=mod")

    assert (report.exit_status, messages_of(report)) == (0, [])
    assert "module     mod" in str(report)
    assert "1 version would be served" in str(report)


def test_a_module_in_a_package_is_found_without_importing_the_package(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("raise SystemExit")
    (folder / "package" / "module.py").write_text("class Model:\n    def predict(self): ...\n")

    assert messages_of(checked("m=package.module:Model")) == []
    assert messages_of(checked("m=package.module:Other")) == ["has no Other"]
    assert messages_of(checked("m=package.other")) == ["model 'm': there is no module package.other"]


def test_a_module_of_an_editable_installation_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class EditableFinder:  # like setuptools' for `pip install -e .`: the source folder is not on sys.path
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return PathFinder.find_spec(name, [str(folder / "source")]) if name == "editable_package" else None

    package = folder / "source" / "editable_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit")
    (package / "api.py").write_text("def predict(): ...\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder])

    assert messages_of(checked("m=editable_package.api")) == []
    assert messages_of(checked("m=editable_package.other")) == ["model 'm': there is no module editable_package.other"]


def test_an_installed_package_precedes_a_folder_of_its_name_that_is_not_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "installed_package").mkdir()  # the repository, into which the package's own folder was cloned
    package = tmp_path / "site" / "installed_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit")
    (package / "api.py").write_text("def predict(): ...\n")
    monkeypatch.syspath_prepend(package.parent)

    assert messages_of(checked("m=installed_package.api")) == []


def test_one_mistake_hides_neither_other_mistakes_nor_valid_models(folder: Path) -> None:
    (folder / "good.py").write_text("def predict(): ...\n")
    (folder / "broken.py").write_text("def predict(:\n")
    report = checked("a=good", "b=broken", "c=no_such_module_at_all")

    assert [spec.name for spec in report.specs] == ["a"]
    assert report.exit_status == 1
    assert [each.line for each in report.findings] == [1, 0]


def test_a_module_without_methods_is_reported(folder: Path) -> None:
    (folder / "empty.py").write_text("x = 1\n")
    report = checked("m=empty")

    assert (report.exit_status, messages_of(report)) == (0, ["has neither predict nor train: both return 501"])


def test_an_invalid_model_path_is_a_mistake(folder: Path) -> None:
    report = checked(str(folder))

    assert report.exit_status == 1
    assert "expected NAME=package.module" in str(report)
