"""Servers: a `penstock serve` for a single part, and the load on one of its models over one of the transports."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.perf import processes
from penstock.perf.calls import HOST
from penstock.perf.generator.fleet import Fleet, fleet
from penstock.perf.generator.orders import INFER, GrpcCall, Load, Target, Window
from penstock.perf.payloads.preparing import prepare_payloads
from penstock.perf.profiling.control import HttpControl
from penstock.perf.profiling.model import describe_model
from penstock.perf.profiling.options import Input
from penstock.perf.server_process import Process, free_port

from .context import CheckContext
from .models import Variant, requests_file

PROGRAM = "penstock.server.cli"
READY_TIMEOUT_S = 60.0
_CLIENTS = 6
"""Processes of the generator on a large machine; on a small one, half of its cores."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One transport: its name, and how tensors travel."""

    name: str
    grpc: bool = False
    shared_memory: str = "none"


TRANSPORTS = (
    Transport("HTTP binary"),
    Transport("gRPC", grpc=True),
    Transport("system shared memory", shared_memory="system"),
    Transport("CUDA shared memory", shared_memory="cuda"),
)


class Server:
    """A server with the context's repository, which loads only what it is told to."""

    def __init__(self, child: subprocess.Popen[bytes], ports: tuple[int, int], log: Path) -> None:
        self.process = Process(child.pid, ports[0])
        self.grpc_port = ports[1]
        self.control = HttpControl(Target(HOST, ports[0]), {})
        self._child = child
        self._log = log

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def log_tail(self) -> str:
        """Return the end of its log."""
        return self._log.read_text("utf-8", "replace")[-4000:]

    @property
    def engine(self) -> int:
        """The process that has the models: the engine of a supervisor, otherwise the server itself."""
        living = processes.living()
        family = processes.descended([self.process.pid], living)
        return next((pid for pid in family if pid in living and "engine" in living[pid].name), self.process.pid)

    def states(self) -> dict[str, tuple[str, str]]:
        """Return the state of each model in the repository, and the reason."""
        index = json.loads(self.process.request("POST", "/v2/repository/index", b"{}"))
        return {each["name"]: (each.get("state", ""), each.get("reason", "")) for each in index}

    def batches(self, name: str) -> dict[int, tuple[int, int]]:
        """Return, for each batch size that a model has run, the number of batches and their compute time in ns."""
        statistics = json.loads(self.process.request("GET", f"/v2/models/{name}/stats"))["model_stats"][-1]
        batches = {}
        for each in statistics.get("batch_stats", ()):
            computed = each["compute_infer"]
            batches[int(each["batch_size"])] = int(computed["count"]), int(computed["ns"])
        return batches


@contextmanager
def serving(
    context: CheckContext, name: str, *options: str, environ: Mapping[str, str] | None = None, program: str = PROGRAM
) -> Iterator[Server]:
    """Run a server until the block ends; it loads no model by itself. Raises: RuntimeError if it does not start."""
    ports = (free_port(), free_port())
    repository = context.folder / "models"
    repository.mkdir(exist_ok=True)
    command = [
        sys.executable, "-m", program, "serve", str(repository), "--model-control-mode=explicit",
        "--allow-client-shm", "--metrics-port", "0", "--http-port", str(ports[0]), "--grpc-port", str(ports[1]),
        *options,
    ]  # fmt: skip
    log = context.folder / f"{name}.server.log"
    with (
        log.open("wb") as log_file,
        subprocess.Popen(command, stdout=log_file, stderr=log_file, env=os.environ | dict(environ or {})) as child,
    ):
        server = Server(child, ports, log)
        try:
            _await(server, min(READY_TIMEOUT_S, context.remaining_s()))
            yield server
        finally:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(10)
            child.kill()


def _await(server: Server, seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while True:
        try:
            server.process.request("GET", "/v2/health/live")
        except (OSError, RuntimeError) as error:
            if not server.alive or time.monotonic() > end_s:
                raise RuntimeError(f"the server did not start: {server.log_tail()[-300:]}") from error
            time.sleep(0.05)
        else:
            return


def config_of(context: CheckContext, name: str, rows: int, **extra_fields: Any) -> dict[str, Any]:
    """Return the ModelConfig that a model is loaded with."""
    kind = {"kind": "KIND_GPU", "gpus": [0]} if context.on_gpu else {"kind": "KIND_CPU"}
    queue = {"default_queue_policy": {"max_queue_size": 0}}
    return {
        "name": name, "backend": "onnxruntime", "max_batch_size": rows, "instance_group": [{"count": 1, **kind}],
        "dynamic_batching": queue, **extra_fields,
    }  # fmt: skip


@contextmanager
def driving(
    context: CheckContext, server: Server, variant: Variant, transport: Transport, *, rows: int, slots: int
) -> Iterator[Fleet]:
    """Yield a fleet that sends a loaded model requests of this many rows. Raises: whatever keeps it from starting."""
    port = server.grpc_port if transport.grpc else server.process.port
    target = Target(HOST, port, grpc=GrpcCall(INFER) if transport.grpc else None)
    input_file = requests_file(context.folder, variant)
    input_options = Input(
        (str(input_file),) if input_file else ("random",), batch=rows, shared_memory=transport.shared_memory
    )
    model = describe_model(server.control, variant.name)
    clients = min(max((os.cpu_count() or 1) // 2, 1), _CLIENTS)
    with (
        prepare_payloads(model, input_options, target, server.control, slots=slots) as ready,
        fleet(target, ready.payloads, clients) as running,
    ):
        yield running


def loaded(running: Fleet, load: Load, seconds: float) -> Window:
    """Keep up a load: first for a warm-up that is not counted, then for `seconds`.

    Raises: RuntimeError without an answer.
    """
    running.start_load(load)
    try:
        running.wait(seconds / 3)
        running.take()
        running.wait(seconds)
        window = running.take()
    finally:
        running.halt()
        running.take()
    if window.failure or not len(window.ends_ns):
        worst = window.errors.most_common(1)
        raise RuntimeError(window.failure or f"no request was answered: {worst[0][0] if worst else 'none ended'}")
    return window
