"""Flags: the flags of `penstock perf`, parsed by getopt, and the help.

They have the names of perf_analyzer 2.47's. Their meanings and exclusions are in `command_line.py`.
"""

from __future__ import annotations

import getopt
from collections.abc import Sequence
from dataclasses import dataclass


class UsageError(Exception):
    """A command line cannot be carried out. The text is one line."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `name`: its long form; `value`: its argument. Either may be empty."""

    name: str
    short: str
    value: str
    help_text: str

    @property
    def key(self) -> str:
        """The name that it is known by."""
        return self.name or self.short


GROUPS: dict[str, tuple[Flag, ...]] = {
    "The model": (
        Flag("", "m", "MODEL", "The model to drive. Required."),
        Flag("", "x", "VERSION", "Its version. Default: the server's choice."),
        Flag(
            "bls-composing-models",
            "",
            "NAME[:VERSION],...",
            "Models that the model calls itself; reported with it.",
        ),
        Flag("model-signature-name", "", "NAME", "For TensorFlow Serving: ignored."),
        Flag("service-kind", "", "KIND", "triton (any v2 server), the default; others are rejected."),
        Flag("endpoint", "", "PATH", "For OpenAI servers: ignored."),
        Flag("", "v", "", "Print every window; twice: also the model's description."),
    ),
    "Measurement": (
        Flag("async", "a", "", "Accepted, no effect: requests never wait for each other."),
        Flag("sync", "", "", "Accepted, no effect."),
        Flag("measurement-interval", "p", "MS", "Length of a window. Default 5000."),
        Flag("measurement-mode", "", "MODE", "time_windows, the default, or count_windows."),
        Flag("measurement-request-count", "", "N", "Minimum requests in a counted window. Default 50."),
        Flag(
            "concurrency-range",
            "",
            "START:END:STEP",
            "Concurrent requests. Default 1. END 0: until -l is exceeded.",
        ),
        Flag("periodic-concurrency-range", "", "START:END:STEP", "Rejected: it is for token streams."),
        Flag("request-period", "", "N", "Belongs to --periodic-concurrency-range."),
        Flag("request-rate-range", "", "START:END:STEP", "Requests sent per second. END 0: until -l is exceeded."),
        Flag("request-distribution", "", "KIND", "constant, the default, or poisson."),
        Flag("request-intervals", "", "FILE", "Microseconds between requests, one per line, repeated."),
        Flag("binary-search", "", "", "Binary search of the range; STEP is the precision. Requires -l."),
        Flag("num-of-sequences", "", "N", "Concurrent sequences at a request rate. Default 4."),
        Flag("serial-sequences", "", "", "Accepted, no effect: a sequence has at most one request in flight."),
        Flag("latency-threshold", "l", "MS", "Stop searching at this latency. Default 0: never."),
        Flag("max-threads", "", "N", "Accepted, no effect: there are no threads. See --processes."),
        Flag("stability-percentage", "s", "PERCENT", "Maximum spread of three windows. Default 10."),
        Flag("max-trials", "r", "N", "Maximum windows per level. Default 10."),
        Flag("percentile", "", "P", "Latency percentile that decides, 1 to 99. Default -1: the mean."),
        Flag("request-count", "", "N", "Send this many requests and measure once. Default 0: use windows."),
        Flag("warmup-request-count", "", "N", "Send this many requests first. Default 0."),
        Flag("", "t", "N", "Deprecated: the first concurrency."),
        Flag("", "c", "N", "Deprecated: the last concurrency, with -d."),
        Flag("", "d", "", "Deprecated: try concurrencies from -t to -c."),
    ),
    "Input": (
        Flag("", "b", "ROWS", "Rows per request. Default 1."),
        Flag("input-data", "", "zero|random|PATH", "Zeros, random values, a folder or JSON files. Default random."),
        Flag("shared-memory", "", "none|system|cuda", "Where tensors are placed. Default none."),
        Flag("output-shared-memory-size", "", "BYTES", "For each output of variable size. Default 102400."),
        Flag("shape", "", "NAME:1,2,3", "Shape of an input with variable dimensions. Repeatable."),
        Flag("sequence-length", "", "N", "Requests per sequence. Default 20."),
        Flag("sequence-length-variation", "", "PERCENT", "Variation of sequence lengths. Default 20."),
        Flag("sequence-id-range", "", "START:END", "Sequence ids, END excluded. Default: from 1, unbounded."),
        Flag("string-length", "", "N", "Length of random strings. Default 128."),
        Flag("string-data", "", "TEXT", "The string to send."),
        Flag("input-tensor-format", "", "binary|json", "Over HTTP. Default binary."),
        Flag("output-tensor-format", "", "binary|json", "Over HTTP. Default binary."),
        Flag(
            "request-parameter",
            "",
            "NAME:VALUE:TYPE",
            "Parameter of each request; int, bool, double or string. Repeatable.",
        ),
        Flag("", "z", "", "Deprecated: --input-data zero."),
        Flag("data-directory", "", "PATH", "Deprecated: --input-data PATH."),
    ),
    "The server": (
        Flag("", "u", "HOST:PORT", "Server address; https://HOST:PORT for TLS. Default localhost:8000, gRPC 8001."),
        Flag("", "i", "http|grpc", "The protocol. Default http."),
        Flag("ssl-grpc-use-ssl", "", "", "Use TLS."),
        Flag("ssl-grpc-root-certifications-file", "", "FILE", "PEM of the roots to trust."),
        Flag("ssl-grpc-private-key-file", "", "FILE", "PEM of the client's key."),
        Flag("ssl-grpc-certificate-chain-file", "", "FILE", "PEM of the client's certificates."),
        Flag("ssl-https-verify-peer", "", "0|1", "Check the certificate. Default 1."),
        Flag("ssl-https-verify-host", "", "0|1|2", "Check the name in it. Default 2."),
        Flag("ssl-https-ca-certificates-file", "", "FILE", "The roots to trust."),
        Flag("ssl-https-client-certificate-file", "", "FILE", "The client's certificate."),
        Flag("ssl-https-client-certificate-type", "", "PEM|DER", "Default PEM."),
        Flag("ssl-https-private-key-file", "", "FILE", "The client's key."),
        Flag("ssl-https-private-key-type", "", "PEM|DER", "Default PEM."),
        Flag("", "H", "NAME:VALUE", "A header (gRPC: metadata) of each request. Repeatable."),
        Flag("streaming", "", "", "One gRPC stream for many requests."),
        Flag("grpc-compression-algorithm", "", "none|gzip|deflate", "Compression of requests. Default none."),
        Flag("trace-level", "", "OFF|TIMESTAMPS|TENSORS", "Trace setting, applied before the run."),
        Flag("trace-rate", "", "N", "Trace setting, applied before the run."),
        Flag("trace-count", "", "N", "Trace setting, applied before the run; -1: no limit."),
        Flag("log-frequency", "", "N", "Trace setting, applied before the run."),
        Flag("triton-server-directory", "", "PATH", "For the C API: ignored."),
        Flag("model-repository", "", "PATH", "For the C API: ignored."),
    ),
    "Results": (
        Flag("", "f", "FILE", "Write a CSV report."),
        Flag("verbose-csv", "", "", "Add columns to it."),
        Flag("profile-export-file", "", "FILE", "Write the start and end time of each request as JSON."),
        Flag("collect-metrics", "", "", "Poll the metrics page during the run; in the CSV with --verbose-csv."),
        Flag("metrics-url", "", "URL", "Metrics page. Default: port 8002 of the server, /metrics."),
        Flag("metrics-interval", "", "MS", "Polling interval. Default 1000."),
    ),
    "Penstock's own": (
        Flag("json", "", "FILE", "Write the whole report as JSON."),
        Flag("html", "", "FILE", "Write the report as one HTML page."),
        Flag("target-ms", "", "MS", "Latency target for the report's goodput."),
        Flag("input", "", "NAME:TYPE:-1,2,3", "An input, if the server describes none; -1: rows. Repeatable."),
        Flag("processes", "", "N", "Processes that generate the load. Default 1."),
        Flag("connections", "", "N", "Maximum connections. Default: what the protocol needs."),
        Flag("seed", "", "N", "Seed of random input and of poisson arrivals. Default 0."),
        Flag("no-progress", "", "", "Do not show a progress bar."),
        Flag("version", "", "", "Print the version."),
        Flag("help", "h", "", "Print this."),
    ),
}
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)
_BY_WORD = {word: flag for flag in FLAGS for word in (f"--{flag.name}", f"-{flag.short}") if word.strip("-")}
_SHORT = "".join(flag.short + ":" * bool(flag.value) for flag in FLAGS if flag.short)
_LONG = [flag.name + "=" * bool(flag.value) for flag in FLAGS if flag.name] + ["enable-mpi"]
_WIDTH = 44
WORDS = """
  penstock perf -m MODEL [flags]   load-test a model
  penstock perf report A.json ...  compare reports, or make pages of them
  penstock perf tune ...           search for a configuration
  penstock perf peers ...          measure other servers on the same load
  penstock perf gate ...           compare with the budgets"""


def split(arguments: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return each flag's key and value, in order, and the words that belong to none. Raises: UsageError."""
    remaining = list(arguments)
    for index, word in enumerate(remaining):
        if word.startswith("--ssl-grpc-use-ssl="):  # its help and its parser disagree on a value
            remaining[index] = "--ssl-grpc-use-ssl"
    try:
        pairs, extra_words = getopt.gnu_getopt(remaining, _SHORT, _LONG)
    except getopt.GetoptError as error:
        raise UsageError(str(error)) from error
    if any(word == "--enable-mpi" for word, _ in pairs):
        raise UsageError("--enable-mpi is not supported: use --processes, or run several at once")
    return [(_BY_WORD[word].key, value) for word, value in pairs], extra_words


def usage() -> str:
    """Return the help."""
    lines = ["usage: penstock perf -m MODEL [flags]", WORDS]
    for title, flags in GROUPS.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            names = ", ".join(
                word for word in (f"-{flag.short}" * bool(flag.short), f"--{flag.name}" * bool(flag.name)) if word
            )
            lines.append(f"  {f'{names} {flag.value}'.rstrip():<{_WIDTH}} {flag.help_text}")
    return "\n".join(lines)
