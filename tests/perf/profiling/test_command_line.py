from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.perf.generator.orders import Tls
from penstock.perf.profiling.command_line import options as read
from penstock.perf.profiling.flags import FLAGS, UsageError, split, usage
from penstock.perf.profiling.options import Options, Range

# Every flag of perf_analyzer 2.47's --help.
LONG = """
version bls-composing-models model-signature-name service-kind endpoint async sync measurement-interval measurement-mode
measurement-request-count concurrency-range periodic-concurrency-range request-period request-parameter
request-rate-range request-distribution request-intervals serial-sequences binary-search num-of-sequences
latency-threshold max-threads stability-percentage max-trials percentile request-count input-data shared-memory
output-shared-memory-size shape sequence-length sequence-length-variation sequence-id-range string-length string-data
input-tensor-format output-tensor-format data-directory ssl-grpc-use-ssl ssl-grpc-root-certifications-file
ssl-grpc-private-key-file ssl-grpc-certificate-chain-file ssl-https-verify-peer ssl-https-verify-host
ssl-https-ca-certificates-file ssl-https-client-certificate-file ssl-https-client-certificate-type
ssl-https-private-key-file ssl-https-private-key-type profile-export-file streaming grpc-compression-algorithm
trace-level trace-rate trace-count log-frequency collect-metrics metrics-url metrics-interval triton-server-directory
model-repository verbose-csv
""".split()  # noqa: SIM905
SHORT = "vdazcumxbtpiHlrsf"
TAKES_NOTHING = {
    "version", "async", "sync", "serial-sequences", "binary-search", "ssl-grpc-use-ssl", "streaming",
    "collect-metrics", "verbose-csv", *"vdaz",
}  # fmt: skip
DOCS = Path(__file__).parents[3] / "docs" / "perf.md"


def options(words: str) -> Options:
    return read(["-m", "iris", *words.split()])


def refusal(words: str) -> str:
    with pytest.raises(UsageError) as refused:
        options(words)
    return str(refused.value)


def test_every_flag_of_perf_analyzer_is_known_with_or_without_a_value() -> None:
    known = {word: flag for flag in FLAGS for word in (flag.name, flag.short) if word}

    assert {*LONG, *SHORT} <= known.keys()
    assert {word for word in [*LONG, *SHORT] if not known[word].value} == TAKES_NOTHING


def test_every_flag_is_in_the_help_and_in_the_docs() -> None:
    text = usage()
    docs = DOCS.read_text("utf-8")

    for flag in FLAGS:
        word = f"--{flag.name}" if flag.name else f"-{flag.short}"
        assert re.search(rf"{word}\b", text), word
        assert re.search(rf"`{word}\b", docs), word


@pytest.mark.parametrize("kind", ["none", "system", "cuda"])
def test_the_shared_memory_flag_selects_where_tensors_are(kind: str) -> None:
    assert options(f"--shared-memory {kind}").input.shared_memory == kind


def test_the_defaults_are_those_of_perf_analyzer() -> None:
    parsed = options("")

    assert (parsed.concurrency, parsed.rate, parsed.intervals) == (Range(1, 1, 1), None, None)
    assert (parsed.rule.interval_ms, parsed.rule.requests, parsed.rule.percentage, parsed.rule.trials) == (
        5000,
        50,
        10,
        10,
    )
    assert (parsed.rule.percentile, parsed.rule.total_requests, parsed.rule.threshold_ms) == (0, 0, 0)
    assert (parsed.input.source, parsed.input.batch, parsed.input.string_length) == (("random",), 1, 128)
    assert (parsed.input.sequence_length, parsed.input.sequence_variation, parsed.input.sequence_ids) == (
        None,
        20,
        (1, 0),
    )
    assert (parsed.sequences, parsed.grpc, parsed.url, parsed.compression) == (4, False, "", "none")
    assert (parsed.metrics_url, parsed.metrics_interval_ms) == ("localhost:8002/metrics", 1000)
    assert parsed.input.output_shared_memory_bytes == 102_400


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--concurrency-range 5", Range(5, 1, 1)),
        ("--concurrency-range 1:8", Range(1, 8, 1)),
        ("--concurrency-range=2:0:3 -l 5", Range(2, 0, 3)),
        ("-t 3", Range(3, 1, 1)),
        ("-t 2 -d -c 9", Range(2, 9, 1)),
        ("-d -l 7", Range(1, 0, 1)),
    ],
)
def test_concurrency_is_a_range_or_given_by_the_old_flags(words: str, expected: Range) -> None:
    assert options(words).concurrency == expected


def test_rates_and_intervals_exclude_concurrency(tmp_path: Path) -> None:
    intervals = tmp_path / "intervals"
    intervals.write_text("1000\n", "utf-8")

    rates = options("--request-rate-range 10.5:20:0.5 --request-distribution poisson")
    assert (rates.rate, rates.concurrency, rates.poisson) == (Range(10.5, 20, 0.5), None, True)
    assert options(f"--request-intervals {intervals}").concurrency is None


