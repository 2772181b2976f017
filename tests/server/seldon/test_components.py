"""The PATH of a component: which component a folder has, its mistakes, and the model made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.server import cli
from penstock.server.repository.defaults import Defaults
from penstock.server.repository.findings import MistakesError
from penstock.server.seldon.check import check_components
from penstock.server.seldon.components import ComponentRepository, Components
from penstock.server.seldon.parameters import BadParameterError, read
from penstock.server.settings import SettingError, Settings

CLASS = "class {0}:\n    def predict(self, X, names):\n        return X\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one component."""
    (tmp_path / "Ident.py").write_text(CLASS.format("Ident"))
    return tmp_path


def settings_of(path: Path, **others: Any) -> Settings:
    return replace(Settings(model_repository=(str(path),), dialect="seldon"), **others)


def components_of(path: Path, environ: dict[str, str] | None = None, **others: Any) -> Components:
    return Components(settings_of(path, **others), environ or {})


def built(folder: Path, text: str) -> None:
    (folder / ".s2i").mkdir()
    (folder / ".s2i" / "environment").write_text(text)


def mistakes_of(components: Components) -> list[str]:
    try:
        components.open()
    except MistakesError as error:
        return [finding.message for finding in error.findings]
    return []


# -- which component ---------------------------------------------------------------------------------------------


def test_the_seldon_component_setting_overrides_the_s2i_environment_file(folder: Path) -> None:
    built(folder, "MODEL_NAME=Other\n")

    assert components_of(folder, seldon_component="pkg.mod.Class").component == "pkg.mod.Class"


def test_the_s2i_environment_file_overrides_the_model_name_variable(folder: Path) -> None:
    built(folder, "# of the image\nMODEL_NAME=Built\nSERVICE_TYPE=MODEL\n\nPERSISTENCE=0\n")

    assert components_of(folder, {"MODEL_NAME": "Started"}).component == "Built"


def test_the_model_name_variable_overrides_the_files_in_the_folder(folder: Path) -> None:
    assert components_of(folder, {"MODEL_NAME": "Started"}).component == "Started"


def test_a_module_with_a_class_of_its_own_name_is_the_component(folder: Path) -> None:
    (folder / "setup.py").write_text("class Other: ...\n")
    (folder / "broken.py").write_text("def")

    assert components_of(folder).component == "Ident"


def test_a_path_to_a_file_selects_the_component_of_that_name(folder: Path) -> None:
    built(folder, "MODEL_NAME=Built\n")
    components = components_of(folder / "Ident.py")

    assert (components.component, components.folder, components.invalid_path()) == ("Ident", folder, None)


def test_a_folder_with_two_components_is_rejected_unless_one_is_named(folder: Path) -> None:
    (folder / "Other.py").write_text(CLASS.format("Other"))

    (mistake,) = mistakes_of(components_of(folder))
    assert mistake.startswith("no component is named: pass --seldon-component Name")
    assert mistake.endswith("; found: Ident.py, Other.py")


def test_a_folder_without_a_component_is_an_error_that_suggests_a_fix(tmp_path: Path) -> None:
    (mistake,) = mistakes_of(components_of(tmp_path))

    assert mistake.endswith("or have one Name.py with a class Name")


# -- what is wrong -----------------------------------------------------------------------------------------------


def test_a_folder_with_one_component_has_no_mistakes(folder: Path) -> None:
    assert components_of(folder).invalid_path() is None
    assert mistakes_of(components_of(folder)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nope", "no such file or folder"),
        ("notes.txt", "no component: neither a folder, nor Name.py, nor a graph (.yaml, .json)"),
    ],
)
def test_a_path_that_is_not_a_component_is_an_error(folder: Path, name: str, text: str) -> None:
    (folder / "notes.txt").touch()

    wrong = components_of(folder / name).invalid_path()

    assert wrong is not None
    assert (wrong.path, wrong.message) == (folder / name, text)


def test_a_second_path_is_rejected(folder: Path) -> None:
    wrong = Components(Settings(model_repository=(str(folder), "other"), dialect="seldon"), {}).invalid_path()

    assert str(wrong) == "other: a component has a single PATH; to serve several components, use a graph"


def test_a_component_at_a_url_is_rejected() -> None:
    wrong = Components(Settings(model_repository=("s3://bucket/folder",), dialect="seldon"), {}).invalid_path()

    assert wrong is not None
    assert wrong.message == "a component is served from a folder on this machine"


def test_invalid_parameters_are_a_mistake_when_the_component_is_opened(folder: Path) -> None:
    parameters = '[{"name":"n","value":"x","type":"INT"}]'

    assert mistakes_of(components_of(folder, seldon_parameters=parameters)) == [
        "Bad model parameter: n with value x can't be parsed as a INT"
    ]
    assert mistakes_of(components_of(folder, {"PREDICTIVE_UNIT_PARAMETERS": parameters})) != []


