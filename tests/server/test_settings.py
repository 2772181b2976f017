from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.spec import DEFAULT_MAX_BATCH_ROWS
from penstock.server.cli import with_boolean_values
from penstock.server.http.limits import Limits
from penstock.server.options.setting import Setting, shown
from penstock.server.settings import SettingError, Settings, known_settings, page, resolve


def write(folder: Path, text: str) -> str:
    path = folder / "penstock.toml"
    path.write_text(text)
    return str(path)


def test_the_default_settings_are_as_documented() -> None:
    settings = resolve({}, {})

    assert settings == Settings()
    assert (settings.http_address, settings.http_port, settings.metrics_port) == ("127.0.0.1", 8000, 8002)
    assert settings.exit_on_error is False


def test_flags_override_the_environment_which_overrides_the_file_and_the_defaults(tmp_path: Path) -> None:
    config = write(tmp_path, "http_port = 1\nmetrics_port = 1\nlog_verbose = 1\n")
    environ = {"PENSTOCK_HTTP_PORT": "2", "PENSTOCK_METRICS_PORT": "2", "PENSTOCK_CONFIG": config, "PATH": "/bin"}

    settings = resolve({"http_port": "3"}, environ)

    found = (settings.http_port, settings.metrics_port, settings.log_verbose, settings.exit_timeout_secs)
    assert found == (3, 2, 1, 30.0)


def test_the_config_flag_overrides_the_config_environment_variable(tmp_path: Path) -> None:
    config = write(tmp_path, "id = 'chosen'")

    assert resolve({"config": config}, {"PENSTOCK_CONFIG": "/nowhere"}).id == "chosen"


def test_paths_in_the_config_file_are_relative_to_the_file(tmp_path: Path) -> None:
    config = write(tmp_path, "model_repository = ['models', '/absolute']")

    assert resolve({"config": config}, {}).model_repository == (str(tmp_path / "models"), "/absolute")


def test_a_single_path_in_the_config_file_needs_no_list(tmp_path: Path) -> None:
    assert resolve({"config": write(tmp_path, "model_repository = '/m'")}, {}).model_repository == ("/m",)


def test_paths_in_the_environment_are_separated_by_colons() -> None:
    assert resolve({}, {"PENSTOCK_MODEL_REPOSITORY": "a:b"}).model_repository == ("a", "b")


def test_a_url_is_not_treated_as_a_relative_path_or_split_at_colons(tmp_path: Path) -> None:
    config = write(tmp_path, "model_repository = ['models', 's3://bucket/models']")
    both = resolve({}, {"PENSTOCK_MODEL_REPOSITORY": "/models\ns3://https://host:9000/bucket"})

    assert resolve({"config": config}, {}).model_repository == (str(tmp_path / "models"), "s3://bucket/models")
    assert both.model_repository == ("/models", "s3://https://host:9000/bucket")


def test_variables_that_kubernetes_injects_for_a_penstock_service_are_ignored() -> None:
    environ = {
        "PENSTOCK_SERVICE_HOST": "10.0.0.1",
        "PENSTOCK_SERVICE_PORT": "8000",
        "PENSTOCK_SERVICE_PORT_HTTP": "8000",
        "PENSTOCK_PORT": "tcp://10.0.0.1:8000",
        "PENSTOCK_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "PENSTOCK_PORT_8000_TCP_PROTO": "tcp",
        "PENSTOCK_PORT_8000_TCP_PORT": "8000",
        "PENSTOCK_PORT_8000_TCP_ADDR": "10.0.0.1",
        "PENSTOCK_HTTP_PORT": "tcp://10.0.0.2:80",
    }

    assert resolve({}, environ) == Settings()


@pytest.mark.parametrize(("word", "meant"), [("ON", True), ("True", True), ("1", True), ("off", False), ("0", False)])
def test_a_boolean_flag_accepts_the_words_of_triton_in_any_case(word: str, meant: bool) -> None:
    assert resolve({"exit_on_error": word}, {}).exit_on_error is meant
    assert with_boolean_values(["--exit-on-error", word]) == ["--exit-on-error", word]