def test_long_flags_may_be_abbreviated_and_short_ones_combined() -> None:
    parsed = options("--measurement-int 300 -vaz -p400")

    assert (parsed.rule.interval_ms, parsed.verbose, parsed.input.source) == (400, 1, ("zero",))


def test_the_command_line_of_model_analyzer_is_understood() -> None:
    parsed = options(
        "-b 1 -u localhost:8001 -i grpc -f iris-results.csv --verbose-csv --concurrency-range 4 --measurement-mode "
        "count_windows --collect-metrics --metrics-url http://localhost:8002/metrics --metrics-interval 1000.0"
    )

    assert (parsed.metrics_interval_ms, parsed.concurrency, parsed.rule.by_count) == (1000, Range(4, 1, 1), True)


def test_default_tls_settings_produce_no_option() -> None:
    assert options("-u https://localhost --ssl-https-verify-peer 1").tls is None
    assert options("-u https://localhost --ssl-https-verify-peer 0").tls == Tls(verify_peer=False)


def test_extra_words_are_reported_and_ignored() -> None:
    warnings: list[str] = []
    parsed = read(["-m", "iris", "-i", "grpc", "--ssl-grpc-use-ssl", "true"], warnings.append)

    assert parsed.tls == Tls()
    assert warnings == ["WARNING: 'true' belongs to no flag and is ignored"]
    assert read(["-m", "iris", "-i", "gRPC", "--ssl-grpc-use-ssl=true"]).tls == Tls()


def test_repeatable_flags_keep_all_values() -> None:
    parsed = options(
        "-H a:1 -H b:2:3 --shape x:1,2 --shape y:n:3 --request-parameter k:7:int --request-parameter s:x:STRING "
        "--trace-level TIMESTAMPS --trace-level TENSORS --trace-count -1"
    )

    assert parsed.headers == (("a", "1"), ("b", "2:3"))
    assert parsed.input.shapes == {"x": (1, 2), "y:n": (3,)}
    assert parsed.input.parameters == (("k", 7), ("s", "x"))
    assert parsed.trace == (("trace_level", ("TIMESTAMPS", "TENSORS")), ("trace_count", ("-1",)))


def test_the_metrics_url_defaults_to_that_of_the_server() -> None:
    assert options("-u far:8000 --collect-metrics").metrics_url == "far:8002/metrics"
    assert options("-u https://far:8000 --collect-metrics").metrics_url == "far:8002/metrics"
    assert options("-u http://far/ --collect-metrics").metrics_url == "far:8002/metrics"
    assert options("-u [::1] --collect-metrics").metrics_url == "[::1]:8002/metrics"
    assert options("--collect-metrics --metrics-url near:1/m").metrics_url == "near:1/m"


def test_a_sequence_length_of_zero_is_the_default() -> None:
    assert options("--sequence-length 0").input.sequence_length == 20
    assert options("--sequence-length 5 --sequence-id-range 7:9").input.sequence_ids == (7, 2)
    assert options("--sequence-id-range 0").input.sequence_ids == (1, 0)


