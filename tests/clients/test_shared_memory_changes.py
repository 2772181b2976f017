"""Changes of shared memory while its requests are queued: it is read when their batch is gathered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from penstock.backends import onnx_cuda_binding
from penstock.server.repository import mirrors
from penstock.server.repository.gpus import Gpus
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import FakeGround, fake_cuda_loader
from tests.clients import models
from tests.clients.gated_onnxruntime import Gated
from tests.clients.parallel_requests import Asking, answers
from tests.fakes import PATIENCE_S
from tests.live import live_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="front ends copy what they decode"),
]

WIDTH = 8192
NBYTES = 4 * WIDTH
GONE = "its file is smaller than when it was registered"


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


class Sharing(Asking):
    """Clients whose requests may refer to shared memory: regions of one row each, each in its own file."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.files: dict[str, Path] = {}

    def share(self, name: str, value: float) -> None:
        """Register a region with a row of a value."""
        self.files[name] = file = Path("/dev/shm", f"late_{os.getpid()}_{name}")
        file.write_bytes(np.full(WIDTH, value, np.float32).tobytes())
        with self.client() as client:
            client.register_system_shared_memory(name, file.name, NBYTES)

    def unregister(self, name: str = "") -> None:
        with self.client() as client:
            client.unregister_system_shared_memory(name)

    def forget(self) -> None:
        for file in self.files.values():
            file.unlink(missing_ok=True)

    def ask_shared(self, name: str) -> Future[Any]:
        """Send a request with a region; once it is queued, return its future answer: a number or an error's text."""
        before = self.waiting()
        sent = self.pool.submit(self.infer, name)
        self.until_waiting(before + 1)
        return sent

    def infer(self, name: str) -> float | str:
        """Send a request with a region, and return its answer: a number or an error's text."""
        tensor = self._triton.InferInput("x", [1, WIDTH], "FP32")
        tensor.set_shared_memory(name, NBYTES)
        with self.client() as client:
            try:
                return float(client.infer(self.model, [tensor]).as_numpy("y")[0, -1])
            except Exception as failure:  # noqa: BLE001 - it is what was answered
                return str(failure)


@contextmanager
def sharing(root: Path, triton: Any) -> Iterator[tuple[Sharing, Gated]]:
    """Serve a model whose only Instance is kept busy by a request of the value 0 until its gate is opened."""
    models.write_identity(root, "m", "max_batch_size: 8 instance_group { count: 1 }")
    (root / "m" / "penstock.toml").write_text('[batching]\nexecutor = "thread"\n')
    gated = Gated()
    with (
        live_server(root, loaders=gated.loaders, allow_client_shm=True) as live,
        Sharing(live, triton, "m") as asking,
    ):
        gated.runs.clear()
        gated.gate.close()
        first = asking.ask(1, 0.0)
        live.call(gated.gate.entered())
        try:
            yield asking, gated
            assert answers([first])[0].error == ""
        finally:
            gated.gate.open()
            asking.forget()


def test_a_client_that_truncates_its_file_fails_only_its_own_request(tmp_path: Path, triton: Any) -> None:
    with sharing(tmp_path, triton) as (asking, gated):
        for number in range(1, 5):
            asking.share(f"r{number}", number)
        sent = [asking.ask_shared(f"r{number}") for number in range(1, 5)]
        body = asking.queue(1, value=5.0, width=WIDTH)
        os.truncate(asking.files["r3"], 0)
        gated.gate.open()
        found = [each.result(PATIENCE_S) for each in sent]

        assert [found[0], found[1], found[3]] == [1.0, 2.0, 4.0]
        assert GONE in found[2]
        assert "'r3'" in found[2]
        assert answers(body)[0].value == 5.0
        assert [sorted(run) for run in gated.runs[1:]] == [[1, 2], [4, 5]]


def test_a_region_unregistered_while_a_request_waits_is_still_read(tmp_path: Path, triton: Any) -> None:
    with sharing(tmp_path, triton) as (asking, gated):
        asking.share("r", 1)
        first = asking.ask_shared("r")
        asking.unregister("r")
        asking.files["r"].unlink()
        asking.share("r", 2)
        second = asking.ask_shared("r")
        asking.unregister()
        gated.gate.open()

        assert (first.result(PATIENCE_S), second.result(PATIENCE_S)) == (1.0, 2.0)
        assert gated.runs[1:] == [[1.0, 2.0]]


def test_a_write_of_the_client_before_the_batch_is_gathered_is_visible(tmp_path: Path, triton: Any) -> None:
    with sharing(tmp_path, triton) as (asking, gated):
        asking.share("r", 1)
        sent = asking.ask_shared("r")
        with asking.files["r"].open("r+b") as file:
            file.write(np.full(WIDTH, 7, np.float32).tobytes())
        gated.gate.open()

        assert sent.result(PATIENCE_S) == 7.0


def test_large_regions_are_pinned_and_copied_by_the_gpu(tmp_path: Path, triton: Any) -> None:
    """Two clients, one of which truncates its file after it was pinned, and a third whose file cannot be pinned."""
    device = FakeRuntime()
    models.write_identity(tmp_path, "m", "max_batch_size: 3 instance_group { kind: KIND_GPU gpus: [ 0 ] }")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrors, "Gpus", lambda *_: Gpus.from_numbers((0,)))
        patch.setattr(onnx_cuda_binding, "PINNED_BYTES", NBYTES)
        loaders = {"onnxruntime": fake_cuda_loader(FakeGround(device))}
        with (
            live_server(tmp_path, loaders=loaders, allow_client_shm=True) as live,
            Sharing(live, triton, "m") as asking,
        ):
            before = device.alive["pinned"]
            try:
                for number in range(1, 4):
                    asking.share(f"r{number}", number)
                for _ in range(2):
                    assert [asking.infer(f"r{number}") for number in (1, 2)] == [1.0, 2.0]
                device.fail("cudaHostRegister", 1)
                assert [asking.infer("r3") for _ in range(2)] == [3.0, 3.0]
                assert device.calls["cudaHostRegister"] == 3
                assert device.alive["pinned"] == before + 2

                os.truncate(asking.files["r2"], 0)
                assert GONE in str(asking.infer("r2"))
                asking.unregister()
                asking.until(lambda: device.alive["pinned"] == before)
            finally:
                asking.forget()


def test_a_client_that_dies_while_its_request_waits_does_not_affect_others(tmp_path: Path) -> None:
    program = """
import os, sys, tritonclient.http as triton
given = triton.InferInput("x", [1, 8192], "FP32")
given.set_shared_memory("dead", 32768)
triton.InferenceServerClient(sys.argv[1]).infer("m", [given])
"""
    with sharing(tmp_path, tritonclient.http) as (asking, gated):
        asking.share("alive", 1)
        asking.share("dead", 2)
        dying = subprocess.Popen([sys.executable, "-c", program, asking.live.address])
        asking.until_waiting(1)
        sent = asking.ask_shared("alive")
        asking.files["dead"].unlink()
        dying.kill()
        dying.wait(PATIENCE_S)
        asking.until_waiting(1)
        gated.gate.open()

        assert sent.result(PATIENCE_S) == 1.0
        assert gated.runs[1:] == [[1.0]]