def test_choices_are_accepted_in_any_case() -> None:
    found = resolve({"model_control_mode": "EXPLICIT", "log_format": "iso8601"}, {"PENSTOCK_RATE_LIMIT": "Off"})

    assert (found.model_control_mode, found.log_format, found.rate_limit) == ("explicit", "ISO8601", "off")


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"http_port": "x"}, {}, "--http-port must be a whole number from 0 to 65535, not 'x'"),
        ({"http_port": "65536"}, {}, "--http-port must be a whole number from 0 to 65535, not 65536"),
        ({"http_port": "1.0"}, {}, "--http-port must be a whole number from 0 to 65535, not '1.0'"),
        (
            {"write_memory_bytes": "1"},
            {},
            "--write-memory-bytes must be a whole number from 65536 to 1125899906842624, not 1",
        ),
        (
            {"http_port": "1" + "0" * 400},
            {},
            f"--http-port must be a whole number from 0 to 65535, not 1{'0' * 400}",
        ),
        ({"exit_timeout_secs": "nan"}, {}, "--exit-timeout-secs must be a number from 0 to 86400, not nan"),
        ({"exit_on_error": "yes"}, {}, "--exit-on-error must be true or false, not 'yes'"),
        ({"log_format": "xml"}, {}, "--log-format must be one of auto, text, json, default, ISO8601, not 'xml'"),
        ({}, {"PENSTOCK_HTTP_PORT": ""}, "PENSTOCK_HTTP_PORT must be a whole number from 0 to 65535, not ''"),
        ({}, {"PENSTOCK_HTP_PORT": "1"}, "PENSTOCK_HTP_PORT: no such setting; did you mean 'PENSTOCK_HTTP_PORT'?"),
        ({}, {"PENSTOCK_http_port": "1"}, "PENSTOCK_http_port: no such setting; did you mean 'PENSTOCK_HTTP_PORT'?"),
        ({"config": "/no/such.toml"}, {}, "/no/such.toml: No such file or directory"),
    ],
)
def test_an_invalid_value_is_an_error_naming_the_setting_and_the_allowed_values(
    flags: dict[str, str], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve(flags, environ)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http-port = 1", "no such setting 'http-port'; did you mean 'http_port'?"),
        ("http_port = '8000'", "http_port must be a whole number from 0 to 65535, not '8000'"),
        ("http_port = true", "http_port must be a whole number from 0 to 65535, not True"),
        ("exit_on_error = 1", "exit_on_error must be true or false, not 1"),
        ("model_repository = [1]", "model_repository must be a list of strings, not (1,)"),
        ("exit_timeout_secs = inf", "exit_timeout_secs must be a number from 0 to 86400, not inf"),
        (
            "exit_timeout_secs = 1" + "0" * 400,
            f"exit_timeout_secs must be a number from 0 to 86400, not 1{'0' * 400}",
        ),
        (
            f"http_port = 0x{'f' * 5000}",
            "http_port must be a whole number from 0 to 65535, not a number of thousands of digits",
        ),
        (f"id = [0x{'f' * 5000}]", "id must be a string, not a number of thousands of digits"),
        ("= 1", "Invalid statement (at line 1, column 1)"),
    ],
)
def test_an_error_in_the_config_file_names_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    config = write(tmp_path, text)

    with pytest.raises(SettingError) as caught:
        resolve({"config": config}, {})

    assert str(caught.value) == f"{config}: {message}"


def test_a_config_file_nested_too_deeply_is_a_setting_error(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="recursion"):
        resolve({"config": write(tmp_path, f"id = {'[' * 5000}")}, {})


def test_a_whole_number_in_the_config_file_is_accepted_for_seconds(tmp_path: Path) -> None:
    assert resolve({"config": write(tmp_path, "exit_timeout_secs = 5")}, {}).exit_timeout_secs == 5.0


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("1", True), ("On", True), ("False", False), ("0", False), ("off", False)],
)
def test_a_boolean_setting_is_parsed_as_in_triton(word: str, value: bool) -> None:
    assert resolve({"strict_readiness": word}, {}).strict_readiness is value


@pytest.mark.parametrize(("word", "level"), [("True", 1), ("false", 0), ("2", 2)])
def test_the_log_verbosity_may_be_a_boolean_as_in_triton(word: str, level: int) -> None:
    assert resolve({"log_verbose": word}, {}).log_verbose == level


@pytest.mark.parametrize(
    ("name", "word", "value"),
    [
        ("model_control_mode", "EXPLICIT", "explicit"), ("rate_limit", "Execution_Count", "execution_count"),
        ("grpc_infer_response_compression_level", "HIGH", "high"), ("log_format", "iso8601", "ISO8601"),
    ],
)  # fmt: skip
def test_a_choice_in_any_case_is_stored_in_its_canonical_form(name: str, word: str, value: str) -> None:
    assert getattr(resolve({name: word}, {}), name) == value
    assert getattr(resolve({}, {f"PENSTOCK_{name.upper()}": word}), name) == value


@given(st.sampled_from(list(known_settings())), st.text(max_size=20) | st.floats().map(str) | st.integers().map(str))
def test_any_text_is_a_value_within_bounds_or_a_setting_error(item: Setting, text: str) -> None:
    try:
        value = getattr(resolve({item.name: text}, {}), item.name)
    except SettingError:
        return

    assert type(value) is type(item.default)
    assert item.bounds is None or item.bounds[0] <= value <= item.bounds[1]


def test_every_setting_has_a_flag_an_environment_variable_and_a_description() -> None:
    for item in known_settings():
        assert item.flag == "--" + item.name.replace("_", "-")
        assert item.environment == "PENSTOCK_" + item.name.upper()
        assert item.text.endswith(".")
        assert item.unit or not isinstance(item.default, int | float) or isinstance(item.default, bool)


def test_a_list_is_shown_separated_by_commas() -> None:
    assert shown(("authorization", "cookie")) == "authorization, cookie"
    assert shown(()) == ""


def test_every_http_limit_is_a_setting_with_the_same_default() -> None:
    assert Settings().limits() == Limits()
    others = {"http_port", "http_address", "http_header_forward_pattern", "http_restricted_api", "http_workers"}
    assert len(fields(Limits)) == sum(
        item.name.startswith("http_") and item.name not in others for item in known_settings()
    )


def test_the_default_batch_size_equals_the_default_of_the_batch_policy() -> None:
    assert Settings().default_max_batch_size == DEFAULT_MAX_BATCH_ROWS


def test_the_settings_page_in_the_docs_is_up_to_date() -> None:
    stored = Path(__file__).parents[2] / "docs" / "settings.md"

    assert stored.read_text("utf-8") == page(), "run: python -m penstock.server.settings > docs/settings.md"
