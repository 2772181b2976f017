"""The command line and environment variables of seldon-core-microservice become settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.server import cli
from penstock.server.seldon.command import NAME, SeldonCommand, parse_command, run
from penstock.server.settings import SettingError, Settings

NONE = Path("/nowhere/annotations")
FOLDER = Path("/models")
DOCS = Path(__file__).parents[3] / "docs"
THEIRS = (
    "--service-type", "--persistence", "--parameters", "--log-level", "--debug", "--tracing", "--workers", "--threads",
    "--max-requests", "--max-requests-jitter", "--keepalive", "--single-threaded", "--http-port", "--grpc-port",
    "--metrics-port", "--pidfile", "--access-log", "--grpc-threads", "--grpc-workers",
)  # fmt: skip
"""The arguments of seldon-core-microservice."""
DEFAULTS: dict[str, Any] = {
    "dialect": "seldon",
    "model_repository": ("/models",),
    "seldon_component": "Ident",
    "seldon_parameters": "[]",
    "seldon_timeout_secs": 5000.0,
    "http_address": "0.0.0.0",
    "grpc_address": "0.0.0.0",
    "http_port": 9000,
    "grpc_port": 5000,
    "metrics_port": 6000,
    "metrics_access_log": False,
}


def command_of(*words: str, environ: dict[str, str] | None = None, annotations: Path = NONE) -> SeldonCommand:
    return parse_command(["Ident", *words], environ or {}, FOLDER, annotations)


def expected_settings(**others: Any) -> Settings:
    return Settings(**(DEFAULTS | others))


def test_a_name_alone_is_served_on_seldon_cores_default_ports() -> None:
    assert command_of().settings == expected_settings()


def test_a_dotted_name_selects_a_component_in_a_package() -> None:
    assert parse_command(["pkg.mod.Class"], {}, FOLDER, NONE).settings == expected_settings(
        seldon_component="pkg.mod.Class"
    )


ARGUMENTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "ports": (
        ["--http-port", "1", "--grpc-port=2", "--metrics-port", "3"],
        {"http_port": 1, "grpc_port": 2, "metrics_port": 3},
    ),
    "service type": (["--service-type", "MODEL"], {}),
    "router": (["--service-type", "ROUTER"], {}),
    "outlier detector": (["--service-type", "OUTLIER_DETECTOR"], {}),
    "persistence": (["--persistence"], {}),
    "persistence 0": (["--persistence", "0"], {}),
    "parameters": (
        ["--parameters", '[{"name":"n","value":"3","type":"INT"}]'],
        {"seldon_parameters": '[{"name":"n","value":"3","type":"INT"}]'},
    ),
    "log level debug": (["--log-level", "DEBUG"], {"log_verbose": 1}),
    "log level warning": (["--log-level", "WARNING"], {"log_info": False}),
    "log level error": (["--log-level", "ERROR"], {"log_info": False, "log_warning": False}),
    "debug": (["--debug"], {"access_log": True, "metrics_access_log": True}),
    "debug false is debug": (["--debug", "false"], {"access_log": True, "metrics_access_log": True}),
    "tracing": (["--tracing"], {}),
    "workers": (["--workers", "4"], {"seldon_workers": 4}),
    "threads": (["--threads", "4"], {}),
    "single threaded": (["--single-threaded", "1"], {}),
    "max requests": (
        ["--max-requests", "4", "--max-requests-jitter", "2"],
        {"seldon_max_requests": 4, "seldon_max_requests_jitter": 2},
    ),
    "keepalive": (["--keepalive", "65"], {"http_idle_timeout_secs": 65.0}),
    "keepalive 0": (["--keepalive", "0"], {"http_idle_timeout_secs": 0.01}),
    "keepalive as by default": (["--keepalive", "2"], {}),
    "access log": (["--access-log"], {"access_log": True}),
    "grpc workers": (["--grpc-workers", "3", "--grpc-threads", "2"], {}),
    "no grpc": (["--grpc-workers", "0"], {"allow_grpc": False}),
    "the beginning of a flag": (["--work", "4"], {"seldon_workers": 4}),
    "batching": (["--batching"], {"seldon_batching": True}),
    "batching off": (["--batching=false"], {"seldon_batching": False}),
    "not strict": (["--seldon-strict=false"], {"seldon_strict": False}),
    "a flag of serve": (["--http-address", "127.0.0.1", "--strict-readiness", "0"], {
        "http_address": "127.0.0.1", "strict_readiness": False,
    }),
    "environment of its own": (["--seldon-interpreter", "py", "--seldon-requirements", "r.txt"], {
        "seldon_interpreter": "py", "seldon_requirements": "r.txt",
    }),
}  # fmt: skip


@pytest.mark.parametrize(("words", "others"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_arguments_of_seldon_core_microservice_become_settings(words: list[str], others: dict[str, Any]) -> None:
    assert command_of(*words).settings == expected_settings(**others)


VARIABLES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "http port": ({"PREDICTIVE_UNIT_HTTP_SERVICE_PORT": "1"}, {"http_port": 1}),
    "grpc port": ({"PREDICTIVE_UNIT_GRPC_SERVICE_PORT": "1"}, {"grpc_port": 1}),
    "metrics port": ({"PREDICTIVE_UNIT_METRICS_SERVICE_PORT": "1"}, {"metrics_port": 1}),
    "metrics path": ({"PREDICTIVE_UNIT_METRICS_ENDPOINT": "/prometheus"}, {"metrics_path": "/prometheus"}),
    "metrics are logged": ({"FILTER_METRICS_ACCESS_LOGS": "false"}, {"metrics_access_log": True}),
    "parameters": ({"PREDICTIVE_UNIT_PARAMETERS": "[1]"}, {"seldon_parameters": "[1]"}),
    "workers": ({"GUNICORN_WORKERS": "2"}, {"seldon_workers": 2}),
    "keepalive": ({"GUNICORN_KEEPALIVE": "5"}, {"http_idle_timeout_secs": 5.0}),
    "access log": ({"GUNICORN_ACCESS_LOG": "True"}, {"access_log": True}),
    "access log off": ({"GUNICORN_ACCESS_LOG": "yes"}, {"access_log": False}),
    "debug": ({"SELDON_DEBUG": "1"}, {"access_log": True, "metrics_access_log": True}),
    "no grpc": ({"GRPC_WORKERS": "0"}, {"allow_grpc": False}),
    "log level": ({"SELDON_LOG_LEVEL": "DEBUG"}, {"log_verbose": 1}),
    "log level warn": ({"SELDON_LOG_LEVEL": "WARN"}, {"log_info": False}),
    "log level critical": (
        {"SELDON_LOG_LEVEL": "CRITICAL"}, {"log_info": False, "log_warning": False, "log_error": False},
    ),
    "no effect": ({"TRACING": "0", "GUNICORN_THREADS": "1", "FLASK_SINGLE_THREADED": "1", "PATH": "x"}, {}),
    "penstock's own go first": (
        {"PENSTOCK_HTTP_PORT": "7", "PREDICTIVE_UNIT_HTTP_SERVICE_PORT": "1", "PENSTOCK_GRPC_ADDRESS": "::1"},
        {"http_port": 7, "grpc_address": "::1"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("environ", "others"), VARIABLES.values(), ids=VARIABLES.keys())
def test_environment_variables_of_seldon_core_become_settings(environ: dict[str, str], others: dict[str, Any]) -> None:
    assert command_of(environ=environ).settings == expected_settings(**others)


@pytest.mark.parametrize("variable", ["PREDICTIVE_UNIT_HTTP_SERVICE_PORT", "PENSTOCK_HTTP_PORT"])
def test_an_argument_overrides_an_environment_variable(variable: str) -> None:
    assert command_of("--http-port", "3", environ={variable: "1"}).settings.http_port == 3


@pytest.mark.parametrize("flag", ["--http-port", "--http-p"])
def test_an_argument_equal_to_the_default_overrides_an_environment_variable(flag: str) -> None:
    assert command_of(flag, "9000", environ={"PENSTOCK_HTTP_PORT": "7"}).settings == expected_settings(http_port=9000)


def test_the_log_level_in_the_environment_overrides_the_argument() -> None:
    assert command_of("--log-level", "ERROR", environ={"SELDON_LOG_LEVEL": "DEBUG"}).settings.log_verbose == 1


ANNOTATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("", {}),
    "others": ('a="b"\nno annotation\n', {}),
    "rest timeout": ('seldon.io/rest-timeout="30000"\n', {"seldon_timeout_secs": 30.0}),
    "rest timeout with spaces": ('  seldon.io/rest-timeout = "1999"\n', {"seldon_timeout_secs": 1.0}),
    "no time at all": ('seldon.io/rest-timeout="0"\n', {"seldon_timeout_secs": 1.0}),
    "message size": ('x="y"\nseldon.io/grpc-max-message-size="1000"', {"grpc_max_message_bytes": 1000}),
}


@pytest.mark.parametrize(("text", "others"), ANNOTATIONS.values(), ids=ANNOTATIONS.keys())
def test_pod_annotations_become_settings(text: str, others: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    file.write_text(text)

    assert command_of(annotations=file).settings == expected_settings(**others)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["REST"], 255, "Unknown args ['REST']. Note since 1.5.0 this CLI does not take API type (REST, GRPC)"),
        (["--nope", "1"], 255, "Unknown args ['--nope', '1']. Note since 1.5.0 "),
        (["--service-type", "X"], 2, "argument --service-type: invalid choice: 'X' "),
        (["--log-level", "debug"], 2, "argument --log-level: invalid choice: 'debug' "),
        (["--workers", "x"], 2, "argument --workers: invalid int value: 'x'"),
        (["--grpc-workers", "x"], 2, "argument --grpc-workers: invalid int value: 'x'"),
    ],
    ids=["api type", "unknown", "service type", "log level", "workers", "grpc workers"],
)
def test_invalid_arguments_exit_with_seldon_cores_status_and_text(
    words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command_of(*words)

    assert ended.value.code == status
    assert text in capsys.readouterr().err


def test_a_missing_component_name_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_command([], {}, FOLDER, NONE)

    assert ended.value.code == 2
    assert "the following arguments are required: interface_name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"GUNICORN_WORKERS": "x"}, "GUNICORN_WORKERS must be a whole number, not 'x'"),
        ({"SELDON_LOG_LEVEL": "debug"}, "Invalid log level: debug"),
        ({"PREDICTIVE_UNIT_HTTP_SERVICE_PORT": "70000"}, "PENSTOCK_HTTP_PORT must be a whole number"),
        ({"GUNICORN_WORKERS": "0"}, "PENSTOCK_SELDON_WORKERS must be a whole number from 1 to 256, not 0"),
        ({"PENSTOCK_NOPE": "1"}, "PENSTOCK_NOPE: no such setting"),
    ],
    ids=["no number", "no level", "no port", "no workers", "no setting"],
)  # fmt: skip
def test_an_invalid_environment_variable_is_an_error_that_names_the_variable(
    environ: dict[str, str], text: str
) -> None:
    with pytest.raises(SettingError) as refused:
        command_of(environ=environ)

    assert text in str(refused.value)


def test_a_timeout_annotation_that_is_not_a_number_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "annotations"
    file.write_text('seldon.io/rest-timeout="soon"')

    with pytest.raises(SettingError, match=r"annotation seldon\.io/rest-timeout must be a whole number, not 'soon'"):
        command_of(annotations=file)


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["--threads", "2"], "--threads has no effect"),
        (["--grpc-threads", "2"], "--grpc-workers and --grpc-threads have no effect"),
        (["--grpc-workers", "2"], "--grpc-workers and --grpc-threads have no effect"),
        (["--tracing"], "--tracing and JAEGER_* have no effect"),
        (["--persistence"], "Persistence: ignored, persistence is deprecated"),
    ],
    ids=["threads", "grpc threads", "grpc workers", "tracing", "persistence"],
)
def test_an_argument_without_effect_is_reported(words: list[str], begins: str) -> None:
    (note,) = command_of(*words).notes

    assert note.startswith(begins)


def test_arguments_equal_to_the_defaults_are_not_reported() -> None:
    assert command_of("--service-type", "MODEL", "--single-threaded", "1", "--threads", "3").notes == []


def test_run_serves_the_component_in_the_current_folder_and_writes_the_pidfile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [*os.environ]:
        if name.startswith(("PENSTOCK_", "PREDICTIVE_", "GUNICORN_", "GRPC_", "SELDON_")):
            monkeypatch.delenv(name)
    pidfile = tmp_path / "pid"
    served: list[tuple[Settings, str]] = []

    def serve(settings: Settings) -> int:
        served.append((settings, pidfile.read_text()))
        return 7

    assert run(["Ident", "--pidfile", str(pidfile)], serve) == 7
    assert served == [(expected_settings(model_repository=(str(tmp_path),)), f"{os.getpid()}\n")]
    assert not pidfile.exists()


def test_run_reports_an_invalid_environment_variable_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GUNICORN_WORKERS", "many")

    assert run(["Ident"], lambda _: 0) == 1
    assert capsys.readouterr().err == f"{NAME}: GUNICORN_WORKERS must be a whole number, not 'many'\n"


def test_penstock_seldon_core_microservice_runs_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []

    def serve(settings: Settings) -> int:
        served.append(settings.seldon_component)
        return 0

    monkeypatch.setattr(cli, "_serve", serve)

    assert cli.main([NAME, "Ident", "--service-type", "MODEL"]) == 0
    assert served == ["Ident"]


def test_a_link_named_seldon_core_microservice_runs_the_command(tmp_path: Path) -> None:
    link = tmp_path / NAME
    link.symlink_to(Path(sys.executable).with_name("penstock"))

    ended = subprocess.run([link, "Ident", "REST"], capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout) == (255, "")
    assert ended.stderr.startswith(f"{NAME}: Unknown args ['REST']")


# -- the documentation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", THEIRS)
def test_the_seldon_page_documents_every_argument(flag: str) -> None:
    assert f"`{flag}`" in (DOCS / "seldon.md").read_text("utf-8")


VARIABLES_TOLD = (
    "MODEL_METADATA", "PAYLOAD_PASSTHROUGH", "INCLUDE_METRICS_IN_CLIENT_RESPONSE", "PREDICTIVE_UNIT_METRICS_ENDPOINT",
    "FILTER_METRICS_ACCESS_LOGS", "SELDON_EXECUTOR_ENABLED", "SELDON_LOG_LEVEL", "MODEL_NAME", "JAEGER_", "FLASK_",
)  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES_TOLD)
def test_the_seldon_page_documents_every_environment_variable(name: str) -> None:
    assert f"`{name}" in (DOCS / "seldon.md").read_text("utf-8")


@pytest.mark.parametrize("number", range(1, 31))
def test_the_compatibility_page_has_a_row_for_every_seldon_core_feature(number: int) -> None:
    assert f"| F{number} |" in (DOCS / "compatibility-seldon.md").read_text("utf-8")
