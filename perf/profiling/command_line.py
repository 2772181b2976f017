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

from .flag_values import UNBOUNDED, Given, declared, ids, parameter, range_of, shape, shown
from .flags import UsageError, split
from .options import Input, Options, Range, Rule, hidden

_SOURCES = ("zero", "random")


def options(words: Sequence[str], warn: Callable[[str], None] = lambda line: None) -> Options:
    """Parse a command line. `warn` receives lines about arguments without effect. Raises: UsageError."""
    pairs, left = split(words)
    given = Given(pairs)
    for word in left:
        warn(f"WARNING: '{word}' belongs to no flag and is ignored")
    _refused(given)
    made = Options(
        **_what(given),
        **_where(given),
        **_load(given),
        **_results(given),
        rule=_rule(given),
        input=_input(given),
        command=("penstock", "perf", *words),
    )
    _agreed(given, made)
    return replace(made, command=_redacted_command(made))


def _redacted_command(made: Options) -> tuple[str, ...]:
    """Return the command's words without secrets in headers."""
    secret = [header for header in made.headers if hidden(header) != header]
    told = []
    for word in made.command:
        name, _, value = word.partition(":")
        is_one = any(name.endswith(header[0]) and value.strip() == header[1] for header in secret)
        told.append(f"{name}:..." if is_one else word)
    return tuple(told)


def _refused(given: Given) -> None:
    kind = given.one_of("service-kind", ("triton", "openai", "triton_c_api", "tfserving", "torchserve"), "triton")
    if kind != "triton":
        raise UsageError(
            f"--service-kind {kind} is not supported: penstock perf drives servers of the v2 protocol (triton)"
        )
    if "periodic-concurrency-range" in given or "request-period" in given:
        raise UsageError(
            "--periodic-concurrency-range and --request-period are not supported: they are for models that answer in"
            " many responses, as those of tokens do"
        )


def _what(given: Given) -> dict[str, Any]:
    model = given.text("m")
    if not model:
        raise UsageError("Failed to parse -m (model name). The value must be specified.")
    named = "".join(given.text("bls-composing-models").split())
    composing = tuple(
        (name, version) for name, _, version in (each.partition(":") for each in named.split(",")) if name
    )
    return {
        "model": model,
        "version": given.text("x"),
        "composing": composing,
        "inputs": tuple(declared(each) for each in given.each("input")),
        "verbose": min(given.times("v"), 2),
    }


def _where(given: Given) -> dict[str, Any]:
    protocol = given.text("i", "http").lower()
    if protocol not in {"http", "grpc"}:
        raise UsageError("Failed to parse -i (protocol). The value should be either HTTP or gRPC.")
    headers = []
    for header in given.each("H"):
        name, colon, value = header.partition(":")
        if not colon or not name:
            raise UsageError(f"Failed to parse -H. The header must be specified as 'Header:Value', got '{header}'")
        headers.append((name, value.strip()))
    grpc = protocol == "grpc"
    trace = {
        "trace_level": tuple(given.each("trace-level")),
        "trace_rate": (str(given.number("trace-rate", None)),) if "trace-rate" in given else (),
        "trace_count": (str(given.number("trace-count", None, least=-1)),) if "trace-count" in given else (),
        "log_frequency": (str(given.number("log-frequency", None, least=0)),) if "log-frequency" in given else (),
    }
    given.one_of("trace-level", ("OFF", "TIMESTAMPS", "TENSORS"), "OFF")
    return {
        "url": given.text("u"),
        "grpc": grpc,
        "tls": _grpc_tls(given) if grpc else _https_tls(given),
        "headers": tuple(headers),
        "streaming": "streaming" in given,
        "compression": given.one_of("grpc-compression-algorithm", ("none", "gzip", "deflate"), "none"),
        "trace": tuple((name, values) for name, values in trace.items() if values),
    }


def _grpc_tls(given: Given) -> Tls | None:
    files = [
        given.file(f"ssl-grpc-{name}")
        for name in ("root-certifications-file", "certificate-chain-file", "private-key-file")
    ]
    return Tls(roots=files[0], certificate=files[1], key=files[2]) if "ssl-grpc-use-ssl" in given else None


