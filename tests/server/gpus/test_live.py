"""A real server process whose loader finds the stub NVML library."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.gpus.stub import H200, L4, Stub

ASKED_BY_PERF_ANALYZER = (
    "nv_gpu_utilization", "nv_gpu_power_usage", "nv_gpu_memory_used_bytes", "nv_gpu_memory_total_bytes",
)  # fmt: skip


@pytest.fixture
def server(stub: Stub, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "models").mkdir()
    words = ["--allow-http=false", "--allow-grpc=false", "--metrics-port=0", "--metrics-interval-ms=1",
             "--log-format=json", str(tmp_path / "models")]  # fmt: skip
    command = [sys.executable, "-m", "penstock.server.cli", "serve", *words]
    there = {"LD_LIBRARY_PATH": str(stub.library.parent), "NVML_STUB": str(stub.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | there) as child:
        yield child
        child.kill()


def page_of(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        found = re.search(r"metrics on (http://\S+)", json.loads(line)["msg"])
        if found:
            return found[1]
    raise AssertionError("it does not listen")


def scrape(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        page: str = answer.read().decode()
    return page


@pytest.mark.slow
def test_metrics_and_shutdown_of_a_server_do_not_wait_for_a_driver_that_hangs(
    server: subprocess.Popen[str], stub: Stub
) -> None:
    url = page_of(server)
    before = scrape(url)
    while "\npenstock_nvml_up 1\n" not in before:  # NVML may start slowly
        before = scrape(url)
    stub.hang("nvmlDeviceGetPowerUsage")
    power_reads, hung = stub.calls()["nvmlDeviceGetPowerUsage"], ""
    while not hung or stub.calls()["nvmlDeviceGetPowerUsage"] == power_reads:
        hung = scrape(url)
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=30)

    samples = [sample for family in text_string_to_metric_families(before) for sample in family.samples]
    assert {sample.labels["gpu_uuid"] for sample in samples if sample.name == "penstock_gpu_up"} == {H200, L4}
    for name in ASKED_BY_PERF_ANALYZER:
        assert re.findall(rf'\n{name}\{{gpu_uuid="([^"]+)"\}} (\d+\.?\d*)\n', before)[0][0] == H200
    assert "nv_gpu_power_usage" in hung  # the last known value
    assert server.returncode == 0
