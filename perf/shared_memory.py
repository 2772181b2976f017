"""System shared memory beside binary HTTP: `python -m penstock.perf.shared_memory`.

A tensor of 600 kB goes to a model and comes back (`identity`), or its mean does, in turns of a hundred requests either
way, so that other load on the machine affects both; one client waits for each answer. Its tensors are already in place:
over HTTP it sends from its own memory and receives into it; in shared memory they are made and read in place.
`--copies` makes it copy them in and out.

The cost of HTTP varies: if the C library returns the memory of a body to the system after each request, every page of
the next one is a fault. Therefore the faults are printed too, and the server is started several times.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from . import processes
from .calls import HOST
from .models import Graph, make
from .server_process import Process, penstock

VALUES = 150_000
NBYTES = 4 * VALUES
GOAL = 2.5
TURN = 100
Ask = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Round:
    """The results of one turn of one way."""

    requests_per_s: float
    server_cpu_us: float
    server_faults: float


def model(kind: str) -> onnx.ModelProto:
    """Build a model that returns its input, or the mean of it."""
    graph = Graph(seed=0)
    if kind == "identity":
        return graph.model(kind, "input", ("N", "M"), ("N", "M"))
    return graph.model(kind, graph.node("ReduceMean", "input", axes=[1], keepdims=1), ("N", "M"), ("N", 1))


class Client:
    """One keep-alive connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = bytearray(4096)

    def ask(self, parts: list[Any], into: memoryview) -> int:
        """Send a request in parts and receive the answer's body into `into`. Returns: its length."""
        self._send(parts)
        received = 0
        while (end := self._head.find(b"\r\n\r\n", 0, received)) < 0:
            count = self._socket.recv_into(memoryview(self._head)[received:])
            if not count:
                raise ConnectionError("the server has closed the connection")
            received += count
        head = bytes(self._head[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            raise RuntimeError(bytes(self._head[:received]).decode("latin-1"))
        length = int(head.partition(b"\r\ncontent-length: ")[2].split(b"\r\n")[0])
        body_bytes = received - end - 4
        into[:body_bytes] = self._head[end + 4 : received]
        while body_bytes < length:
            body_bytes += self._socket.recv_into(into[body_bytes:length])
        return length

    def _send(self, parts: list[Any]) -> None:
        views = [memoryview(part) for part in parts]
        sent = self._socket.sendmsg(views)
        for view in views:
            if sent < len(view):
                self._socket.sendall(view[sent:])
            sent = max(0, sent - len(view))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def _request(name: str, document: dict[str, Any], after: int) -> bytes:
    text = json.dumps(document).encode()
    extra = f"inference-header-content-length: {len(text)}\r\n" if after else ""
    head = f"POST /v2/models/{name}/infer HTTP/1.1\r\nhost: x\r\n{extra}content-length: {len(text) + after}\r\n\r\n"
    return head.encode() + text


def over_http(client: Client, name: str, values: Any) -> Ask:
    """Return a function that sends a binary tensor and receives one."""
    tensor = {"name": "input", "datatype": "FP32", "shape": [1, VALUES], "parameters": {"binary_data_size": NBYTES}}
    head = _request(name, {"inputs": [tensor], "parameters": {"binary_data_output": True}}, NBYTES)
    raw, into = memoryview(values).cast("B"), memoryview(bytearray(NBYTES + 4096))
    return lambda: void(client.ask([head, raw], into))


def through_memory(client: Client, name: str, values: Any, memory: SharedMemory, *, copies: bool) -> Ask:
    """Return a function that sends a tensor in shared memory and receives one there."""
    width = VALUES if name == "identity" else 1

    def placed(offset: int, count: int) -> dict[str, Any]:
        return {
            "shared_memory_region": "region", "shared_memory_offset": offset, "shared_memory_byte_size": 4 * count
        }  # fmt: skip

    tensor = {"name": "input", "datatype": "FP32", "shape": [1, VALUES], "parameters": placed(0, VALUES)}
    output_entry = {"name": "output", "parameters": placed(NBYTES, width)}
    head = _request(name, {"inputs": [tensor], "outputs": [output_entry]}, 0)
    source = np.ndarray(VALUES, np.float32, memory.buf)
    target = np.ndarray(width, np.float32, memory.buf, NBYTES)
    into, answer = memoryview(bytearray(4096)), np.empty(width, np.float32)

    source[:] = values
    if not copies:
        return lambda: void(client.ask([head], into))

    def ask() -> None:
        source[:] = values
        client.ask([head], into)
        answer[:] = target

    return ask


def void(_: object) -> None:
    """Discard a result."""


def measure(process: Process, send_one: Ask) -> Round:
    """Run one turn."""
    before, start = processes.stat(process.pid), time.perf_counter()
    for _ in range(TURN):
        send_one()
    elapsed_s, after = time.perf_counter() - start, processes.stat(process.pid)
    return Round(TURN / elapsed_s, (after.cpu_s - before.cpu_s) / TURN * 1e6, (after.faults - before.faults) / TURN)


@contextmanager
def served(folder: Path) -> Iterator[Process]:
    """Serve both models, with shared memory."""
    make(folder, {kind: partial(model, kind) for kind in ("identity", "mean")})
    with penstock(folder, "--allow-client-shm") as process:
        yield process


def compare(process: Process, name: str, args: argparse.Namespace) -> float:
    """Measure both ways in turns and print them. Returns: the throughput of shared memory relative to HTTP."""
    values = np.random.default_rng(0).random(VALUES, dtype=np.float32)
    memory = SharedMemory(create=True, size=2 * NBYTES)
    client = Client(process.port)
    try:
        region = json.dumps({"key": memory.name, "byte_size": 2 * NBYTES}).encode()
        process.request("POST", "/v2/systemsharedmemory/region/region/register", region)
        transports = {
            "binary HTTP": over_http(client, name, values),
            "shared memory": through_memory(client, name, values, memory, copies=args.copies),
        }
        rounds: dict[str, list[Round]] = {transport: [] for transport in transports}
        for number in range(args.turns + 1):
            for transport, send_one in transports.items():
                result = measure(process, send_one)
                if number:
                    rounds[transport].append(result)
        process.request("POST", "/v2/systemsharedmemory/unregister")
    finally:
        client.close()
        memory.unlink()
    for transport, transport_rounds in rounds.items():
        rate = statistics.median(one_round.requests_per_s for one_round in transport_rounds)
        # the kernel counts in steps of 10 ms, so use the mean of all turns
        cpu = statistics.fmean(one_round.server_cpu_us for one_round in transport_rounds)
        faults = statistics.median(one_round.server_faults for one_round in transport_rounds)
        print(
            f"{name:10}{transport:16}{rate:9.0f} requests/s{cpu:8.0f} us server CPU{faults:8.0f} page faults a request"
        )
    ratios = [
        memory_round.requests_per_s / http_round.requests_per_s
        for http_round, memory_round in zip(*rounds.values(), strict=True)
    ]
    times: float = statistics.median(ratios)
    low, high = np.quantile(ratios, (0.1, 0.9))
    print(f"{name:10}{'':16}{times:9.2f} times (of ten turns eight {low:.2f} to {high:.2f}), wanted {GOAL}")
    return times


def main() -> None:
    """Compare for both models."""
    parser = argparse.ArgumentParser(description="Tensors of 600 kB through shared memory and over HTTP.")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--copies", action="store_true")
    args = parser.parse_args()
    times: dict[str, list[float]] = {"identity": [], "mean": []}
    for _ in range(args.starts):
        for name, ratio in times.items():
            with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as process:
                ratio.append(compare(process, name, args))
    for name, ratio in times.items():
        print(f"{name:10}{'of all starts':16}{statistics.median(ratio):9.2f} times, wanted {GOAL}")


if __name__ == "__main__":
    main()