def test_http_workers_are_rejected_for_the_seldon_dialect() -> None:
    with pytest.raises(SettingError, match="use --seldon-workers instead"):
        Settings(dialect="seldon", http_workers=2)


def test_serving_a_component_without_a_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--dialect", "seldon"]) == 2
    assert capsys.readouterr().err.startswith("penstock: nothing to serve: pass the PATH of a component, its folder")


# -- parameters --------------------------------------------------------------------------------------------------


def test_parameters_are_converted_to_their_types() -> None:
    text = (
        '[{"name":"i","value":"3","type":"INT"},{"name":"f","value":"1","type":"FLOAT"},'
        '{"name":"d","value":"2.5","type":"DOUBLE"},{"name":"s","value":"x","type":"STRING"}]'
    )

    found = read(text)

    assert found == {"i": 3, "f": 1.0, "d": 2.5, "s": "x"}
    assert [type(value) for value in found.values()] == [int, float, float, str]


@pytest.mark.parametrize("word", ["y", "YES", "t", "True", "on", "1"])
def test_a_bool_parameter_is_true_for_words_such_as_yes_and_on(word: str) -> None:
    assert read(f'[{{"name":"b","value":"{word}","type":"BOOL"}}]') == {"b": True}


@pytest.mark.parametrize("word", ["n", "No", "f", "false", "OFF", "0"])
def test_a_bool_parameter_is_false_for_words_such_as_no_and_off(word: str) -> None:
    assert read(f'[{{"name":"b","value":"{word}","type":"BOOL"}}]') == {"b": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the parameters are not JSON: "),
        ("{}", "the parameters are not a list of "),
        ("[1]", "the parameters are not a list of "),
        ("[{}]", "a model parameter has no name: {}"),
        (
            '[{"name":"n","value":"3","type":"LIST"}]',
            "Bad model parameter type: LIST valid are INT, FLOAT, DOUBLE, STRING, BOOL",
        ),
        ('[{"name":"n","value":"3"}]', "Bad model parameter type: None valid are "),
        ('[{"name":"n","value":"3.5","type":"INT"}]', "Bad model parameter: n with value 3.5 can't be parsed as a INT"),
        ('[{"name":"n","type":"INT"}]', "Bad model parameter: n with value None can't be parsed as a INT"),
        ('[{"name":"n","value":"maybe","type":"BOOL"}]', "Bad model parameter: n with value maybe "),
    ],
    ids=["no JSON", "no list", "no object", "no name", "unknown type", "no type", "no number", "no value", "no truth"],
)  # fmt: skip
def test_invalid_parameters_are_rejected_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(BadParameterError) as refused:
        read(text)

    assert str(refused.value).startswith(message)


# -- the model ---------------------------------------------------------------------------------------------------


def test_a_components_model_spec_follows_from_the_settings_and_environment(folder: Path) -> None:
    components = components_of(
        folder, {"PREDICTIVE_UNIT_PARAMETERS": "[ ]", "BOTH": "started"}, seldon_component="pkg.Ident",
        seldon_strict=False, seldon_batching=True, seldon_workers=3, seldon_timeout_secs=2.5,
        seldon_requirements="/r.txt", seldon_interpreter="/bin/py", log_verbose=1,
        default_max_batch_size=7,
    )  # fmt: skip
    built(folder, "BOTH=built\nMORE= x=y \n#NO=1\nnonsense\n")

    spec = components.spec()

    assert (spec.name, spec.version, spec.backend, spec.path) == ("Ident", 1, "seldon", folder)
    assert spec.options == {
        "component": "pkg.Ident",
        "parameters": "[ ]",
        "strict": "false",
        "batching": "true",
        "max_requests": "0",
        "max_requests_jitter": "0",
    }
    assert [group.count for group in spec.instances] == [3]
    assert (spec.worker.interpreter, spec.worker.requirements) == ("/bin/py", Path("/r.txt"))
    assert spec.worker.packages == ("protobuf",)
    assert spec.worker.timeout_s == 2.5
    assert spec.policy.default_max_batch_rows == 7
    assert spec.worker.environment == {"MORE": " x=y", "SELDON_LOG_LEVEL": "DEBUG"}


def test_requirements_are_not_installed_unless_requested(folder: Path) -> None:
    (folder / "requirements.txt").write_text("numpy==1.17\n")

    worker = components_of(folder).spec().worker
    assert (worker.requirements, worker.packages) == (None, ())


@pytest.mark.parametrize(
    ("others", "level"),
    [
        ({}, "INFO"),
        ({"log_info": False}, "WARNING"),
        ({"log_info": False, "log_warning": False}, "ERROR"),
        ({"log_info": False, "log_warning": False, "log_error": False}, "CRITICAL"),
    ],
    ids=["info", "warning", "error", "critical"],
)
def test_user_code_logs_at_the_servers_log_level(folder: Path, others: dict[str, Any], level: str) -> None:
    assert components_of(folder, **others).spec().worker.environment == {"SELDON_LOG_LEVEL": level}


