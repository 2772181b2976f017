"""Settings from the environment variables of the clouds, and those with which a server does not start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.server.options.cloud_settings import parse_range
from penstock.server.options.start_checks import start_problems
from penstock.server.settings import SettingError, Settings, resolve

VERTEX = {
    "AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "5234", "AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict",
    "AIP_STORAGE_URI": "gs://bucket/models",
}  # fmt: skip


def test_both_cloud_ports_are_off_by_default() -> None:
    settings = resolve({}, {})

    assert not any((settings.allow_sagemaker, settings.allow_vertex_ai))
    assert settings.sagemaker_port == settings.vertex_ai_port == 8080


def test_vertex_ai_variables_turn_its_port_on_and_http_and_grpc_off() -> None:
    settings = resolve({}, VERTEX)

    assert (settings.allow_vertex_ai, settings.allow_http, settings.allow_grpc) == (True, False, False)
    assert settings.allow_metrics
    assert settings.vertex_ai_port == 5234
    assert (settings.vertex_ai_health_route, settings.vertex_ai_predict_route) == ("/health", "/predict")
    assert settings.model_repository == ("gs://bucket/models",)


def test_explicit_settings_take_precedence_over_vertex_ai_variables(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("allow_grpc = true")
    flags = {"allow_http": "true", "config": str(file), "model_repository": ["m"], "vertex_ai_port": "1"}
    settings = resolve(flags, {**VERTEX, "PENSTOCK_ALLOW_VERTEX_AI": "false", "PENSTOCK_VERTEX_AI_HEALTH_ROUTE": "/h"})

    assert (settings.allow_vertex_ai, settings.allow_http, settings.allow_grpc) == (False, True, True)
    assert (settings.vertex_ai_port, settings.vertex_ai_health_route) == (1, "/h")
    assert settings.model_repository == ("m",)


def test_vertex_ai_variables_are_ignored_in_another_mode_or_dialect() -> None:
    assert not resolve({}, {"AIP_MODE": "TRAINING"}).allow_vertex_ai
    assert resolve({"dialect": "abeja"}, VERTEX) == resolve({"dialect": "abeja"}, {})


def test_sagemaker_variables_set_the_default_model_and_modes() -> None:
    environ = {
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", "SAGEMAKER_TRITON_PING_MODE": "live",
        "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate",
    }  # fmt: skip
    settings = resolve({"allow_sagemaker": "true"}, environ)

    assert settings.sagemaker_default_model == "m"
    assert (settings.sagemaker_ping_mode, settings.sagemaker_inference_type) == ("live", "generate")


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("SAGEMAKER_TRITON_INFERENCE_TYPE", "stream", "one of infer, generate, generate_stream"),
        ("SAGEMAKER_TRITON_PING_MODE", "dead", "one of ready, live"), ("AIP_HTTP_PORT", "x", "a whole number"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_cloud_variable_is_reported_with_its_name(variable: str, text: str, expected: str) -> None:
    with pytest.raises(SettingError, match=f"{variable} must be {expected}.*, not '{text}'"):
        resolve({}, {variable: text})


@pytest.mark.parametrize("cloud", ["sagemaker", "vertex_ai"])
@pytest.mark.parametrize("options", [{"http_workers": 2}, {"dialect": "abeja"}])
def test_cloud_ports_are_rejected_with_front_ends_and_other_dialects(cloud: str, options: dict[str, Any]) -> None:
    flag = f"--allow-{cloud.replace('_', '-')}"
    allowed: dict[str, Any] = {f"allow_{cloud}": True}
    with pytest.raises(SettingError, match=flag):
        Settings(**allowed, **options)


@pytest.mark.parametrize("text", ["8081", "a-b", "8081-", "-1-3", "1-2-3"])
def test_a_port_range_without_a_first_and_a_last_port_is_rejected(text: str) -> None:
    assert parse_range("8081-9000") == (8081, 9000)
    assert parse_range("") is None
    with pytest.raises(
        SettingError,
        match=re.escape(
            f"--sagemaker-safe-port-range: must be the first and the last port, such as 8081-9000, not '{text}'"
        ),
    ):
        Settings(sagemaker_safe_port_range=text)


def test_other_ports_must_be_in_sagemakers_safe_port_range() -> None:
    message = "The server cannot listen to {} requests at port {}, allowed port range is [8081, 9000]"
    settings = Settings(allow_sagemaker=True, sagemaker_safe_port_range="8081-9000", metrics_port=8082)

    assert start_problems(settings) == [message.format("HTTP", 8000), message.format("GRPC", 8001)]
    assert start_problems(Settings(sagemaker_safe_port_range="8081-9000")) == []


def test_cloud_ports_must_differ_from_all_other_ports() -> None:
    both = Settings(
        allow_sagemaker=True, allow_vertex_ai=True, vertex_ai_health_route="/h", vertex_ai_predict_route="/p"
    )

    assert start_problems(both) == ["SageMaker and Vertex AI cannot both be served on port 8080"]
    assert start_problems(Settings(allow_sagemaker=True, sagemaker_port=8000)) == [
        "HTTP and SageMaker cannot both be served on port 8000"
    ]
