"""`penstock sagemaker`: the variables it shares with Triton's `serve`, and the settings it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest

from penstock.server import cli
from penstock.server.clouds.command import parse_settings
from penstock.server.gpus.nvml import Nvml
from penstock.server.settings import SettingError

MULTI = {"SAGEMAKER_MULTI_MODEL": "true"}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path


def test_one_model_is_served_only_on_the_sagemaker_port(models: Path) -> None:
    settings = parse_settings(["serve"], {}, models)

    assert settings.allow_sagemaker
    assert not any((settings.allow_http, settings.allow_grpc, settings.allow_metrics, settings.allow_vertex_ai))
    assert settings.model_repository == (str(models),)
    assert (settings.model_control_mode, settings.load_model) == ("explicit", ("m",))
    assert (settings.sagemaker_default_model, settings.sagemaker_port) == ("m", 8080)


def test_a_multi_model_server_starts_without_models(models: Path) -> None:
    settings = parse_settings([], MULTI, models / "not there")

    assert settings.allow_sagemaker
    assert (settings.model_control_mode, settings.load_model, settings.model_repository) == ("explicit", (), ())


def test_sagemaker_variables_set_ports_threads_and_log_levels() -> None:
    environ = {
        **MULTI, "SAGEMAKER_BIND_TO_PORT": "8010", "SAGEMAKER_SAFE_PORT_RANGE": "23000-23999",
        "SAGEMAKER_TRITON_THREAD_COUNT": "4", "SAGEMAKER_TRITON_LOG_INFO": "false",
        "SAGEMAKER_TRITON_LOG_VERBOSE": "true", "SAGEMAKER_TRITON_ALLOW_METRICS": "true",
        "SAGEMAKER_TRITON_METRICS_PORT": "23000", "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--id 'my server'",
    }  # fmt: skip
    settings = parse_settings([], environ)

    assert (settings.sagemaker_port, settings.sagemaker_safe_port_range) == (8010, "23000-23999")
    assert (settings.sagemaker_thread_count, settings.log_info, settings.log_verbose) == (4, False, 1)
    assert (settings.allow_metrics, settings.metrics_port, settings.allow_grpc) == (True, 23000, False)
    assert settings.id == "my server"


def test_the_ping_of_a_multi_model_server_checks_liveness(models: Path) -> None:
    assert parse_settings([], {}, models).sagemaker_ping_mode == "ready"
    assert parse_settings([], MULTI).sagemaker_ping_mode == "live"
    assert parse_settings([], {**MULTI, "SAGEMAKER_TRITON_OVERRIDE_PING_MODE": "ready"}).sagemaker_ping_mode == "ready"


def test_the_gpu_memory_limit_applies_to_every_gpu() -> None:
    environ = {**MULTI, "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT": "0.8"}

    assert parse_settings([], environ, gpus=lambda: 2).model_load_gpu_limit == ("0:0.8", "1:0.8")
    assert parse_settings([], environ, gpus=lambda: 0).model_load_gpu_limit == ()


def test_a_gpu_memory_limit_is_ignored_with_a_warning_without_nvml(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Nvml) -> NoReturn:
        raise OSError("NVML Shared Library Not Found")

    monkeypatch.setattr(Nvml, "read", fail)

    assert parse_settings([], {**MULTI, "SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT": "0.8"}).model_load_gpu_limit == ()
    assert "warning: SAGEMAKER_TRITON_MODEL_LOAD_GPU_LIMIT has no effect: " in capsys.readouterr().err


def test_settings_come_from_flags_then_penstock_variables_then_sagemaker_variables() -> None:
    environ = {**MULTI, "SAGEMAKER_BIND_TO_PORT": "8010", "PENSTOCK_SAGEMAKER_PORT": "8020"}

    assert parse_settings([], environ).sagemaker_port == 8020
    assert parse_settings(["serve", "--sagemaker-port=8030", "--allow-metrics"], environ).sagemaker_port == 8030


@pytest.mark.parametrize(
    ("folders", "named", "message"),
    [
        ((), "", "there is no model in"), (("a", "b"), "", "must name one of the models in .*: a, b"),
        (("a",), "b", "there is no folder .*/b"),
    ],
)  # fmt: skip
def test_a_missing_or_ambiguous_model_is_rejected(
    tmp_path: Path, folders: tuple[str, ...], named: str, message: str
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    with pytest.raises(SettingError, match=message):
        parse_settings([], {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": named}, tmp_path)


def test_an_archive_without_the_models_folder_at_its_top_is_rejected(models: Path) -> None:
    (models / "config.pbtxt").touch()
    with pytest.raises(SettingError, match="must have the model's folder at its top"):
        parse_settings([], {}, models)


def test_the_default_model_variable_selects_one_of_several_models(models: Path) -> None:
    (models / "other").mkdir()

    assert parse_settings([], {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "other"}, models).load_model == ("other",)


@pytest.mark.parametrize(
    ("more", "loaded"),
    [
        ("--load-model=a --load-model=b", ("m", "a", "b")),
        ("--load-model=m", ("m",)),
        ("--load-model=*", ("*",)),
    ],
)
def test_models_named_by_flags_are_loaded_besides_the_default_model(
    models: Path, more: str, loaded: tuple[str, ...]
) -> None:
    settings = parse_settings([], {"SAGEMAKER_TRITON_ADDITIONAL_ARGS": more}, models)

    assert tuple(dict.fromkeys(settings.load_model)) == loaded
    assert settings.sagemaker_default_model == "m"


def test_a_repository_named_by_a_flag_is_served_besides_sagemakers(models: Path) -> None:
    settings = parse_settings(["--model-repository=/more"], {}, models)

    assert settings.model_repository == (str(models), "/more")


def test_flags_after_the_value_of_a_variable_are_read(models: Path) -> None:
    """As in deployments of Stable Diffusion from before there was a variable for flags."""
    environ = {"SAGEMAKER_TRITON_LOG_INFO": "false --load-model=text_encoder --load-model=vae"}
    settings = parse_settings([], {**environ, "SAGEMAKER_TRITON_LOG_VERBOSE": "true --id=x"}, models)

    assert (settings.log_info, settings.log_verbose, settings.id) == (False, 1, "x")
    assert settings.load_model == ("m", "text_encoder", "vae")


def test_an_unclosed_quote_in_additional_args_is_rejected() -> None:
    with pytest.raises(SettingError, match="SAGEMAKER_TRITON_ADDITIONAL_ARGS: No closing quotation"):
        parse_settings([], {**MULTI, "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--id 'x"})


def test_triton_flags_without_effect_print_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    more = "--http-thread-count 8 --backend-config=python,shm-default-byte-size=1 --reuse-http-port=false"
    parse_settings([], {**MULTI, "SAGEMAKER_TRITON_ADDITIONAL_ARGS": more})

    assert [line.partition(" has no effect: ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "penstock sagemaker: warning: --http-thread-count",
        "penstock sagemaker: warning: --backend-config python,shm-default-byte-size",
    ]
    with pytest.raises(SettingError, match="--model-namespacing is a Triton flag that Penstock does not support"):
        parse_settings([], {**MULTI, "SAGEMAKER_TRITON_ADDITIONAL_ARGS": "--model-namespacing=1"})


def test_a_path_argument_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sagemaker", "serve", "/models"]) == 2
    assert capsys.readouterr().err.startswith("penstock sagemaker: unknown argument /models")
