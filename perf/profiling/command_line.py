"""The command line: the meaning of its flags, and which exclude each other.

Source: perf_analyzer's command_line_parser.cc, for the rules and most of the wording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.perf.generator.orders import Tls

from .flag_values import UNBOUNDED, FlagValues, declared, ids, parameter, range_of, shape, shown
from .flags import UsageError, split
from .options import Input, Options, Range, Rule, hidden

_SOURCES = ("zero", "random")


def options(arguments: Sequence[str], warn: Callable[[str], None] = lambda line: None) -> Options:
    """Parse a command line. `warn` receives lines about arguments without effect. Raises: UsageError."""
    pairs, extra_words = split(arguments)
    flags = FlagValues(pairs)
    for word in extra_words:
        warn(f"WARNING: '{word}' belongs to no flag and is ignored")
    _reject_unsupported(flags)
    run_options = Options(
        **_model_options(flags),
        **_target_options(flags),
        **_load_options(flags),
        **_result_options(flags),
        rule=_make_rule(flags),
        input=_make_input(flags),
        command=("penstock", "perf", *arguments),
    )
    _check_exclusive_flags(flags, run_options)
    return replace(run_options, command=_redacted_command(run_options))


def _redacted_command(run_options: Options) -> tuple[str, ...]:
    """Return the command's words without secrets in headers."""
    secret = [header for header in run_options.headers if hidden(header) != header]
    redacted = []
    for word in run_options.command:
        name, _, value = word.partition(":")
        is_one = any(name.endswith(header[0]) and value.strip() == header[1] for header in secret)
        redacted.append(f"{name}:..." if is_one else word)
    return tuple(redacted)


def _reject_unsupported(flags: FlagValues) -> None:
    kind = flags.one_of("service-kind", ("triton", "openai", "triton_c_api", "tfserving", "torchserve"), "triton")
    if kind != "triton":
        raise UsageError(
            f"--service-kind {kind} is not supported: penstock perf drives servers of the v2 protocol (triton)"
        )
    if "periodic-concurrency-range" in flags or "request-period" in flags:
        raise UsageError(
            "--periodic-concurrency-range and --request-period are not supported: they are for models that answer in"
            " many responses, as those of tokens do"
        )


def _model_options(flags: FlagValues) -> dict[str, Any]:
    model = flags.text("m")
    if not model:
        raise UsageError("Failed to parse -m (model name). The value must be specified.")
    bls_names = "".join(flags.text("bls-composing-models").split())
    composing = tuple(
        (name, version) for name, _, version in (each.partition(":") for each in bls_names.split(",")) if name
    )
    return {
        "model": model,
        "version": flags.text("x"),
        "composing": composing,
        "inputs": tuple(declared(each) for each in flags.each("input")),
        "verbose": min(flags.times("v"), 2),
    }


def _target_options(flags: FlagValues) -> dict[str, Any]:
    protocol = flags.text("i", "http").lower()
    if protocol not in {"http", "grpc"}:
        raise UsageError("Failed to parse -i (protocol). The value should be either HTTP or gRPC.")
    headers = []
    for header in flags.each("H"):
        name, colon, value = header.partition(":")
        if not colon or not name:
            raise UsageError(f"Failed to parse -H. The header must be specified as 'Header:Value', got '{header}'")
        headers.append((name, value.strip()))
    grpc = protocol == "grpc"
    trace = {
        "trace_level": tuple(flags.each("trace-level")),
        "trace_rate": (str(flags.number("trace-rate", None)),) if "trace-rate" in flags else (),
        "trace_count": (str(flags.number("trace-count", None, minimum=-1)),) if "trace-count" in flags else (),
        "log_frequency": (str(flags.number("log-frequency", None, minimum=0)),) if "log-frequency" in flags else (),
    }
    flags.one_of("trace-level", ("OFF", "TIMESTAMPS", "TENSORS"), "OFF")
    return {
        "url": flags.text("u"),
        "grpc": grpc,
        "tls": _grpc_tls(flags) if grpc else _https_tls(flags),
        "headers": tuple(headers),
        "streaming": "streaming" in flags,
        "compression": flags.one_of("grpc-compression-algorithm", ("none", "gzip", "deflate"), "none"),
        "trace": tuple((name, values) for name, values in trace.items() if values),
    }


def _grpc_tls(flags: FlagValues) -> Tls | None:
    files = [
        flags.file(f"ssl-grpc-{name}")
        for name in ("root-certifications-file", "certificate-chain-file", "private-key-file")
    ]
    return Tls(roots=files[0], certificate=files[1], key=files[2]) if "ssl-grpc-use-ssl" in flags else None


