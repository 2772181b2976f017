from __future__ import annotations

from pathlib import Path

import pytest

from penstock.server import cli
from penstock.server.options.triton_flags import (
    DEPRECATED_FLAGS,
    IGNORED_FLAGS,
    OLD_NAMES,
    UNSUPPORTED_BOOLEANS,
    UNSUPPORTED_FLAGS,
    rename_flag,
    translate_flags,
    unsupported_reason,
)
from penstock.server.settings import known_settings

TRITON = """
log-verbose log-info log-warning log-error log-format log-file id exit-timeout-secs exit-on-error strict-readiness
disable-auto-complete-config strict-model-config model-store model-repository model-control-mode repository-poll-secs
load-model model-load-thread-count model-load-retry-count model-load-gpu-limit model-namespacing model-config-name
enable-peer-access allow-http http-address http-port reuse-http-port http-header-forward-pattern http-thread-count
http-restricted-api http-max-input-size allow-grpc grpc-address grpc-port reuse-grpc-port grpc-header-forward-pattern
grpc-infer-thread-count grpc-infer-allocation-pool-size grpc-max-response-pool-size grpc-use-ssl grpc-use-ssl-mutual
grpc-server-cert grpc-server-key grpc-root-cert grpc-infer-response-compression-level grpc-keepalive-time
grpc-keepalive-timeout grpc-keepalive-permit-without-calls grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-http2-max-ping-strikes grpc-max-connection-age
grpc-max-connection-age-grace grpc-restricted-protocol allow-sagemaker sagemaker-port sagemaker-safe-port-range
sagemaker-thread-count allow-vertex-ai vertex-ai-port vertex-ai-thread-count vertex-ai-default-model allow-metrics
allow-gpu-metrics allow-cpu-metrics metrics-address metrics-port metrics-interval-ms metrics-config trace-config
trace-file trace-level trace-rate trace-count trace-log-frequency backend-directory backend-config repoagent-directory
cache-config cache-directory response-cache-byte-size rate-limit rate-limit-resource pinned-memory-pool-byte-size
cuda-memory-pool-byte-size cuda-virtual-address-size min-supported-compute-capability buffer-manager-thread-count
host-policy allow-client-shm
"""
"""All flags of tritonserver. Source: command_line_parser.cc."""


@pytest.mark.parametrize("name", TRITON.split())
def test_every_triton_flag_is_a_setting_or_has_a_documented_reason(name: str) -> None:
    known = {item.flag for item in known_settings()}

    assert rename_flag(f"--{name}") in known | UNSUPPORTED_FLAGS.keys() | IGNORED_FLAGS.keys() | DEPRECATED_FLAGS.keys()


@pytest.mark.parametrize("flag", UNSUPPORTED_FLAGS)
def test_an_unsupported_triton_flag_is_rejected_with_the_reason(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "a", f"{flag}=1"])

    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"penstock: {flag} is a Triton flag that Penstock does not support: {UNSUPPORTED_FLAGS[flag]}\n"
    )


@pytest.mark.parametrize("flag", IGNORED_FLAGS)
@pytest.mark.parametrize("words", [["{}=true"], ["{}", "true"]], ids=["one word", "two words"])
def test_a_triton_flag_without_effect_is_reported_and_removed_with_its_value(flag: str, words: list[str]) -> None:
    command = ["serve", *(word.format(flag) for word in words), "models", "--http-port=1"]

    assert translate_flags(command) == (
        ["serve", "models", "--http-port=1"],
        [f"{flag} has no effect: {IGNORED_FLAGS[flag]}"],
    )


@pytest.mark.parametrize("flag", [*IGNORED_FLAGS, *UNSUPPORTED_BOOLEANS])
def test_removing_a_triton_flag_without_a_value_keeps_the_next_flag(flag: str) -> None:
    translated, _ = translate_flags(["serve", flag, "--http-port=1"])

    assert translated[-1] == "--http-port=1"


def test_removing_a_boolean_triton_flag_keeps_the_path_after_it() -> None:
    assert translate_flags(["serve", "--enable-peer-access", "models"])[0] == ["serve", "models"]


def test_a_triton_command_line_is_accepted_with_warnings_about_flags_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--http-thread-count", "8", "--pinned-memory-pool-byte-size=0", "--backend-config=python,shm-x=1"]

    assert cli.main(["check", *words, f"--model-store={tmp_path}"]) == 0
    assert [line.partition(" has no effect: ")[0] for line in capsys.readouterr().err.splitlines()] == [
        "penstock: warning: --http-thread-count",
        "penstock: warning: --pinned-memory-pool-byte-size",
        "penstock: warning: --backend-config python,shm-x",
    ]


