"""The servers and generators of the gate's measures, each started when first needed."""

from __future__ import annotations

import compileall
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from penstock.perf import bench, grpc, models
from penstock.perf.calls import HOST, encode_grpc_message
from penstock.perf.generator.fleet import Fleet, fleet
from penstock.perf.generator.orders import INFER, GrpcCall, Load, Target, Window
from penstock.perf.payloads.repeated import Repeated
from penstock.perf.server_process import Process, bare_uvicorn, http_ready, penstock_over_grpc, running_server

WARM_UP_S, MEASURED_S, TURNS = 0.15, 0.7, 2
CONCURRENCY = 32
QUIET = "--log-info=false"
"""Passed to `serve`."""


class Testbed:
    """The servers and generators of a run, each started when first needed."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._servers: dict[str, tuple[Process, int]] = {}
        self._fleets: dict[tuple[str, str], Fleet] = {}
        self._cached: dict[Callable[[], float], float] = {}
        self.folder = models.DEFAULT_FOLDER
        models.make(self.folder)

    @property
    def iris(self) -> Path:
        return self.folder / "iris" / "1" / "model.onnx"

    def server(self, name: str) -> tuple[Process, int]:
        """Return a server and its gRPC port."""
        if name not in self._servers:
            self._servers[name] = self._stack.enter_context(_SERVERS[name](self))
        return self._servers[name]

    def fleet(self, name: str, call: str) -> Fleet:
        """Return one process of the generator that sends a server one of CALLS."""
        if (name, call) not in self._fleets:
            process, grpc_port = self.server(name)
            message = CALLS[call]()
            over_grpc = isinstance(message, _Message)
            port = grpc_port if over_grpc else process.port
            target = Target(HOST, port, grpc=GrpcCall(INFER) if over_grpc else None)
            self._fleets[name, call] = self._stack.enter_context(fleet(target, Repeated((bytes(message),))))
        return self._fleets[name, call]

    def drive(self, name: str, call: str, concurrency: int = CONCURRENCY) -> tuple[Window, float]:
        """Load a server. Returns: the Window, and the server's CPU seconds. Raises: RuntimeError on errors."""
        process, _ = self.server(name)
        running_server = self.fleet(name, call)
        running_server.start_load(Load(concurrency=concurrency))
        running_server.wait(WARM_UP_S)
        running_server.take()
        before_s = process.cpu_s()
        running_server.wait(MEASURED_S)
        window, spent_s = running_server.take(), process.cpu_s() - before_s
        running_server.halt()
        if window.errors or not len(window.ends_ns):
            raise RuntimeError(f"{name}, {call}: {len(window.ends_ns)} answers, errors: {dict(window.errors)}")
        return window, spent_s

    def cached(self, measure: Callable[[], float]) -> float:
        """Measure once what does not vary."""
        if measure not in self._cached:
            self._cached[measure] = measure()
        return self._cached[measure]

    def server_ratio(self, server_name: str, reference_name: str, call: str) -> float:
        """Return one server's CPU per request relative to another's, measured in turns."""
        spent_s, answered = (
            dict.fromkeys((server_name, reference_name), 0.0),
            dict.fromkeys((server_name, reference_name), 0),
        )
        for _ in range(TURNS):
            for name in (server_name, reference_name):
                window, cpu_s = self.drive(name, call)
                spent_s[name] += cpu_s
                answered[name] += len(window.ends_ns)
        return (spent_s[server_name] / answered[server_name]) / (spent_s[reference_name] / answered[reference_name])

    def client_us(self, name: str, call: str) -> float:
        """Return the generator's CPU per request."""
        window, _ = self.drive(name, call)
        return window.cpu_s / len(window.ends_ns) * 1e6


class _Message(bytes):
    """A gRPC message with its five-byte prefix."""


CALLS: Mapping[str, Callable[[], bytes]] = MappingProxyType(
    {
        "JSON": lambda: bench.make_call(bench.IRIS_64).request(),
        "binary": lambda: bench.make_call(bench.MLP_128).request(),
        "gRPC": lambda: _Message(encode_grpc_message(grpc.message(grpc.MANY))),
    }
)
"""What is sent."""


@contextlib.contextmanager
def _bare() -> Iterator[tuple[Process, int]]:
    with running_server([sys.executable, "-m", "penstock.perf.stub_server"], http_ready("/")) as process:
        yield process, process.port


@contextlib.contextmanager
def _echo() -> Iterator[tuple[Process, int]]:
    with bare_uvicorn() as process:
        yield process, 0


_Served = contextlib.AbstractContextManager[tuple[Process, int]]
_SERVERS: Mapping[str, Callable[[Testbed], _Served]] = MappingProxyType(
    {
        "penstock": lambda testbed: penstock_over_grpc(testbed.folder, QUIET),
        "uvicorn": lambda testbed: _echo(),
        "grpc.aio": lambda testbed: grpc.grpc_aio(testbed.iris),
        "bare": lambda testbed: _bare(),
    }
)


@contextlib.contextmanager
def testbed() -> Iterator[Testbed]:
    """Provide servers and generators until the block ends.

    Bytecode is compiled first: starts are measured with it, as in an installation, even with PYTHONDONTWRITEBYTECODE.
    """
    for package in ("server", "batching", "backends", "perf"):
        compileall.compile_dir(Path(__file__).parents[2] / package, quiet=2)
    with contextlib.ExitStack() as stack:
        yield Testbed(stack)