def test_composing_models_are_names_with_or_without_versions() -> None:
    assert read(["-m", "a", "--bls-composing-models", "b:3, c"]).composing == (("b", "3"), ("c", ""))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-p 0", "Failed to parse --measurement-interval (-p). The value must be > 0."),
        ("-p x", "Failed to parse --measurement-interval. Invalid value provided: x"),
        ("-b 0", "Failed to parse -b (batch size). The value must be > 0."),
        ("-s -1", "Failed to parse --stability-percentage (-s). The value must be >= 0."),
        ("-r 0", "Failed to parse --max-trials (-r). The value must be > 0."),
        ("--percentile 100", "must be -1 for not reporting or in range (0, 100)"),
        ("--percentile 0", "must be -1 for not reporting or in range (0, 100)"),
        ("--concurrency-range 1:2:1:1", "The value does not match <start:end:step>."),
        ("--concurrency-range 0", "The start of the search range must be > 0"),
        ("--concurrency-range 1:8:0", "the step > 0"),
        ("--request-rate-range 0", "Failed to parse --request-rate-range. The start of the search range must be > 0"),
        ("--request-rate-range nan", "Failed to parse --request-rate-range. Invalid value provided: nan"),
        ("--request-rate-range 1:inf", "Failed to parse --request-rate-range. Invalid value provided: inf"),
        ("--stability-percentage nan", "Failed to parse --stability-percentage. Invalid value provided: nan"),
        ("--concurrency-range 1:0", "can not be both 0 (or 0.0) simultaneously"),
        ("--binary-search --concurrency-range 1:4", "--latency-threshold cannot be 0 for binary search mode"),
        ("--binary-search -l 5 --concurrency-range 1:0", "can not be 0 (or 0.0) for binary search mode"),
        ("--binary-search -l 5 --concurrency-range 4:1", "can not be less than start of the range"),
        ("--concurrency-range 1 --request-rate-range 1", "Cannot specify more then one inference load mode"),
        ("-t 3 --concurrency-range 1", "Cannot use deprecated options with --concurrency-range."),
        ("-t 3 --request-rate-range 1", "Cannot use concurrency options with --request-rate-range."),
        ("-a --sync", "Cannot specify --async and --sync simultaneously."),
        ("--streaming", "Streaming is only allowed with gRPC protocol"),
        ("--streaming -i grpc --sync", "can not use streaming with synchronous API"),
        ("--grpc-compression-algorithm gzip", "only allowed with gRPC protocol"),
        ("--grpc-compression-algorithm zip -i grpc", "'none', 'gzip' or 'deflate'"),
        ("-i thrift", "Failed to parse -i (protocol). The value should be either HTTP or gRPC."),
        ("--request-count 3 --concurrency-range 4", "--request-count can not be less than concurrency"),
        ("--request-count 9 --concurrency-range 1:4", "not supported with multiple concurrency values in one run"),
        ("--request-count 9 --request-rate-range 10", "--request-count can not be less than request rate"),
        ("--warmup-request-count 9 --request-rate-range 1:2", "multiple request rate values"),
        ("--metrics-url x", "Must specify --collect-metrics when using the --metrics-url option."),
        ("--metrics-interval 5", "Must specify --collect-metrics when using the --metrics-interval option."),
        ("--shape x", "There must be a colon after input name."),
        ("--shape x:1,0", "The dimensions of input tensor must be > 0."),
        ("--request-parameter a:b", "The value does not match <name:value:type>."),
        ("--request-parameter a:b:int", "Invalid value provided: b"),
        ("--request-parameter a:b:date", "the type must be"),
        ("--request-parameter a:18446744073709551616:uint", "Invalid value provided: 18446744073709551616"),
        ("--request-parameter a:-9223372036854775809:int", "Invalid value provided: -9223372036854775809"),
        ("--sequence-id-range 1:18446744073709551617", "The range values must be below 2^64."),
        ("--sequence-id-range 5:5", "The 'end' value must be greater than 'start' value."),
        ("--sequence-id-range 1:2:3", "The value does not match <start:end>."),
        ("--input-data nowhere", "Unsupported type provided: 'nowhere'"),
        ("-z --data-directory somewhere", "The -z flag cannot be set when --data-directory is provided."),
        ("--request-intervals nowhere", "The value must be a valid file path."),
        ("--ssl-https-verify-host 3", "The value must be either 0 or 1 or 2."),
        ("--ssl-https-private-key-type P12", "'PEM' or 'DER'"),
        ("--trace-level LOUD", "'OFF', 'TIMESTAMPS' or 'TENSORS'"),
        ("--profile-export-file .", "Path must not already exist."),
        ("-H nothing", "must be specified as 'Header:Value'"),
        ("--bogus", "option --bogus not recognized"),
        ("--measurement 5", "option --measurement not a unique prefix"),
    ],
)
def test_invalid_combinations_are_rejected_in_the_words_of_perf_analyzer(words: str, message: str) -> None:
    assert message in refusal(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--service-kind tfserving", "--service-kind tfserving is not supported"),
        ("--service-kind openai", "--service-kind openai is not supported"),
        ("--service-kind nonsense", "Unsupported type provided: 'nonsense'"),
        ("--periodic-concurrency-range 1:4", "--periodic-concurrency-range and --request-period are not supported"),
        ("--enable-mpi", "--enable-mpi is not supported"),
    ],
)
def test_unsupported_flags_are_rejected_with_a_reason(words: str, message: str) -> None:
    assert message in refusal(words)


def test_a_model_is_required() -> None:
    with pytest.raises(UsageError, match=r"Failed to parse -m \(model name\). The value must be specified."):
        read(["-u", "x:1"])


def test_the_recorded_command_contains_no_secrets() -> None:
    secret = ["-H", "Authorization: Bearer abc ", "-Hx-api-key:5", "-H", "cookie:"]
    parsed = read(["-m", "iris", *secret, "-H", "plain: word", "-p", "5"])

    assert parsed.headers[:3] == (("Authorization", "Bearer abc"), ("x-api-key", "5"), ("cookie", ""))
    warnings = "-H Authorization:... -Hx-api-key:... -H cookie:... -H plain: word -p 5"
    assert " ".join(parsed.command) == f"penstock perf -m iris {warnings}"


@given(st.lists(st.sampled_from([f"--{name}" for name in LONG] + [f"-{c}" for c in SHORT] + ["1", "a:b", "0", ""])))
def test_any_arguments_are_parsed_or_rejected(words: list[str]) -> None:
    with suppress(UsageError):
        read(words)


@given(st.lists(st.text(max_size=5), max_size=5))
def test_any_text_is_split_or_rejected(words: list[str]) -> None:
    with suppress(UsageError):
        split(words)


def test_declared_inputs_equal_those_of_metadata() -> None:
    assert options("--input a:b:fp32:-1,4 --input n:INT64:1").inputs == (
        {"name": "a:b", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "n", "datatype": "INT64", "shape": [1]},
    )
    assert refusal("--input a:FP32") == "Failed to parse --input. The value does not match <name:datatype:dimensions>."
    assert refusal("--input a:FP32:0") == "Failed to parse --input. The dimensions must be > 0, or -1."