def _https_tls(flags: FlagValues) -> Tls | None:
    """Return the TLS settings for an https URL; None: the defaults."""
    for key, choices in (("ssl-https-verify-peer", ("0", "1")), ("ssl-https-verify-host", ("0", "1", "2"))):
        if flags.text(key, "1") not in choices:
            raise UsageError(f"Failed to parse {shown(key)}. The value must be either {' or '.join(choices)}.")
    tls = Tls(
        roots=flags.file("ssl-https-ca-certificates-file"),
        certificate=flags.file("ssl-https-client-certificate-file"),
        key=flags.file("ssl-https-private-key-file"),
        verify_peer=flags.text("ssl-https-verify-peer", "1") == "1",
        verify_host=flags.text("ssl-https-verify-host", "2") != "0",
        certificate_type=flags.one_of("ssl-https-client-certificate-type", ("PEM", "DER"), "PEM"),
        key_type=flags.one_of("ssl-https-private-key-type", ("PEM", "DER"), "PEM"),
    )
    return None if tls == Tls() else tls


def _load_options(flags: FlagValues) -> dict[str, Any]:
    rate = range_of(flags, "request-rate-range", float) if "request-rate-range" in flags else None
    intervals = Path(flags.file("request-intervals")) if "request-intervals" in flags else None
    concurrency = None if rate or intervals else _concurrency(flags)
    flags.number("max-threads", None)
    return {
        "concurrency": concurrency,
        "rate": rate,
        "intervals": intervals,
        "poisson": flags.one_of("request-distribution", ("constant", "poisson"), "constant") == "poisson",
        "binary_search": "binary-search" in flags,
        "sequences": flags.number("num-of-sequences", 4),
        "processes": flags.number("processes", 1),
        "connections": flags.number("connections", 0, minimum=0),
    }


def _concurrency(flags: FlagValues) -> Range:
    if "t" in flags or "d" in flags or "c" in flags:
        start = flags.number("t", 1, minimum=0)
        if start < 1:
            raise UsageError("The start of the search range must be > 0")
        return Range(start, flags.number("c", 0, minimum=0) if "d" in flags else 1, 1)
    return range_of(flags, "concurrency-range", int)


def _make_rule(flags: FlagValues) -> Rule:
    percentile = flags.number("percentile", -1, minimum=-1)
    if percentile != -1 and not 1 <= percentile <= 99:
        raise UsageError("Failed to parse --percentile. The value must be -1 for not reporting or in range (0, 100).")
    by_count = flags.one_of("measurement-mode", ("time_windows", "count_windows"), "time_windows") == "count_windows"
    return Rule(
        interval_ms=flags.number("measurement-interval", 5000, name="--measurement-interval (-p)"),
        by_count=by_count,
        requests=flags.number("measurement-request-count", 50),
        percentage=flags.number(
            "stability-percentage", 10.0, minimum=0, number_type=float, name="--stability-percentage (-s)"
        ),
        trials=flags.number("max-trials", 10, name="--max-trials (-r)"),
        percentile=max(percentile, 0),
        total_requests=flags.number("request-count", 0, minimum=0),
        threshold_ms=flags.number("latency-threshold", 0, minimum=0, name="--latency-threshold (-l)"),
        warmup_requests=flags.number("warmup-request-count", 0, minimum=0),
    )


def _make_input(flags: FlagValues) -> Input:
    sources = _sources(flags)
    length = flags.number("sequence-length", None, minimum=0)
    return Input(
        source=sources,
        batch=flags.number("b", 1, name="-b (batch size)"),
        shapes=dict(shape(each) for each in flags.each("shape")),
        string_length=flags.number("string-length", 128),
        string=flags.text("string-data") or None,
        binary_input=flags.one_of("input-tensor-format", ("binary", "json"), "binary") == "binary",
        binary_output=flags.one_of("output-tensor-format", ("binary", "json"), "binary") == "binary",
        shared_memory=flags.one_of("shared-memory", ("system", "cuda", "none"), "none"),
        output_shared_memory_bytes=flags.number("output-shared-memory-size", 102_400, minimum=0),
        parameters=tuple(parameter(each) for each in flags.each("request-parameter")),
        sequence_length=length or (20 if "sequence-length" in flags else None),
        sequence_variation=flags.number("sequence-length-variation", 20.0, minimum=0, number_type=float),
        sequence_ids=ids(flags.text("sequence-id-range")) if "sequence-id-range" in flags else (1, UNBOUNDED),
        seed=flags.number("seed", 0, minimum=0),
    )


