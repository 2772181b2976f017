"""ABEJA: a handler on Penstock and on the original runtime, side by side. `python -m penstock.perf.abeja`.

The handler is the JSON example of ABEJA's documentation. The original runtime is behind a minimal front end of ours,
which takes one connection at a time and closes it after its answer, as the original proxy did, and parses as little as
it can. A compiled proxy (`--proxy`), if given, is the third side. All sides are driven in turns over 32 connections;
CPU is that of all processes of a side. The original is an environment with abejaruntime 1.1.1: `--original PYTHON`, or
ABEJA_ORIGINAL; the proxy is that of 2.6.5: `--proxy PROGRAM`, or ABEJA_PROXY.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from . import side_by_side
from .calls import HOST, Call
from .server_process import READY_LIMIT_S, Process, free_port
from .wrk import Load, drive

CONNECTIONS = 32
TIMES = 10
"""The target of issue 9: at least this many times the requests/s of the runtime behind the front end."""
HANDLER = """
import http
import json


def handler(request, context):
    req_data = json.load(request)
    total_without_tax = int(req_data["total_without_tax"])
    return {
        "status_code": http.HTTPStatus.OK,
        "content_type": "application/json; charset=utf8",
        "content": {"total": total_without_tax * 1.08},
    }
"""
CALL = Call("/", (b'{"total_without_tax": 100}',), {"Content-Type": "application/json"})
ANSWER = {"total": 108.0}
_MESSAGE = struct.Struct(">4sI")
_MARK = b"\xab\xe9\xa0\x01"
"""Precedes each message on the runtime's socket, with the length of what follows. Source: abejaruntime 1.1.1."""


class Front:
    """Passes one HTTP request at a time to the runtime's socket and returns its answer; bodies go through files."""

    def __init__(self, runtime: socket.socket, folder: Path) -> None:
        self._runtime = runtime
        self._said = runtime.makefile("rb")
        self._body = folder / "body.bin"

    def serve(self, listener: socket.socket) -> None:
        """Serve one connection after another, forever."""
        while True:
            self.take(listener.accept()[0])

    def take(self, connection: socket.socket) -> None:
        """Answer the one request of a connection and close it. The client may be gone once its time is over."""
        with connection, contextlib.suppress(ConnectionError), connection.makefile("rb") as file:
            if request := read_request(file):
                connection.sendall(self.answer(*request))

    def answer(self, method: str, headers: Mapping[str, str], body: bytes) -> bytes:
        """Have the runtime answer one request. Returns: the answer as HTTP."""
        self._body.write_bytes(body)
        request = {
            "method": method,
            "content_type": headers.get("content-type"),
            "headers": [{"key": name, "values": [value]} for name, value in sorted(headers.items())],
            "contents": [{"path": str(self._body)}],
        }
        text = json.dumps(request).encode()
        self._runtime.sendall(_MESSAGE.pack(_MARK, len(text)) + text)
        _, nbytes = _MESSAGE.unpack(self._said.read(_MESSAGE.size))
        reply: dict[str, Any] = json.loads(self._said.read(nbytes))
        self._body.unlink()
        content = json.dumps({"status": reply.get("error_message")}).encode()
        if "error_message" not in reply:
            content = b""
            if path := reply.get("path"):
                content = Path(path).read_bytes()
                Path(path).unlink()
        lines = {"Content-Type": reply["content_type"], **(reply.get("metadata") or {})}
        lines |= {"Content-Length": str(len(content)), "Connection": "close"}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"HTTP/1.1 {reply['status_code']} -\r\n{head}\r\n".encode() + content


def read_request(file: BinaryIO) -> tuple[str, dict[str, str], bytes] | None:
    """Read a method, headers in lower case, and a body with a Content-Length; None if there is no request."""
    method = file.readline().decode("latin-1").partition(" ")[0]
    if not method:
        return None
    headers = {}
    while line := file.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return method, headers, file.read(int(headers.get("content-length", 0)))


@contextlib.contextmanager
def runtime(program: str, folder: Path) -> Iterator[socket.socket]:
    """Run the original runtime and connect to it until the block ends. Raises: OSError if it does not listen."""
    path = folder / "socket"
    with subprocess.Popen([program], env=os.environ | {"ABEJA_IPC_PATH": str(path)}) as child:
        try:
            end = time.monotonic() + READY_LIMIT_S
            while not path.exists() and child.poll() is None and time.monotonic() < end:
                time.sleep(0.02)
            with socket.socket(socket.AF_UNIX) as wire:
                wire.connect(str(path))
                yield wire
        finally:
            child.terminate()


def serve_front(program: str, port: int) -> None:
    """Serve the handler in this folder with the original runtime until this process is terminated."""
    with tempfile.TemporaryDirectory() as name, runtime(program, Path(name)) as wire:
        Front(wire, Path(name)).serve(socket.create_server((HOST, port), backlog=4 * CONNECTIONS))


def ask(server: Process) -> None:
    """Send the call. Raises: RuntimeError if the answer is not as expected."""
    answer = json.loads(server.request("POST", CALL.path, CALL.bodies[0], CALL.headers))
    if answer != ANSWER:
        raise RuntimeError(f"the handler said {answer}")


def load(family: side_by_side.ProcessTree, seconds: int) -> Load:
    """Keep 32 connections busy."""
    return drive(family, CALL, CONNECTIONS, seconds)


def sides_of(folder: Path, original: str, proxy: str) -> side_by_side.Sides[side_by_side.ProcessTree]:
    """Return the sides to measure. `folder` holds the handler, and any files that the sides leave."""
    environ = {"HANDLER": "main:handler", "TMPDIR": str(folder)}
    port, health_port = str(free_port()), str(free_port())
    penstock_command = [
        sys.executable,
        "-m",
        "penstock.server.cli",
        "abeja",
        "--port",
        port,
        "--health-port",
        health_port,
    ]
    sides = {"penstock": side_by_side.served(penstock_command, folder, int(port), ask, environ)}
    if original:
        runtime = str(Path(original).with_name("abeja-runtime-python"))
        port = str(free_port())
        command = [sys.executable, "-m", "penstock.perf.abeja", "--front", runtime, "--port", port]
        sides["runtime 1.1.1, plain front"] = side_by_side.served(command, folder, int(port), ask, environ)
    if original and proxy:
        ports = {"PORT": str(free_port()), "HEALTHCHECK_PORT": str(free_port())}
        path = {"PATH": os.pathsep.join([str(Path(original).parent), os.environ["PATH"]])}
        its = environ | ports | path
        sides["runtime 1.1.1, its proxy"] = side_by_side.served([proxy], folder, int(ports["PORT"]), ask, its)
    return sides


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m penstock.perf.abeja", description=__doc__)
    parser.add_argument("--original", default=os.environ.get("ABEJA_ORIGINAL", ""), metavar="PYTHON")
    parser.add_argument("--proxy", default=os.environ.get("ABEJA_PROXY", ""), metavar="PROGRAM")
    parser.add_argument("--front", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = side_by_side.arguments(parser)
    if args.front:
        serve_front(args.front, args.port)
        return
    if not args.original:
        print("the original is left out: no --original PYTHON, and no ABEJA_ORIGINAL")
    print(f"{os.cpu_count()} CPUs, {CONNECTIONS} connections, one worker each")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "main.py").write_text(HANDLER)
        side_by_side.show(sides_of(folder, args.original, args.proxy), {"JSON": load}, {"JSON": TIMES}, args)


if __name__ == "__main__":
    main()