def repository_of(folder: Path, **others: Any) -> ComponentRepository:
    found = components_of(folder, **others).repository(Defaults())
    assert isinstance(found, ComponentRepository)
    return found


def test_the_repository_contains_only_the_component(folder: Path) -> None:
    repository = repository_of(folder)

    entries, findings, prints = repository.scan()

    assert ([entry.name for entry in entries], findings, list(prints)) == (["Ident"], [], ["Ident"])
    assert repository.names() == ["Ident"]
    assert repository.read("Other") == (None, b"")
    entry, _ = repository.read("Ident")
    assert entry is not None
    assert entry.specs == entries[0].specs


def test_loading_a_component_with_a_configuration_is_a_mistake(folder: Path) -> None:
    entry, _ = repository_of(folder).read("Ident", config=object())

    assert entry is not None
    assert [finding.message for finding in entry.findings] == ["takes no configuration: it is in the class"]


@pytest.mark.parametrize("path", ["", "Ident.py"])
def test_a_changed_file_changes_the_fingerprints_in_poll_mode(folder: Path, path: str) -> None:
    repository = repository_of(folder / path, model_control_mode="poll")
    before = repository.fingerprints()

    (folder / "Ident.py").write_text(CLASS.format("Ident") + "# changed\n")

    assert repository.fingerprints() != before


def test_a_changed_s2i_environment_file_changes_the_fingerprint_in_poll_mode(folder: Path) -> None:
    repository = repository_of(folder, model_control_mode="poll")
    before = repository.fingerprint("Ident")

    built(folder, "A=b\n")

    assert repository.fingerprint("Ident") != before
    assert repository.fingerprint("Other") == b""


def test_fingerprints_ignore_files_unless_the_repository_is_polled(folder: Path) -> None:
    repository = repository_of(folder)
    before = repository.fingerprints()

    (folder / "Ident.py").unlink()

    assert repository.fingerprints() == before


# -- penstock check ----------------------------------------------------------------------------------------------


def test_check_reports_what_would_be_served_without_running_user_code(folder: Path) -> None:
    (folder / "Ident.py").write_text("raise SystemExit\n" + CLASS.format("Ident"))
    parameters = '[{"name":"n","value":"3","type":"INT"}]'

    report = check_components(settings_of(folder, seldon_parameters=parameters, seldon_batching=True))

    assert report.exit_status == 0
    assert str(report) == (
        f"Ident version 1, seldon, {folder}\n"
        "  instances  1 on cpu\n"
        "  component  Ident(n=3)\n"
        "  shares     calls of predict, where answers stay the same\n"
        "\n1 version would be served, 0 mistakes"
    )


@pytest.mark.parametrize(
    ("component", "messages"),
    [
        ("Ident", []),
        ("pkg.mod.Class", []),
        ("pkg.Imported", []),
        ("made.Anything", []),
        ("Nope", [": no module Nope here: if it is not installed, 'Nope' cannot be imported"]),
        ("other.Thing", [": warning: no module other here: if it is not installed, 'other.Thing' cannot be imported"]),
        ("pkg.mod.Other", ["/pkg/mod.py: has no class Other"]),
        ("broken.Thing", ["/broken.py:2: "]),
    ],
)
def test_check_reports_components_that_cannot_be_imported(folder: Path, component: str, messages: list[str]) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").write_text("from .mod import Class as Imported\n")
    (folder / "pkg" / "mod.py").write_text(CLASS.format("Class"))
    (folder / "made.py").write_text("from elsewhere import *\n")
    (folder / "broken.py").write_text("\nclass Thing\n")

    report = check_components(settings_of(folder, seldon_component=component))

    found = [str(finding).removeprefix(str(folder)) for finding in report.findings]
    assert len(found) == len(messages)
    assert all(text.startswith(begin) for text, begin in zip(found, messages, strict=True))


def test_check_reports_a_missing_interpreter_and_requirements_file(folder: Path) -> None:
    report = check_components(
        settings_of(folder, seldon_interpreter="/nowhere/python", seldon_requirements=str(folder / "nope.txt"))
    )

    assert [str(finding) for finding in report.findings] == [
        "/nowhere/python: --seldon-interpreter: not found, or not executable",
        f"{folder / 'nope.txt'}: --seldon-requirements: no such file or folder",
    ]


def test_the_check_command_prints_the_report_and_exits_with_its_status(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", "--dialect", "seldon", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("1 version would be served, 0 mistakes\n")
    assert cli.main(["check", "--dialect", "seldon", str(folder / "nope")]) == 1
    assert (
        capsys.readouterr().out
        == f"{folder / 'nope'}: no such file or folder\n\n0 versions would be served, 1 mistake\n"
    )
