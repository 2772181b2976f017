"""A live server of DEEPaaS models: uploads rejected before they are stored, and killed workers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

MODEL = """
import os, time

def predict(**arguments):
    told = os.environ["TOLD"]
    if os.path.exists(told):
        os.remove(told)
        open(told + ".begun", "w").write(str(os.getpid()))
        time.sleep(60)
    return {"pid": os.getpid()}
"""
ASK = """
import sys
from urllib import request
try:
    request.urlopen(request.Request(sys.argv[1], b""))
except request.HTTPError as error:
    print(error.code, error.read().decode())
"""
HOST, MIB = "127.0.0.1", 1 << 20
UPLOAD_BYTES = 200 * MIB
LIMIT_BYTES = 4 * MIB
PREDICT = "/v2/models/m/predict/"
_LISTENING = re.compile(rf"HTTP on http://{HOST}:(\d+)")


@dataclass
class Serving:
    """A server of the model `m`, which stops in the middle of its next prediction if the file `on_message` is there."""

    process: subprocess.Popen[bytes]
    port: int
    told: Path

    @property
    def peak_bytes(self) -> int:
        """Its peak memory so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10

    def ask(self) -> tuple[int, str]:
        """Ask for a prediction. Returns: the status and the body."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", PREDICT)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def upload(self, lines: str, block: bytes, blocks: int) -> tuple[int, bytes]:
        """Send a large body in blocks, until there is an answer. Returns: how many were sent, and the answer."""
        with socket.create_connection((HOST, self.port), timeout=60) as connection:
            connection.sendall(f"POST {PREDICT} HTTP/1.1\r\nHost: x\r\n{lines}\r\n\r\n".encode())
            sent = 0
            with contextlib.suppress(ConnectionError):
                while sent < blocks and not self._answered(connection):
                    connection.sendall(block)
                    sent += 1
            connection.settimeout(60)
            return sent, connection.recv(65536)

    @staticmethod
    def _answered(connection: socket.socket) -> bool:
        connection.settimeout(0)
        try:
            return bool(connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return False
        finally:
            connection.settimeout(60)


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """Serve the model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stops.py").write_text(MODEL)
        words = ["serve", "--dialect", "deepaas", "m=stops", "--http-port", "0", "--deepaas-jobs", "none"]
        words += ["--allow-grpc=false", "--allow-metrics=false", "--http-max-input-size", str(LIMIT_BYTES)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "penstock.server.cli", *words], cwd=folder, stdout=log, stderr=log,
                env={**os.environ, "TOLD": str(folder / "told"), "PYTHONPATH": name},
            )  # fmt: skip
        try:
            yield Serving(process, _port(process, folder / "log"), folder / "told")
        finally:
            process.terminate()
            assert process.wait(60) == 0


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    for _ in range(1200):
        text = log.read_text()
        if "ready, serving m/1" in text:
            return int(_LISTENING.findall(text)[0])
        assert process.poll() is None, text
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    raise AssertionError(text)


def test_an_announced_body_of_200_mb_is_rejected_by_its_content_length(serving: Serving) -> None:
    before = serving.peak_bytes
    sent, answer = serving.upload(f"Content-Length: {UPLOAD_BYTES}", bytes(MIB), 200)

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert answer.endswith(f"Maximum request body size {LIMIT_BYTES} exceeded.".encode())
    assert sent < 200
    assert serving.peak_bytes - before < 16 * MIB


def test_a_chunked_body_of_200_mb_is_rejected_when_it_exceeds_the_limit(serving: Serving) -> None:
    before = serving.peak_bytes
    chunk = b"%x\r\n%b\r\n" % (MIB, bytes(MIB))
    sent, answer = serving.upload("Transfer-Encoding: chunked", chunk, 200)

    assert answer.startswith(b"HTTP/1.1 413 ")
    assert sent < 200
    assert serving.peak_bytes - before < 32 * MIB


def test_a_client_that_expects_100_continue_is_rejected_before_it_sends_the_body(serving: Serving) -> None:
    _, answer = serving.upload(f"Content-Length: {UPLOAD_BYTES}\r\nExpect: 100-continue", b"", 0)

    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_killed_worker_fails_only_its_own_prediction(serving: Serving) -> None:
    serving.told.touch()
    words = [sys.executable, "-c", ASK, f"http://{HOST}:{serving.port}{PREDICT}"]
    asking = subprocess.Popen(words, stdout=subprocess.PIPE)
    begun = serving.told.with_suffix(".begun")
    pid = _number_in(begun, asking)
    os.kill(pid, signal.SIGKILL)
    output, _ = asking.communicate(timeout=60)

    assert output == b"500 500 Internal Server Error\n\nServer got itself in trouble\n"
    status, body = serving.ask()
    assert (status, json.loads(body)["predictions"]["pid"] != pid) == (200, True)
    assert not psutil.pid_exists(pid)


def _number_in(path: Path, asking: subprocess.Popen[bytes]) -> int:
    """Await a number in a file."""
    while not path.exists() or not path.read_text():
        assert asking.poll() is None, "it was answered already"
        time.sleep(0)
    return int(path.read_text())


def test_a_model_that_takes_no_tensors_rejects_tensor_requests_with_a_hint(serving: Serving) -> None:
    connection = http.client.HTTPConnection(HOST, serving.port, timeout=60)
    with contextlib.closing(connection):
        for inputs in ([], [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]):
            connection.request("POST", "/v2/models/m/infer", json.dumps({"inputs": inputs}))
            answer = connection.getresponse()
            assert (answer.status, "does not accept tensors: POST" in answer.read().decode()) == (501, True)
