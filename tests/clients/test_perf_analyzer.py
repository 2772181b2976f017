"""NVIDIA's own perf_analyzer, a C++ client of both protocols, against a live server. `.ci/peers` fetches it.

It uses the cores that it measures, so these tests ignore speed: it must finish and report its requests.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import models
from tests.keys import certificate
from tests.live import Live, live_server

PEERS = Path(__file__).parents[2] / ".venv" / "peers"
PROGRAM = PEERS / "perf_analyzer"
QUICK = "-s 999 -p 100 -r 20 --max-threads 2"
"""It wants three windows that are alike, and any are: of 100 ms, and more of them where too little ends in one. Where a
window is a count of requests, it looks only every second.
"""
BREAKDOWN = ("queue", "compute input", "compute infer", "compute output")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PROGRAM.exists(), reason="perf_analyzer is not here: .ci/peers fetches it"),
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_examples(root)
    models.write_identities(root)
    with live_server(root, allow_client_shm=True) as server:
        yield server


def analyze(live: Live, words: str) -> str:
    """Run perf_analyzer and return its report; it must succeed without failed requests."""
    over = live.grpc_address if "-i grpc" in words else live.address
    ended = subprocess.run(
        [str(PROGRAM), "-u", over, *words.split(), *QUICK.split()],
        env={**os.environ, "LD_LIBRARY_PATH": str(PEERS)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    report = ended.stdout + ended.stderr
    assert ended.returncode == 0, report
    assert "Throughput: " in report, report
    assert "Failed" not in report, report
    return report


@pytest.mark.parametrize(
    "words",
    [
        "-m simple",
        "-m simple --async --concurrency-range 4",
        "-m simple -b 4",
        "-m simple --input-tensor-format json --output-tensor-format json",
        "-m simple --request-rate-range 50",
        "-m simple --request-rate-range 50 --request-distribution poisson --async",
        "-m simple --shared-memory system",
        "-m simple_string --string-data 7",
        "-m simple_identity --string-length 40",
        "-m identity_FP32 --shape x:300",
        "-m identity_FP32 --shape x:300 -b 3 --shared-memory system --output-shared-memory-size 4096",
        "-m simple -x 1 --input-data zero -b 8",
        "-m simple --binary-search --concurrency-range 1:4 -l 1000 --percentile 95",
        "-m simple --binary-search --request-rate-range 20:60:20 -l 1000",
        "-m simple --trace-level OFF",
    ],
)
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_measures_over_both_protocols(live: Live, protocol: str, words: str) -> None:
    if protocol == "grpc" and "tensor-format" in words:
        pytest.skip("gRPC has no JSON tensors")
    report = analyze(live, f"-i {protocol} {words}")
    assert all(part in report for part in BREAKDOWN), report


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_sends_requests_at_the_intervals_of_a_file(live: Live, protocol: str, tmp_path: Path) -> None:
    (tmp_path / "intervals").write_text("10000\n20000\n5000\n")
    analyze(live, f"-i {protocol} -m simple --request-intervals {tmp_path}/intervals")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_validates_the_answers_to_several_steps(live: Live, protocol: str, tmp_path: Path) -> None:
    first, ones = list(range(16)), [1] * 16
    steps = [{"INPUT0": first, "INPUT1": ones}, {"INPUT0": {"content": first, "shape": [16]}, "INPUT1": first}]
    sums = [[value + 1 for value in first], [2 * value for value in first]]
    differences = [[value - 1 for value in first], [0] * 16]
    expected = [{"OUTPUT0": sums[i], "OUTPUT1": differences[i]} for i in (0, 1)]
    (tmp_path / "right.json").write_text(json.dumps({"data": steps, "validation_data": expected}))
    (tmp_path / "wrong.json").write_text(json.dumps({"data": steps, "validation_data": expected[::-1]}))

    analyze(live, f"-i {protocol} -m simple --input-data {tmp_path}/right.json")
    with pytest.raises(AssertionError, match="Output doesn't match expected output"):
        analyze(live, f"-i {protocol} -m simple --input-data {tmp_path}/wrong.json")


@pytest.mark.parametrize("words", ["", "--concurrency-range 4", "--request-rate-range 50", "--shared-memory system"])
def test_perf_analyzer_measures_a_grpc_stream(live: Live, words: str) -> None:
    analyze(live, f"-i grpc -m simple --streaming --async {words}")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_perf_analyzer_measures_compressed_messages(live: Live, coding: str) -> None:
    analyze(live, f"-i grpc -m simple --grpc-compression-algorithm {coding}")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_perf_analyzer_reports_the_servers_compute_time(live: Live, protocol: str, tmp_path: Path) -> None:
    analyze(live, f"-i {protocol} -m simple --concurrency-range 1:2 -f {tmp_path}/table.csv")
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["Concurrency"] for row in rows] == ["1", "2"] or [row["Concurrency"] for row in rows] == ["2", "1"]
    assert all(float(row["Server Compute Infer"]) > 0 for row in rows)


def test_perf_analyzer_collects_the_metrics_page(live: Live) -> None:
    words = f"--collect-metrics --metrics-url 127.0.0.1:{live.metrics_port}/metrics --metrics-interval 100"
    analyze(live, f"-m simple {words}")


@pytest.mark.parametrize("words", ["", "--streaming --async --concurrency-range 4"])
def test_perf_analyzer_connects_with_a_client_certificate(tmp_path: Path, words: str) -> None:
    models.write_examples(tmp_path / "models")
    keys = {name: certificate(tmp_path, name) for name in ("server", "client")}
    (chain, key), (client_chain, client_key) = keys["server"], keys["client"]
    mine = (
        f"--ssl-grpc-use-ssl --ssl-grpc-root-certifications-file {chain} "
        f"--ssl-grpc-private-key-file {client_key} --ssl-grpc-certificate-chain-file {client_chain}"
    )
    with live_server(tmp_path / "models", grpc_use_ssl_mutual=True, grpc_server_cert=chain, grpc_server_key=key,
                     grpc_root_cert=client_chain) as live:  # fmt: skip
        analyze(live, f"-i grpc -m simple {words} {mine}")