@pytest.mark.parametrize("flag", DEPRECATED_FLAGS)
@pytest.mark.parametrize("words", [["{}=7"], ["{}", "7"]], ids=["one word", "two words"])
def test_a_deprecated_triton_flag_is_replaced_by_the_newer_flag_with_a_warning(flag: str, words: list[str]) -> None:
    newer = DEPRECATED_FLAGS[flag].format(7)
    command = ["serve", *(word.format(flag) for word in words), "models"]

    assert translate_flags(command) == (
        ["serve", "models", newer], [f"{flag} is deprecated in Triton and treated as {newer}: use that instead"],
    )  # fmt: skip


def test_deprecated_triton_flags_configure_tracing_and_the_response_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traced = [f"--trace-file={tmp_path}/trace.json", "--trace-level=MAX", "--trace-rate", "100", "--trace-count=5"]

    assert cli.main(["check", *traced, "--response-cache-byte-size=1024", str(tmp_path)]) == 0
    assert cli.main(["check", "--trace-rate=often", str(tmp_path)]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("penstock: --trace-config: rate must be a whole number, not 'often'")
    )


def test_trace_config_overrides_deprecated_trace_flags_except_level_off() -> None:
    # source: Triton server, command_line_parser.cc: SetGlobalTraceArgs, explicit_disable_trace
    words = "serve m --trace-config=rate=200 --trace-rate=100 --trace-level=MAX --trace-level OFF --http-port=1"

    assert " ".join(translate_flags(words.split())[0]) == (
        "serve m --trace-config=rate=100 --trace-config=level=OFF --trace-config=rate=200 --http-port=1"
    )


@pytest.mark.parametrize("flag", DEPRECATED_FLAGS)
@pytest.mark.parametrize("behind", [[], ["--http-port=1"]])
def test_a_deprecated_triton_flag_without_a_value_is_an_error_that_names_the_newer_flag(
    flag: str, behind: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "models", flag, *behind])

    assert ended.value.code == 2
    assert (
        capsys.readouterr().err == f"penstock: {flag} needs a value, as in {DEPRECATED_FLAGS[flag].format('VALUE')}\n"
    )


def test_a_response_cache_of_zero_bytes_is_no_cache() -> None:
    assert translate_flags(["serve", "--response-cache-byte-size=0", "models"]) == (["serve", "models"], [])


@pytest.mark.parametrize("flag", UNSUPPORTED_BOOLEANS)
def test_an_unsupported_switch_may_be_turned_off_but_not_on(flag: str) -> None:
    for words in ([f"{flag}=False"], [f"{flag}=off"], [flag, "0"], [flag, "false"]):
        assert translate_flags(["serve", *words, "models"]) == (["serve", "models"], [])
    for words in ([f"{flag}=true"], [flag, "true"], [flag]):
        assert translate_flags(["serve", *words]) == (["serve", *words], [])


@pytest.mark.parametrize("older", OLD_NAMES)
def test_an_older_name_of_a_triton_flag_is_the_same_as_the_newer_name(
    older: str, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = OLD_NAMES[older]

    assert rename_flag(older) == newer
    assert rename_flag(f"{older}=a=b") == f"{newer}=a=b"
    assert cli.main(["check", "--strict-model-config", "true", "--model-store=/there/is/none"]) == 1
    assert "/there/is/none" in capsys.readouterr().out


def test_no_flag_is_both_a_setting_and_an_unsupported_triton_flag() -> None:
    known = {item.flag for item in known_settings()}

    assert (
        known & (UNSUPPORTED_FLAGS.keys() | IGNORED_FLAGS.keys())
        == UNSUPPORTED_FLAGS.keys() & IGNORED_FLAGS.keys()
        == set()
    )


def test_every_flag_named_in_a_reason_exists() -> None:
    known = {item.flag for item in known_settings()}
    named = {
        word.strip(",:;.") for text in UNSUPPORTED_FLAGS.values() for word in text.split() if word.startswith("--")
    }

    assert named <= known


def test_a_misspelled_flag_is_not_treated_as_a_triton_flag() -> None:
    assert unsupported_reason("--http-prt=3") is None
