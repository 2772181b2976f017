"""`deepaas-run` reads its command line, environment variables and files as the original does."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server.cli import main
from penstock.server.deepaas import command
from penstock.server.deepaas.command import ANY_SIZE, DeepaasCommand, parse
from penstock.server.deepaas.options import OPTIONS, Option
from penstock.server.settings import SettingError, Settings

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def parsed_command(home: Path, *words: str, **variables: str) -> DeepaasCommand:
    return parse(words, {"HOME": str(home), **variables})


def settings(home: Path, *words: str, **variables: str) -> Settings:
    return parsed_command(home, *words, **variables).settings


def file(folder: Path, name: str, *lines: str) -> str:
    path = folder / name
    path.write_text("\n".join(("[DEFAULT]", *lines)))
    return str(path)


def test_without_arguments_the_server_listens_only_on_port_5000_of_localhost(home: Path) -> None:
    found = settings(home)

    assert (found.dialect, found.http_address, found.http_port) == ("deepaas", "127.0.0.1", 5000)
    assert (found.allow_grpc, found.allow_metrics, found.model_repository) == (False, False, ())
    assert (found.deepaas_workers, found.deepaas_warm, found.http_max_input_size) == (1, True, ANY_SIZE)


def test_each_option_of_the_original_maps_to_a_setting(home: Path) -> None:
    words = (
        "--listen-ip 0.0.0.0 --listen-port=8 --base-path /a/b --model-name m --client-max-size 300 -p4 -d --use-json"
    )
    flags = "--notrain-endpoint --nopredict-endpoint --nodoc-endpoint --debug-endpoint --nowarm"
    found = settings(home, *words.split(), *flags.split())

    assert (found.http_address, found.http_port, found.deepaas_base_path) == ("0.0.0.0", 8, "/a/b")
    assert (found.deepaas_model, found.http_max_input_size, found.deepaas_workers) == ("m", 300, 4)
    assert (found.log_verbose, found.log_format) == (1, "json")
    assert (found.deepaas_train_endpoint, found.deepaas_predict_endpoint, found.deepaas_doc_endpoint) == (False,) * 3
    assert (found.deepaas_debug_endpoint, found.deepaas_warm) == (True, False)


def test_flags_may_be_abbreviated_and_the_last_of_several_wins(home: Path) -> None:
    found = settings(home, "--listen-p", "7", "--warm", "--nowarm", "--debug", "--nodebug")

    assert (found.http_port, found.deepaas_warm, found.log_verbose) == (7, False, 0)


def test_models_may_be_named_anywhere_on_the_command_line(home: Path) -> None:
    assert settings(home, "-d", "m=mod", "--warm", "n=b:c").model_repository == ("m=mod", "n=b:c")


def test_penstocks_own_flags_are_accepted(home: Path) -> None:
    found = settings(home, "--access-log", "m=mod", "--http-port", "0", "--metrics-port", "0", "--deepaas-show-errors")

    assert (found.access_log, found.http_port, found.deepaas_show_errors) == (True, 0, True)
    assert (found.allow_metrics, found.allow_grpc) == (True, False)


def test_the_command_line_overrides_variables_and_variables_override_files(home: Path) -> None:
    path = file(home, "a.conf", "workers = 3", "listen_port = 5011", "warm = off")
    found = settings(home, "--config-file", path, "--listen-port", "7", OS_DEFAULT__WORKERS="5")

    assert (found.http_port, found.deepaas_workers, found.deepaas_warm) == (7, 5, False)


def test_penstocks_variables_override_the_originals(home: Path) -> None:
    assert settings(home, PENSTOCK_DEEPAAS_WORKERS="2", OS_DEFAULT__WORKERS="5").deepaas_workers == 2
    assert settings(home, "-p", "3", PENSTOCK_DEEPAAS_WORKERS="2").deepaas_workers == 3


def test_a_file_overrides_an_option_that_precedes_it(home: Path) -> None:
    path = file(home, "a.conf", "workers = 3")

    assert settings(home, "--workers", "4", "--config-file", path).deepaas_workers == 3
    assert settings(home, "--config-file", path, "--workers", "4").deepaas_workers == 4


def test_the_last_of_several_files_wins_and_a_folder_counts_as_one_more(home: Path) -> None:
    first, second = file(home, "a.conf", "workers = 3", "listen_port = 1"), file(home, "b.conf", "listen_port = 2")
    (home / "more").mkdir()
    file(home / "more", "1.conf", "workers = 9")
    words = ["--config-file", first, "--config-file", second]
    found = settings(home, *words, "--config-dir", str(home / "more"))

    assert (found.http_port, found.deepaas_workers) == (2, 9)
    assert settings(home, "--config-dir", str(home / "more"), *words).deepaas_workers == 3


def test_files_in_the_home_folder_are_read_unless_other_files_are_named(home: Path) -> None:
    file(home, "deepaas.conf", "workers = 21")
    named = file(home, "other.conf", "listen_port = 2")

    assert settings(home).deepaas_workers == 21
    assert settings(home, "-p", "2").deepaas_workers == 2
    assert settings(home, "--config-file", named).deepaas_workers == 1


def test_an_option_may_refer_to_another_option(home: Path) -> None:
    path = file(home, "a.conf", "base_path = /x$listen_port/${workers}")

    assert settings(home, "--config-file", path, "--listen-port", "7").deepaas_base_path == "/x7/1"
    with pytest.raises(SettingError, match=r"no such option nope in group \[DEFAULT\]"):
        settings(home, "--base-path", "/$nope")
    with pytest.raises(SettingError, match="refers to itself: base_path -> base_path"):
        settings(home, "--base-path", "/$base_path")


def test_the_model_may_be_selected_by_an_environment_variable(home: Path) -> None:
    named = {"DEEPAAS_V2_MODEL": "m1"}

    assert settings(home, **named).deepaas_model == "m1"
    assert settings(home, **named, OS_DEFAULT__MODEL_NAME="m2").deepaas_model == "m2"
    assert settings(home, "--model-name", "m3", **named).deepaas_model == "m3"


def test_a_misspelled_option_in_a_file_is_reported_and_not_read(home: Path) -> None:
    path = file(home, "a.conf", "listen-port = 5011", "Debug = true", "nonsense = 1")
    found = parsed_command(home, "--config-file", path)

    assert (found.settings.http_port, found.settings.log_verbose) == (5000, 0)
    assert found.notes == [
        f"{path}: listen-port is ignored: the option's name is listen_port",
        f"{path}: Debug is ignored: the option's name is debug",
    ]


def test_options_without_effect_are_reported(home: Path) -> None:
    notes = parsed_command(home, "--log-file", "x.log", "--use-syslog", "--nouse-journal").notes

    assert [note.split(" has no effect")[0] for note in notes] == ["--log-file", "--use-syslog"]


def test_the_command_of_an_older_image_is_accepted(home: Path) -> None:
    found = parsed_command(home, "--openwhisk-detect", "--listen-ip", "0.0.0.0", "--listen-port", "5001")

    assert (found.settings.http_address, found.settings.http_port) == ("0.0.0.0", 5001)
    assert found.notes == ["--openwhisk-detect has no effect: models are served only over HTTP"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen-port", "70000"], "argument --listen_port: Invalid Port(min=0, max=65535) value: 70000"),
        (["--client-max-size", "-1"], "argument --client_max_size: Invalid Integer(min=0) value: -1"),
        (["-p", "many"], "argument --workers: Invalid Integer(min=1, max=256) value: many"),
        (["--base-path", "x"], "Base path should start with a '/'."),
    ],
    ids=["port", "size", "workers", "base path"],
)
def test_an_invalid_option_value_exits_with_status_1(
    home: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home))

    assert command.run(words, lambda _: 0) == 1
    assert capsys.readouterr().err == f"{message}\n"


@pytest.mark.parametrize("words", [["--nonsense"], ["--no-warm"], ["mod"], ["--listen_port", "7"]])
def test_an_unknown_argument_exits_with_status_2(home: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parsed_command(home, *words)

    assert exit_info.value.code == 2


def test_the_version_is_the_originals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["deepaas-run", "--version"])

    assert (exit_info.value.code, capsys.readouterr().out) == (0, "2.6.0\n")


def test_the_command_runs_when_called_by_its_name_through_a_link(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    served: list[Settings] = []

    def serve(found: Settings) -> int:
        served.append(found)
        return 0

    monkeypatch.setattr("sys.argv", ["/usr/local/bin/deepaas-run", "m=mod", "--listen-port", "0"])
    monkeypatch.setattr("penstock.server.cli._serve", serve)
    monkeypatch.setenv("HOME", str(home))

    assert main() == 0
    assert (served[0].model_repository, served[0].http_port) == (("m=mod",), 0)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag_name)
def test_each_option_is_documented(option: Option) -> None:
    flag = f"`--{'[no]' if option.name.endswith('_endpoint') or option.name == 'warm' else ''}{option.flag_name}`"

    assert flag in (DOCS / "deepaas.md").read_text("utf-8")


@pytest.mark.parametrize("row", [*(f"F{at}" for at in range(1, 36)), *(f"T{at}" for at in range(1, 16))])
def test_each_capability_and_trap_has_a_row_in_the_documentation(row: str) -> None:
    assert f"| {row} |" in (DOCS / "compatibility-deepaas.md").read_text("utf-8")


def test_a_variable_overrides_files_but_not_flags(home: Path) -> None:
    path = file(home, "a.conf", "workers = 3")

    assert settings(home, "-p", "2", OS_DEFAULT__WORKERS="5").deepaas_workers == 2
    assert settings(home, "--config-file", path, "-p", "2", OS_DEFAULT__WORKERS="5").deepaas_workers == 2
    assert settings(home, "-p", "2", "--config-file", path).deepaas_workers == 3
    assert settings(home, "-p", "2", "--config-file", path, OS_DEFAULT__WORKERS="5").deepaas_workers == 5
    assert settings(home, "-p", "2", "--config-file", path, PENSTOCK_DEEPAAS_WORKERS="7").deepaas_workers == 7
