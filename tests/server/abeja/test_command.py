"""The command line of `penstock abeja`: its flags, environment variables, and their precedence."""

from __future__ import annotations

import pytest

from penstock.server.abeja.command import parse_settings, run
from penstock.server.settings import SettingError, Settings


def test_the_default_settings_are_those_of_the_original_container() -> None:
    settings = parse_settings([], {})

    assert (settings.dialect, settings.model_repository, settings.abeja_handler) == ("abeja", (), "")
    assert (settings.http_address, settings.http_port, settings.abeja_health_port) == ("0.0.0.0", 5000, 5001)
    assert (settings.allow_grpc, settings.allow_metrics) == (False, False)


def test_command_line_flags_become_settings() -> None:
    settings = parse_settings(
        ["--handler", "a.b:c", "--port=6000", "--health-port", "6001", "folder", "--abeja-workers", "2"], {}
    )

    assert (settings.abeja_handler, settings.model_repository) == ("a.b:c", ("folder",))
    assert (settings.http_port, settings.abeja_health_port, settings.abeja_workers) == (6000, 6001, 2)


def test_variables_of_the_original_have_the_lowest_precedence() -> None:
    theirs = {"PORT": "6000", "HEALTHCHECK_PORT": "6001"}
    ours = {"PENSTOCK_HTTP_PORT": "7000"}

    assert [parse_settings([], theirs).http_port, parse_settings([], theirs).abeja_health_port] == [6000, 6001]
    assert parse_settings([], {**theirs, **ours}).http_port == 7000
    assert parse_settings(["--port", "8000"], {**theirs, **ours}).http_port == 8000


def test_a_configured_grpc_or_metrics_port_is_opened() -> None:
    settings = parse_settings(["--grpc-port=0", "--metrics-port=0"], {})

    assert (settings.allow_grpc, settings.allow_metrics) == (True, True)


@pytest.mark.parametrize(
    "words",
    [["--handler="], ["--handler=main"], ["--handler=a:b:c"], ["--port=5001"], ["--port=many"]],
    ids=["no handler", "no colon", "two colons", "one port for both", "no number"],
)
def test_invalid_flags_exit_with_status_1_and_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    def serve(settings: Settings) -> int:
        raise AssertionError("it is not served")

    assert run(words, serve) == 1
    assert capsys.readouterr().err.startswith("penstock abeja: ")


def test_both_ports_can_be_any_free_port() -> None:
    assert parse_settings(["--port=0", "--health-port=0"], {}).http_port == 0
    with pytest.raises(SettingError):
        parse_settings([], {"PORT": "5001"})


def test_an_unknown_argument_exits_with_status_2() -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--no-such-flag"], {})

    assert ended.value.code == 2


def test_run_serves_with_the_parsed_settings() -> None:
    served: list[Settings] = []

    def serve(settings: Settings) -> int:
        served.append(settings)
        return 7

    assert run(["--handler=m:h", "--port=0", "--health-port=0"], serve) == 7
    assert served[0].abeja_handler == "m:h"