def _https_tls(given: Given) -> Tls | None:
    """Return the TLS settings for an https URL; None: the defaults."""
    for key, choices in (("ssl-https-verify-peer", ("0", "1")), ("ssl-https-verify-host", ("0", "1", "2"))):
        if given.text(key, "1") not in choices:
            raise UsageError(f"Failed to parse {shown(key)}. The value must be either {' or '.join(choices)}.")
    made = Tls(
        roots=given.file("ssl-https-ca-certificates-file"),
        certificate=given.file("ssl-https-client-certificate-file"),
        key=given.file("ssl-https-private-key-file"),
        verify_peer=given.text("ssl-https-verify-peer", "1") == "1",
        verify_host=given.text("ssl-https-verify-host", "2") != "0",
        certificate_type=given.one_of("ssl-https-client-certificate-type", ("PEM", "DER"), "PEM"),
        key_type=given.one_of("ssl-https-private-key-type", ("PEM", "DER"), "PEM"),
    )
    return None if made == Tls() else made


def _load(given: Given) -> dict[str, Any]:
    rate = range_of(given, "request-rate-range", float) if "request-rate-range" in given else None
    intervals = Path(given.file("request-intervals")) if "request-intervals" in given else None
    concurrency = None if rate or intervals else _concurrency(given)
    given.number("max-threads", None)
    return {
        "concurrency": concurrency,
        "rate": rate,
        "intervals": intervals,
        "poisson": given.one_of("request-distribution", ("constant", "poisson"), "constant") == "poisson",
        "binary_search": "binary-search" in given,
        "sequences": given.number("num-of-sequences", 4),
        "processes": given.number("processes", 1),
        "connections": given.number("connections", 0, least=0),
    }


def _concurrency(given: Given) -> Range:
    if "t" in given or "d" in given or "c" in given:
        start = given.number("t", 1, least=0)
        if start < 1:
            raise UsageError("The start of the search range must be > 0")
        return Range(start, given.number("c", 0, least=0) if "d" in given else 1, 1)
    return range_of(given, "concurrency-range", int)


def _rule(given: Given) -> Rule:
    percentile = given.number("percentile", -1, least=-1)
    if percentile != -1 and not 1 <= percentile <= 99:
        raise UsageError("Failed to parse --percentile. The value must be -1 for not reporting or in range (0, 100).")
    counted = given.one_of("measurement-mode", ("time_windows", "count_windows"), "time_windows") == "count_windows"
    return Rule(
        interval_ms=given.number("measurement-interval", 5000, name="--measurement-interval (-p)"),
        by_count=counted,
        requests=given.number("measurement-request-count", 50),
        percentage=given.number("stability-percentage", 10.0, least=0, of=float, name="--stability-percentage (-s)"),
        trials=given.number("max-trials", 10, name="--max-trials (-r)"),
        percentile=max(percentile, 0),
        total_requests=given.number("request-count", 0, least=0),
        threshold_ms=given.number("latency-threshold", 0, least=0, name="--latency-threshold (-l)"),
        warmup_requests=given.number("warmup-request-count", 0, least=0),
    )


def _input(given: Given) -> Input:
    sources = _sources(given)
    length = given.number("sequence-length", None, least=0)
    return Input(
        source=sources,
        batch=given.number("b", 1, name="-b (batch size)"),
        shapes=dict(shape(each) for each in given.each("shape")),
        string_length=given.number("string-length", 128),
        string=given.text("string-data") or None,
        binary_input=given.one_of("input-tensor-format", ("binary", "json"), "binary") == "binary",
        binary_output=given.one_of("output-tensor-format", ("binary", "json"), "binary") == "binary",
        shared_memory=given.one_of("shared-memory", ("system", "cuda", "none"), "none"),
        output_shared_memory_bytes=given.number("output-shared-memory-size", 102_400, least=0),
        parameters=tuple(parameter(each) for each in given.each("request-parameter")),
        sequence_length=length or (20 if "sequence-length" in given else None),
        sequence_variation=given.number("sequence-length-variation", 20.0, least=0, of=float),
        sequence_ids=ids(given.text("sequence-id-range")) if "sequence-id-range" in given else (1, UNBOUNDED),
        seed=given.number("seed", 0, least=0),
    )


