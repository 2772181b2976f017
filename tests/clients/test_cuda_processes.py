"""CUDA shared memory between processes: a server started as usual on a stub CUDA runtime, and its clients."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http

from penstock.backends.cuda import CudaRuntime
from penstock.perf.generator.orders import GrpcCall, Target
from penstock.perf.payloads import cuda_regions
from penstock.perf.payloads.preparing import prepare_payloads
from penstock.perf.profiling.control import control_for
from penstock.perf.profiling.model import describe_model
from penstock.perf.profiling.options import Input
from tests.backends.cudart_stub import build, needs_compiler
from tests.clients import models
from tests.clients.cuda_bindings import cuda_shared_memory

pytestmark = [pytest.mark.slow, needs_compiler]
CONFIG = "instance_group { kind: KIND_CPU }"


@contextmanager
def served(root: Path, environment: dict[str, str], *words: str) -> Iterator[tuple[int, int]]:
    """Start a server; return its HTTP and gRPC ports."""
    ports = ["--http-port=0", "--grpc-port=0", "--allow-metrics=false"]
    command = [sys.executable, "-m", "penstock.server.cli", "serve", str(root), *ports, "--allow-client-shm=true"]
    env = {**os.environ, **environment}
    env.pop("PENSTOCK_TEST_FRONTS", None)  # not a setting
    with subprocess.Popen(
        [*command, "--log-format=json", *words], stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stderr is not None
        try:
            entry = next(line for line in process.stderr if "HTTP on" in line)
            found = re.search(r"HTTP on http://127.0.0.1:(\d+).*gRPC on \S*?127.0.0.1:(\d+)", json.loads(entry)["msg"])
            assert found is not None, entry
            assert any('"ready, serving' in line for line in process.stderr)
            yield int(found[1]), int(found[2])
        finally:
            process.terminate()
            process.communicate(timeout=20)


def test_a_client_and_a_server_process_share_memory_allocated_by_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = build(tmp_path)
    memory = Path(environment["STUB_CUDA_FOLDER"])
    monkeypatch.setenv("STUB_CUDA_FOLDER", str(memory))
    runtime = CudaRuntime(str(tmp_path / "libcudart.so.13"), str(tmp_path / "libcuda.so.1"))
    models.write_identity(root := tmp_path / "models", "same", CONFIG)
    with served(root, environment) as (http, grpc), cuda_shared_memory(runtime) as cudashm:
        for triton, port in ((over_http, http), (over_grpc, grpc)):
            with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
                _round_trip(triton, client, cudashm)
        cudashm.allocated_shm_regions.clear()
        monkeypatch.setattr(cuda_regions, "find_runtime", lambda: runtime)
        for target in (Target("127.0.0.1", http), Target("127.0.0.1", grpc, grpc=GrpcCall("/m"))):
            control, payload_input = control_for(target), Input(shared_memory="cuda", shapes={"x": (3,)})
            with prepare_payloads(describe_model(control, "same"), payload_input, target, control) as found:
                assert len(list(memory.iterdir())) == 2
                if target.grpc is None:
                    assert _answered(http, next(found.payloads.stream(0))).startswith(b"HTTP/1.1 200")

    assert list(memory.iterdir()) == []


def _answered(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        return connection.recv(4096)


def _round_trip(triton: Any, client: Any, cudashm: Any) -> None:
    """Send a tensor there and back in device memory that is registered twice; then unregister it."""
    values = np.arange(16, dtype=np.float32).reshape(1, 16)
    input_region, output_region = (cudashm.create_shared_memory_region(name, 64, 0) for name in ("given", "wanted"))
    cudashm.set_shared_memory_region(input_region, [values])
    for name, region in (("given", input_region), ("again", input_region), ("wanted", output_region)):
        client.register_cuda_shared_memory(name, cudashm.get_raw_handle(region), 0, 64)
    x = triton.InferInput("x", [1, 16], "FP32").set_shared_memory("again", 64)
    y = triton.InferRequestedOutput("y")
    y.set_shared_memory("wanted", 64)
    client.infer("same", [x], outputs=[y])
    np.testing.assert_array_equal(cudashm.get_contents_as_numpy(output_region, np.float32, [1, 16]), values)
    client.unregister_cuda_shared_memory()
