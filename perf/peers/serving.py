"""Serving: a peer started for one model, checked once, stopped while others are measured, and ended with all processes.

It is suspended (SIGSTOP) in between, so that its idle work costs the others nothing.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.perf.calls import HOST
from penstock.perf.generator.orders import Target
from penstock.perf.server_process import free_port

from .environments import Environment
from .peer import Peer, variables
from .process_tree import MARK, ProcessTree
from .wires import GRPC, Array, Wire

READY_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 5.0
_MAX_REASON_CHARACTERS = 300


class StartError(Exception):
    """A peer does not start. The text is the reason, on one line."""


class CallError(Exception):
    """A peer did not answer with numbers. The text is its answer."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model: its file, rows to send, shaped (1, ...), and the offline result of each."""

    name: str
    file: Path
    rows: tuple[Array, ...]
    answers: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Server:
    """A peer that serves a model."""

    tree: ProcessTree
    port: int
    grpc_port: int

    def target(self, wire: Wire) -> Target:
        """Return the target of a wire's requests."""
        return Target(HOST, self.grpc_port if wire.kind == GRPC else self.port, grpc=wire.call)

    def ask(self, wire: Wire, model: str, row: Array) -> Array:
        """Send one request. Raises: CallError."""
        request = wire.ask(model, row)
        try:
            if wire.kind == GRPC:
                return wire.read({}, _unary(self.grpc_port, request.path, request.body))
            status, headers, body = _request(self.port, "POST", request.path, request.headers, request.body)
            if status == http.client.OK:
                return wire.read(headers, body)
        except Exception as error:  # whatever reading a strange answer raises
            raise CallError(f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]) from error
        raise CallError(f"{status}: {body.decode('utf-8', 'replace')}"[:_MAX_REASON_CHARACTERS])

    def suspend(self) -> None:
        """Suspend all its processes."""
        self.tree.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume them."""
        self.tree.signal(signal.SIGCONT)


def _request(
    port: int, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=CALL_TIMEOUT_S)
    with contextlib.closing(connection):
        connection.request(method, path, body, dict(headers))
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def _unary(port: int, method: str, message: bytes) -> bytes:
    import grpc

    with grpc.insecure_channel(f"{HOST}:{port}", options=[("grpc.enable_http_proxy", 0)]) as channel:
        answer: bytes = channel.unary_unary(method)(message, timeout=CALL_TIMEOUT_S)
    return answer


def places(environment: Environment, model: str, folder: Path) -> dict[str, str]:
    """Return the values of the placeholders in a peer's command; ports are free ones."""
    ports = {name: str(free_port()) for name in ("http", "grpc", "metrics")}
    python = environment.python
    return {"python": str(python), "bin": str(python.parent), "model": model, "repository": str(folder / "r"), **ports}


@contextlib.contextmanager
def served(peer: Peer, environment: Environment, model: Model, *, keep: bool = False) -> Iterator[Server]:
    """Serve a model from when it is ready until the block ends. Raises: StartError.

    `keep`: leave the folder it ran in, with its log.
    """
    folder = Path(tempfile.mkdtemp(prefix="peer-"))  # a short path: some create sockets in it
    try:
        placeholders = places(environment, model.name, folder)
        (folder / "r" / model.name / "1").mkdir(parents=True)
        (folder / "r" / model.name / "1" / "model.onnx").symlink_to(model.file.resolve())
        for name, text in peer.files.items():
            (folder / name).write_text(text, "utf-8")
        with _start(peer, placeholders, model, folder) as tree:
            yield Server(tree, int(placeholders["http"]), int(placeholders["grpc"]))
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _start(peer: Peer, placeholders: Mapping[str, str], model: Model, folder: Path) -> Iterator[ProcessTree]:
    process_mark = secrets.token_hex(8)
    environ = {
        **os.environ,
        **variables(str(model.file.resolve()), placeholders),
        **{name: value.format_map(placeholders) for name, value in peer.environ.items()},
        "TMPDIR": str(folder),
        MARK: process_mark,
    }
    log = folder / "log"
    with log.open("wb") as output:
        try:
            child = subprocess.Popen(
                [argument.format_map(placeholders) for argument in peer.command],
                cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise StartError(str(error)) from error
    tree = ProcessTree(child.pid, int(placeholders["http"]), process_mark)
    try:
        _await(child, int(placeholders["http"]), peer.ready.format_map(placeholders), log)
        yield tree
    finally:
        _end(child, tree)


def _await(child: subprocess.Popen[bytes], port: int, path: str, log: Path) -> None:
    end = time.monotonic() + READY_TIMEOUT_S
    reason = "it does not listen"
    while time.monotonic() < end:
        if child.poll() is not None:
            raise StartError(f"it ended with status {child.returncode}: {last_line(log)}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, _, _ = _request(port, "GET", path, {})
            if status == http.client.OK:
                return
            reason = f"{path} gives {status}"
        time.sleep(0.1)
    raise StartError(f"not ready within {READY_TIMEOUT_S:g} s ({reason}): {last_line(log)}")


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it said nothing")[:_MAX_REASON_CHARACTERS]


def _end(child: subprocess.Popen[bytes], tree: ProcessTree) -> None:
    """Let it stop by itself, since some otherwise leave named shared memory; then terminate the rest, then kill."""
    tree.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_STOP_TIMEOUT_S)
    tree.signal(signal.SIGTERM)
    if not _has_ended(child, tree):
        tree.end()
        _has_ended(child, tree)


def _has_ended(child: subprocess.Popen[bytes], tree: ProcessTree) -> bool:
    end = time.monotonic() + _STOP_TIMEOUT_S
    while tree.pids() and time.monotonic() < end:
        child.poll()  # reaps it, so that it is no longer in the tree
        time.sleep(0.05)
    return not tree.pids()
