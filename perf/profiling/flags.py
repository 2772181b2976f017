"""Flags: the words of `penstock perf`, split as getopt splits them, and its help.

They are perf_analyzer 2.47's, name by name; what each means and may not stand beside is in `command_line.py`.
"""

from __future__ import annotations

import getopt
from collections.abc import Sequence
from dataclasses import dataclass


class UsageError(Exception):
    """A command line cannot be carried out: one line says why."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `name`: long, empty where there is only a short one; `value`: what follows it, empty: nothing."""

    name: str
    short: str
    value: str
    says: str

    @property
    def key(self) -> str:
        """What it is known by."""
        return self.name or self.short


GROUPS: dict[str, tuple[Flag, ...]] = {
    "The model": (
        Flag("", "m", "MODEL", "The model to drive. Required."),
        Flag("", "x", "VERSION", "Its version. Default: the server's choice."),
        Flag(
            "bls-composing-models",
            "",
            "NAME[:VERSION],...",
            "Models that the model calls by itself; told of beside it.",
        ),
        Flag("model-signature-name", "", "NAME", "Of TensorFlow Serving: ignored."),
        Flag("service-kind", "", "KIND", "triton (any v2 server), the default; the others are refused."),
        Flag("endpoint", "", "PATH", "Of OpenAI servers: ignored."),
        Flag("", "v", "", "Say more: every window; twice: also the model's description."),
    ),
    "Measurement": (
        Flag("async", "a", "", "Accepted: requests never wait for each other here."),
        Flag("sync", "", "", "Accepted, likewise."),
        Flag("measurement-interval", "p", "MS", "A window's length. Default 5000."),
        Flag("measurement-mode", "", "MODE", "time_windows, the default, or count_windows."),
        Flag("measurement-request-count", "", "N", "The least in a counted window. Default 50."),
        Flag(
            "concurrency-range",
            "",
            "START:END:STEP",
            "Requests under way at once. Default 1. END 0: until -l is passed.",
        ),
        Flag("periodic-concurrency-range", "", "START:END:STEP", "Refused: it is for streams of tokens."),
        Flag("request-period", "", "N", "Of --periodic-concurrency-range."),
        Flag("request-rate-range", "", "START:END:STEP", "Requests due per second. END 0: until -l is passed."),
        Flag("request-distribution", "", "KIND", "constant, the default, or poisson."),
        Flag("request-intervals", "", "FILE", "Microseconds between requests, one in each line, over and over."),
        Flag("binary-search", "", "", "Halve the range instead of walking it; STEP is the precision. Needs -l."),
        Flag("num-of-sequences", "", "N", "Sequences at once where requests come by a rate. Default 4."),
        Flag("serial-sequences", "", "", "Accepted: at most one request of a sequence is ever under way."),
        Flag("latency-threshold", "l", "MS", "End the search where the latency reaches it. Default 0: never."),
        Flag("max-threads", "", "N", "Accepted: there are no threads to limit. See --processes."),
        Flag("stability-percentage", "s", "PERCENT", "How far three windows may lie apart. Default 10."),
        Flag("max-trials", "r", "N", "The most windows of a level. Default 10."),
        Flag("percentile", "", "P", "The latency that decides, 1 to 99. Default -1: the mean."),
        Flag("request-count", "", "N", "Send so many in all, and measure once. Default 0: windows."),
        Flag("warmup-request-count", "", "N", "Send so many before. Default 0."),
        Flag("", "t", "N", "Deprecated: the first concurrency."),
        Flag("", "c", "N", "Deprecated: the last concurrency, with -d."),
        Flag("", "d", "", "Deprecated: try concurrencies from -t to -c."),
    ),
    "Input": (
        Flag("", "b", "ROWS", "Rows of each request. Default 1."),
        Flag("input-data", "", "zero|random|PATH", "Zeros, random values, a folder or JSON files. Default random."),
        Flag("shared-memory", "", "none|system|cuda", "Where tensors lie. Default none."),
        Flag("output-shared-memory-size", "", "BYTES", "For each output of free size. Default 102400."),
        Flag("shape", "", "NAME:1,2,3", "The shape of an input that is free. May be given again."),
        Flag("sequence-length", "", "N", "Requests of a sequence. Default 20."),
        Flag("sequence-length-variation", "", "PERCENT", "By how much lengths differ. Default 20."),
        Flag("sequence-id-range", "", "START:END", "Ids of sequences, END left out. Default: from 1 on."),
        Flag("string-length", "", "N", "Of random strings. Default 128."),
        Flag("string-data", "", "TEXT", "The string to send."),
        Flag("input-tensor-format", "", "binary|json", "Over HTTP. Default binary."),
        Flag("output-tensor-format", "", "binary|json", "Over HTTP. Default binary."),
        Flag(
            "request-parameter",
            "",
            "NAME:VALUE:TYPE",
            "Of each request; int, bool, double or string. May be given again.",
        ),
        Flag("", "z", "", "Deprecated: --input-data zero."),
        Flag("data-directory", "", "PATH", "Deprecated: --input-data PATH."),
    ),
    "The server": (
        Flag("", "u", "HOST:PORT", "Where it is; https://HOST:PORT for TLS. Default localhost:8000, with gRPC 8001."),
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
        Flag("", "H", "NAME:VALUE", "A header (gRPC: metadata) of each request. May be given again."),
        Flag("streaming", "", "", "One gRPC stream for many requests."),
        Flag("grpc-compression-algorithm", "", "none|gzip|deflate", "Of requests. Default none."),
        Flag("trace-level", "", "OFF|TIMESTAMPS|TENSORS", "Set before the run."),
        Flag("trace-rate", "", "N", "Likewise."),
        Flag("trace-count", "", "N", "Likewise; -1: no limit."),
        Flag("log-frequency", "", "N", "Likewise."),
        Flag("triton-server-directory", "", "PATH", "Of the C API: ignored."),
        Flag("model-repository", "", "PATH", "Of the C API: ignored."),
    ),
    "Results": (
        Flag("", "f", "FILE", "Write a CSV report."),
        Flag("verbose-csv", "", "", "More columns in it."),
        Flag("profile-export-file", "", "FILE", "Write when each request began and ended, as JSON."),
        Flag("collect-metrics", "", "", "Ask the metrics page through the run; in the CSV with --verbose-csv."),
        Flag("metrics-url", "", "URL", "Of that page. Default: port 8002 of the server, /metrics."),
        Flag("metrics-interval", "", "MS", "Default 1000."),
    ),
    "Penstock's own": (
        Flag("json", "", "FILE", "Write the whole report as JSON."),
        Flag("html", "", "FILE", "Write it as one page."),
        Flag("target-ms", "", "MS", "The latency that counts as good, for goodput in the report."),
        Flag("input", "", "NAME:TYPE:-1,2,3", "An input, of a server that names none; -1: rows. May be given again."),
        Flag("processes", "", "N", "Processes that make the load. Default 1."),
        Flag("connections", "", "N", "The most connections. Default: what the protocol needs."),
        Flag("seed", "", "N", "Of random input and of poisson arrivals. Default 0."),
        Flag("no-progress", "", "", "No progress bar on a terminal."),
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
  penstock perf -m MODEL [flags]   drive a model
  penstock perf report A.json ...  compare reports, or make pages of them
  penstock perf tune ...           search a configuration
  penstock perf peers ...          measure other servers beside
  penstock perf gate ...           compare with the budgets"""


def split(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Give each flag's key and value, in order, and the words that belong to none. Raises: UsageError."""
    given = list(words)
    for place, word in enumerate(given):
        if word.startswith("--ssl-grpc-use-ssl="):  # its help says it takes a value, its parser that it takes none
            given[place] = "--ssl-grpc-use-ssl"
    try:
        found, left = getopt.gnu_getopt(given, _SHORT, _LONG)
    except getopt.GetoptError as error:
        raise UsageError(str(error)) from error
    if any(word == "--enable-mpi" for word, _ in found):
        raise UsageError("--enable-mpi is not supported: use --processes, or run several at once")
    return [(_BY_WORD[word].key, value) for word, value in found], left


def usage() -> str:
    """Give the help."""
    lines = ["usage: penstock perf -m MODEL [flags]", WORDS]
    for title, flags in GROUPS.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            names = ", ".join(
                word for word in (f"-{flag.short}" * bool(flag.short), f"--{flag.name}" * bool(flag.name)) if word
            )
            lines.append(f"  {f'{names} {flag.value}'.rstrip():<{_WIDTH}} {flag.says}")
    return "\n".join(lines)
