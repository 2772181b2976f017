from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.server import cli
from penstock.server.doctor import probes, reading
from penstock.server.doctor.probes import ProbeProcess
from penstock.server.doctor.reading import read_facts, read_ports
from penstock.server.settings import Settings

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_port_in_use_is_reported_and_a_free_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        used_port = held.getsockname()[1]
        ports = read_ports(Settings(http_port=used_port, allow_grpc=False, metrics_port=0))

    assert [(port.name, port.bind_error) for port in ports] == [("HTTP", "Address already in use")]
    assert [
        port.bind_error for port in read_ports(Settings(http_port=used_port, allow_grpc=False, metrics_port=0))
    ] == [""]


@pytest.mark.parametrize("name", ["http", "grpc"])
def test_a_shared_port_is_not_reported_as_in_use(name: str) -> None:
    others: dict[str, Any] = {f"allow_{each}": each == name for each in ("http", "grpc", "metrics")}

    def read(port: int, *, shares: bool) -> list[tuple[str, bool]]:
        settings = Settings(**others | {f"{name}_port": port, f"reuse_{name}_port": shares})
        return [(found.bind_error, found.shared) for found in read_ports(settings)]

    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as held:
        port = held.getsockname()[1]
        assert read(port, shares=True) == [("", True)]
        assert read(port, shares=False) == [("Address already in use", False)]
    assert read(port, shares=True) == [("", False)]
    with socket.create_server(("127.0.0.1", 0)) as held:  # without sharing the port
        assert read(held.getsockname()[1], shares=True) == [("Address already in use", False)]


def test_a_failed_examination_does_not_prevent_other_examinations(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    for name in ("read_machine", "read_ports", "_read_libraries", "_read_cuda_major"):
        monkeypatch.setattr(reading, name, fail)
    monkeypatch.setattr(probes, "start", lambda *_: ProbeProcess(["/bin/false"], 20.0))

    facts = read_facts(Settings(model_repository=("nowhere",)))

    assert facts.failures == {
        **dict.fromkeys(("machine", "libraries", "ports"), "RuntimeError: broken"),
        **dict.fromkeys(("driver", "nvml", "runtime", "models"), "ended with status 1"),
    }
    assert facts.packages["penstock"]


@pytest.mark.slow
def test_the_command_examines_this_machine_and_its_models(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(
        ["doctor", "--json", str(EXAMPLES / "iris"), "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    )

    report = json.loads(capsys.readouterr().out)
    found = {f"{each['part']}: {each['text']}" for each in report["findings"]}
    assert report["status"] == status
    assert {"models: on cpu: iris", "models: 1 version would be served"} <= found
    assert [each for each in report["findings"] if "could not be examined" in each["text"]] == []
