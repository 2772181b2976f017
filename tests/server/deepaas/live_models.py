"""A live server of the model `m` (tests/server/deepaas/modules/waits.py), and its clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tests.forking import Forked, the_forker

HERE = Path(__file__).parent / "modules"
TRAIN = "/v2/models/m/train/"
PREDICT = "/v2/models/m/predict/"


@dataclass
class Answer:
    """An answer of the server."""

    status: int
    kind: str
    body: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


def ask(port: int, method: str, path: str, body: bytes = b"", kind: str = "", **arguments: str) -> Answer:
    """Ask a server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        target = f"{path}?{urlencode(arguments)}" if arguments else path
        connection.request(method, target, body, {"content-type": kind} if kind else {})
        answer = connection.getresponse()
        return Answer(answer.status, answer.headers.get("content-type", ""), answer.read())
    finally:
        connection.close()


def ask_until(holds: Callable[[Answer], bool], port: int, path: str) -> Answer:
    """Ask until the condition holds: another process can only be polled."""
    limit_s = time.monotonic() + 60
    while not holds(answer := ask(port, "GET", path)):
        if time.monotonic() > limit_s:
            raise AssertionError(answer)
        time.sleep(0.02)  # the process that is polled needs the processor
    return answer


def ended(port: int, uuid: str) -> Any:
    """Wait for a training's end. Returns: its record."""
    return ask_until(lambda answer: answer.json["status"] != "running", port, TRAIN + uuid).json


def pids_of(pipe: str) -> list[int]:
    """Wait for the process ids that user code reports through a named pipe (modules/waits.py)."""
    return [int(word) for word in Path(pipe).read_text().split()]


class Later(threading.Thread):
    """A request on a thread of its own. `answer`: set once the thread is joined."""

    def __init__(self, port: int, method: str, path: str, **arguments: str) -> None:
        super().__init__(daemon=True)
        self._request = (port, method, f"{path}?{urlencode(arguments)}")
        self.answer = Answer(0, "", b"")
        self.start()

    def run(self) -> None:
        """Ask."""
        self.answer = ask(*self._request)


@dataclass
class Served:
    """A server that is a process of its own."""

    process: Forked
    port: int
    log: Path

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send it a signal, and wait for its end. Returns: its status."""
        self.process.send_signal(number)
        return self.process.wait(30)


@contextlib.contextmanager
def served(log: Path, *flags: str) -> Iterator[Served]:
    """Serve the model in a process."""
    command = [
        sys.executable, "-m", "penstock.server.cli", "serve", "--dialect", "deepaas", "m=waits", "--http-port", "0",
        "--grpc-port", "0", "--metrics-port", "0", *flags,
    ]  # fmt: skip
    with log.open("ab") as out:
        process = the_forker().start(command, cwd=HERE, stdout=out, stderr=subprocess.STDOUT)
    try:
        yield Served(process, _port_of(process, log), log)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(30)


def _port_of(process: Forked, log: Path) -> int:
    while process.poll() is None:
        text = log.read_text()
        if "ready, serving m/1" in text and (found := re.findall(r"HTTP on http://127\.0\.0\.1:(\d+)", text)):
            return int(found[-1])
        time.sleep(0.02)  # the server needs the processor
    raise AssertionError(log.read_text())
