from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from penstock.server import cli
from penstock.server import probe as probing
from penstock.server.probe import probe
from penstock.server.settings import Settings


class Answering(BaseHTTPRequestHandler):
    """Answers the path that a probe requests, as ready or not."""

    ready = True

    def do_GET(self) -> None:
        assert self.path == "/v2/health/ready"
        self.send_response(200 if self.ready else 400)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Say nothing."""


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a fake server on this machine."""
    server = HTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_is_ready_is_healthy(port: int) -> None:
    assert probe(Settings(http_port=port, http_address="0.0.0.0")) == (0, "ready")


def test_a_server_that_is_not_ready_is_unhealthy(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Answering, "ready", False)

    assert probe(Settings(http_port=port)) == (1, f"not ready: 127.0.0.1:{port} answered 400 to /v2/health/ready")


def test_the_environment_gives_the_port_to_probe(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_HTTP_PORT", str(port))

    assert cli.main(["probe"]) == 0
    assert capsys.readouterr().out == "ready\n"


@pytest.mark.parametrize(
    "command",
    [
        "tini -- penstock serve /models --http-port",
        "/opt/penstock/bin/python /opt/penstock/bin/penstock serve /models --http-port",
        "tini -- penstock tritonserver --model-repository /models --http-po",
        "tini -- /opt/tritonserver/bin/tritonserver --model-repository=/models --http-port",
        "tini -- tritonserver --model-store=/models --strict-model-config=false --http-port",
    ],
)
def test_the_command_line_of_the_first_process_gives_the_port_to_probe(
    command: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cmdline_file = tmp_path / "cmdline"
    cmdline_file.write_text("".join(f"{word}\0" for word in [*command.split(), str(port)]))
    monkeypatch.setattr(probing, "_INIT_CMDLINE", cmdline_file)

    assert cli.main(["probe"]) == 0
    assert capsys.readouterr().out == "ready\n"
    assert cli.main(["probe", "--http-port", "1"]) == 1


@pytest.mark.parametrize("command", ["/sbin/init splash", "tini -- penstock check /models --http-port 9", "serve", ""])
def test_a_first_process_that_does_not_serve_gives_no_probe_arguments(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cmdline_file = tmp_path / "cmdline"
    cmdline_file.write_text("".join(f"{word}\0" for word in command.split()))

    for file in (cmdline_file, tmp_path / "none"):
        monkeypatch.setattr(probing, "_INIT_CMDLINE", file)
        assert probing.container_arguments() == []


def test_a_port_without_a_listener_is_unhealthy() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # without listening
        port = held.getsockname()[1]

        assert probe(Settings(http_port=port)) == (
            1,
            f"no answer from 127.0.0.1:{port}: [Errno 111] Connection refused",
        )


def test_a_listener_that_does_not_answer_is_unhealthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]

        assert probe(Settings(http_port=port), timeout_s=0.01) == (1, f"no answer from 127.0.0.1:{port}: timed out")


def test_a_server_without_http_cannot_be_probed() -> None:
    assert probe(Settings(allow_http=False))[0] == 1
