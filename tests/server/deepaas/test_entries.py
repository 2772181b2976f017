"""Which models are served: the named ones, the installed ones, or the built-in one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.server.deepaas import entries, installed
from penstock.server.deepaas.entries import BUILT_IN, EXTRA_PACKAGES, Entries, Target, parse_target
from penstock.server.deepaas.installed import Installed, installed_in
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import MistakesError
from penstock.server.settings import Settings


def opened(*paths: str, environ: dict[str, str] | None = None, **others: Any) -> Entries:
    found = Entries(Settings(dialect="deepaas", model_repository=paths, **others), environ or {})
    assert found.invalid_path() is None
    found.open()
    return found


def targets(found: Entries) -> dict[str, str]:
    return {name: each.target for name, each in found.targets.items()}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the list of installed models: empty until a test adds to it."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(entries, "installed_in", lambda _: Installed(found, "3.26.2"))
    return found


def install(folder: Path, *lines: str) -> None:
    place = folder / "some-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: some\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text("\n".join(("[deepaas.v2.model]", *lines)))


@pytest.mark.parametrize(
    ("path", "target"),
    [
        ("m=mod", "mod"),
        ("my-model=package.module:Class", "package.module:Class"),
        ("a b=module:found.inner", "module:found.inner"),
    ],
)
def test_a_path_consists_of_a_name_and_the_location_of_the_code(path: str, target: str) -> None:
    assert parse_target(path) == Target(path.partition("=")[0], target)


@pytest.mark.parametrize("path", ["mod", "m=", "=mod", "m=a b", "m=mod:", "m=mod.py:", "a/b=mod", "m=../mod"])
def test_an_invalid_model_path_is_reported(path: str) -> None:
    finding = Entries(Settings(dialect="deepaas", model_repository=(path,)), {}).invalid_path()

    assert finding is not None
    assert "expected NAME=package.module" in finding.message


def test_a_model_name_given_twice_is_an_error() -> None:
    finding = Entries(Settings(dialect="deepaas", model_repository=("m=a", "m=b")), {}).invalid_path()

    assert finding is not None
    assert finding.message == "two models are named 'm'"


def test_a_base_path_without_a_leading_slash_is_an_error() -> None:
    finding = Entries(Settings(dialect="deepaas", deepaas_base_path="x"), {}).invalid_path()

    assert finding is not None
    assert finding.message == "--deepaas-base-path must begin with /"


def test_models_named_on_the_command_line_are_served_instead_of_installed_ones(there: list[tuple[str, str]]) -> None:
    there.append(("other", "other"))

    assert targets(opened("b=mod", "a=mod:Class")) == {"b": "mod", "a": "mod:Class"}


def test_installed_models_are_served_if_none_is_named(there: list[tuple[str, str]]) -> None:
    there += [("one", "package.one"), ("two", "package.two:Class")]

    assert targets(opened()) == {"one": "package.one", "two": "package.two:Class"}


def test_one_model_may_be_selected_by_the_setting_or_the_environment_variable(there: list[tuple[str, str]]) -> None:
    there += [("one", "package.one"), ("two", "package.two")]

    assert list(opened(deepaas_model="two").targets) == ["two"]
    assert list(opened(environ={"DEEPAAS_V2_MODEL": "one"}).targets) == ["one"]
    assert list(opened("a=mod", "b=mod", environ={"DEEPAAS_V2_MODEL": "b"}).targets) == ["b"]


def test_selecting_a_model_that_does_not_exist_is_an_error(there: list[tuple[str, str]]) -> None:
    there.append(("one", "package.one"))

    with pytest.raises(MistakesError, match="there is no model 'two'; available: one"):
        opened(deepaas_model="two")


def test_the_built_in_model_is_served_if_no_model_is_installed(
    there: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert opened().targets == {"deepaas-test": BUILT_IN}
    assert "no model is installed" in caplog.text


@pytest.mark.parametrize(
    ("version", "message"),
    [("", "lacks marshmallow"), ("4.0.1", "has marshmallow 4.0.1")],
    ids=["missing", "too new"],
)
def test_a_missing_or_unsupported_marshmallow_is_an_error(
    monkeypatch: pytest.MonkeyPatch, version: str, message: str
) -> None:
    monkeypatch.setattr(entries, "installed_in", lambda _: Installed([], version))

    with pytest.raises(MistakesError) as error:
        opened("m=mod")

    assert message in str(error.value)
    assert str(error.value).endswith("pip install 'penstock[deepaas]'")


def test_entry_points_are_found_without_importing_what_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "plain = no_such_module", "object = no_such_module:found", "more = no_such_module:found [extra]")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert installed_in().entries == [
        ("plain", "no_such_module"),
        ("object", "no_such_module:found"),
        ("more", "no_such_module:found"),
    ]


def test_entry_points_of_another_interpreter_are_found_by_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "theirs = no_such_module")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    found = opened(deepaas_interpreter=sys.executable)

    assert targets(found) == {"theirs": "no_such_module"}
    assert found.spec(found.targets["theirs"]).worker.interpreter == sys.executable


def test_an_interpreter_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MistakesError, match="no such file"):
        opened(deepaas_interpreter=str(tmp_path / "python"))


def test_a_created_environment_includes_the_packages_that_models_import(
    there: list[tuple[str, str]], tmp_path: Path
) -> None:
    found = Entries(Settings(dialect="deepaas", deepaas_requirements=str(tmp_path / "requirements.txt")), {})

    assert found.spec(Target("m", "mod")).worker.packages == EXTRA_PACKAGES


def test_a_model_is_in_the_repository_under_its_name(there: list[tuple[str, str]]) -> None:
    found = opened("m=mod:Class", deepaas_workers=3, deepaas_warm=False)
    repository = found.repository(Defaults())
    scanned, _, prints = repository.scan()

    assert (repository.names(), prints) == (["m"], {"m": b"-"})
    assert [(each.name, each.specs[0].options["target"]) for each in scanned] == [("m", "mod:Class")]
    assert (scanned[0].specs[0].instances[0].count, scanned[0].specs[0].options["warm"]) == (3, "false")
    assert repository.read("other") == (None, b"")


def test_the_entry_point_namespace_is_the_originals() -> None:
    assert installed.NAMESPACE == "deepaas.v2.model"