def _sources(flags: FlagValues) -> tuple[str, ...]:
    sources = flags.each("input-data")
    for each in sources:
        if each not in _SOURCES and not Path(each).exists():
            raise UsageError(
                f"Failed to parse --input-data. Unsupported type provided: '{each}'. The available options are 'zero',"
                " 'random', path to a directory, or a json file."
            )
    paths = tuple(flags.each("data-directory") + [each for each in sources if each not in _SOURCES])
    zero = "zero" in sources or "z" in flags
    if zero and paths:
        raise UsageError("The -z flag cannot be set when --data-directory is provided.")
    return paths or (("zero",) if zero else ("random",))


def _result_options(flags: FlagValues) -> dict[str, Any]:
    export = flags.text("profile-export-file")
    if export and Path(export).exists():
        raise UsageError("Failed to parse --profile-export-file. Path must not already exist.")
    collect = "collect-metrics" in flags
    for key in ("metrics-url", "metrics-interval"):
        if key in flags and not collect:
            raise UsageError(f"Must specify --collect-metrics when using the --{key} option.")
    return {
        "csv": _path(flags, "f"),
        "verbose_csv": "verbose-csv" in flags,
        "export": _path(flags, "profile-export-file"),
        "json": _path(flags, "json"),
        "html": _path(flags, "html"),
        "collect_metrics": collect,
        "metrics_url": flags.text("metrics-url") or _metrics_url(flags.text("u")),
        "metrics_interval_ms": flags.number("metrics-interval", 1000),
        "target_ms": flags.number("target-ms", None, minimum=0, number_type=float),
        "progress": "no-progress" not in flags,
    }


def _metrics_url(url: str) -> str:
    """Return the usual address of a server's metrics page. An invalid URL is reported by what connects to it."""
    host: str | None = None
    with suppress(ValueError):
        host = urlsplit(url if "://" in url else f"//{url}").hostname
    host = host or "localhost"
    return f"[{host}]:8002/metrics" if ":" in host else f"{host}:8002/metrics"


def _check_exclusive_flags(flags: FlagValues, run_options: Options) -> None:
    """Reject flags that exclude each other. Raises: UsageError."""
    load_flags = ("concurrency-range", "request-rate-range", "request-intervals")
    old = any(key in flags for key in ("t", "c", "d"))
    for key in load_flags:
        if key in flags and old:
            reason = "concurrency" if key == "request-rate-range" else "deprecated"
            raise UsageError(f"Cannot use {reason} options with --{key}.")
    if sum(key in flags for key in load_flags) > 1:
        raise UsageError(
            "Cannot specify more then one inference load mode. Please choose only one of the following modes:"
            " --concurrency-range, --periodic-concurrency-range, --request-rate-range, or --request-intervals."
        )
    if "async" in flags and "sync" in flags:
        raise UsageError("Cannot specify --async and --sync simultaneously.")
    if run_options.streaming and not run_options.grpc:
        raise UsageError("Streaming is only allowed with gRPC protocol and Triton C API.")
    if run_options.streaming and "sync" in flags:
        raise UsageError("can not use streaming with synchronous API")
    if "grpc-compression-algorithm" in flags and not run_options.grpc:
        raise UsageError("Using compression algorithm is only allowed with gRPC protocol.")
    _check_search(run_options, run_options.concurrency or run_options.rate or Range())
    _check_request_count(run_options, run_options.concurrency or run_options.rate or Range())


def _check_search(run_options: Options, levels: Range) -> None:
    if not levels.end and not run_options.rule.threshold_ms:
        raise UsageError("The end of the search range and the latency limit can not be both 0 (or 0.0) simultaneously")
    if not run_options.binary_search or run_options.intervals:
        return
    if not levels.end:
        raise UsageError("The end of the range can not be 0 (or 0.0) for binary search mode.")
    if not run_options.rule.threshold_ms:
        raise UsageError("The --latency-threshold cannot be 0 for binary search mode.")
    if levels.end < levels.start:
        raise UsageError("The end of the range can not be less than start of the range for binary search mode.")


def _check_request_count(run_options: Options, levels: Range) -> None:
    kind = "concurrency" if run_options.concurrency else "request rate"
    has_several_levels = levels.start < levels.end
    if run_options.rule.warmup_requests and has_several_levels:
        raise UsageError(f"--warmup-request-count not supported with multiple {kind} values in one run")
    total = run_options.rule.total_requests
    if not total or run_options.intervals:
        return
    if total < int(levels.start):
        raise UsageError(f"--request-count can not be less than {kind}")
    if has_several_levels:
        raise UsageError(f"--request-count not supported with multiple {kind} values in one run")


def _path(flags: FlagValues, key: str) -> Path | None:
    return Path(flags.text(key)) if flags.text(key) else None