def _sources(given: Given) -> tuple[str, ...]:
    named = given.each("input-data")
    for each in named:
        if each not in _SOURCES and not Path(each).exists():
            raise UsageError(
                f"Failed to parse --input-data. Unsupported type provided: '{each}'. The available options are 'zero',"
                " 'random', path to a directory, or a json file."
            )
    paths = tuple(given.each("data-directory") + [each for each in named if each not in _SOURCES])
    zero = "zero" in named or "z" in given
    if zero and paths:
        raise UsageError("The -z flag cannot be set when --data-directory is provided.")
    return paths or (("zero",) if zero else ("random",))


def _results(given: Given) -> dict[str, Any]:
    export = given.text("profile-export-file")
    if export and Path(export).exists():
        raise UsageError("Failed to parse --profile-export-file. Path must not already exist.")
    collect = "collect-metrics" in given
    for key in ("metrics-url", "metrics-interval"):
        if key in given and not collect:
            raise UsageError(f"Must specify --collect-metrics when using the --{key} option.")
    return {
        "csv": _path(given, "f"),
        "verbose_csv": "verbose-csv" in given,
        "export": _path(given, "profile-export-file"),
        "json": _path(given, "json"),
        "html": _path(given, "html"),
        "collect_metrics": collect,
        "metrics_url": given.text("metrics-url") or _metrics_url(given.text("u")),
        "metrics_interval_ms": given.number("metrics-interval", 1000),
        "target_ms": given.number("target-ms", None, least=0, of=float),
        "progress": "no-progress" not in given,
    }


def _metrics_url(url: str) -> str:
    """Return the usual address of a server's metrics page. An invalid URL is reported by what connects to it."""
    host: str | None = None
    with suppress(ValueError):
        host = urlsplit(url if "://" in url else f"//{url}").hostname
    host = host or "localhost"
    return f"[{host}]:8002/metrics" if ":" in host else f"{host}:8002/metrics"


def _agreed(given: Given, made: Options) -> None:
    """Reject flags that exclude each other. Raises: UsageError."""
    ways = ("concurrency-range", "request-rate-range", "request-intervals")
    old = any(key in given for key in ("t", "c", "d"))
    for key in ways:
        if key in given and old:
            word = "concurrency" if key == "request-rate-range" else "deprecated"
            raise UsageError(f"Cannot use {word} options with --{key}.")
    if sum(key in given for key in ways) > 1:
        raise UsageError(
            "Cannot specify more then one inference load mode. Please choose only one of the following modes:"
            " --concurrency-range, --periodic-concurrency-range, --request-rate-range, or --request-intervals."
        )
    if "async" in given and "sync" in given:
        raise UsageError("Cannot specify --async and --sync simultaneously.")
    if made.streaming and not made.grpc:
        raise UsageError("Streaming is only allowed with gRPC protocol and Triton C API.")
    if made.streaming and "sync" in given:
        raise UsageError("can not use streaming with synchronous API")
    if "grpc-compression-algorithm" in given and not made.grpc:
        raise UsageError("Using compression algorithm is only allowed with gRPC protocol.")
    _searched(made, made.concurrency or made.rate or Range())
    _counted(made, made.concurrency or made.rate or Range())


def _searched(made: Options, levels: Range) -> None:
    if not levels.end and not made.rule.threshold_ms:
        raise UsageError("The end of the search range and the latency limit can not be both 0 (or 0.0) simultaneously")
    if not made.binary_search or made.intervals:
        return
    if not levels.end:
        raise UsageError("The end of the range can not be 0 (or 0.0) for binary search mode.")
    if not made.rule.threshold_ms:
        raise UsageError("The --latency-threshold cannot be 0 for binary search mode.")
    if levels.end < levels.start:
        raise UsageError("The end of the range can not be less than start of the range for binary search mode.")


def _counted(made: Options, levels: Range) -> None:
    kind = "concurrency" if made.concurrency else "request rate"
    several = levels.start < levels.end
    if made.rule.warmup_requests and several:
        raise UsageError(f"--warmup-request-count not supported with multiple {kind} values in one run")
    total = made.rule.total_requests
    if not total or made.intervals:
        return
    if total < int(levels.start):
        raise UsageError(f"--request-count can not be less than {kind}")
    if several:
        raise UsageError(f"--request-count not supported with multiple {kind} values in one run")


def _path(given: Given, key: str) -> Path | None:
    return Path(given.text(key)) if given.text(key) else None
