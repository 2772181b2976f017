"""The CUDA runtime through ctypes, with the stub libraries of cudart_stub.c."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from penstock.backends import cuda
from penstock.backends.cuda import (
    LOST_STATUSES,
    CudaError,
    CudaRuntime,
    find_runtime,
    to_infer_error,
    unavailable_reason,
)
from penstock.backends.errors import Code, DeviceLost, InferError, OutOfMemory
from penstock.backends.onnx_cuda import load_on_gpu
from tests.backends.contract import batched, float_rows, infer
from tests.backends.cudart_stub import build, needs_compiler
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import FakeGround
from tests.backends.onnx_models import contract_model
from tests.shared import SharedArrays

SIZE = 1 << 12


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build(tmp_path_factory.mktemp("cudart"))


@pytest.fixture
def runtime(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:
    monkeypatch.setenv("STUB_CUDA_FOLDER", environment["STUB_CUDA_FOLDER"])
    monkeypatch.setenv("STUB_CUDA_DEVICES", "2")
    folder = Path(environment["LD_LIBRARY_PATH"])
    return CudaRuntime(str(folder / "libcudart.so.13"), str(folder / "libcuda.so.1"))


@needs_compiler
class TestRuntime:
    def test_the_runtime_reports_its_devices(self, runtime: CudaRuntime) -> None:
        assert runtime.device_count() == 2
        assert runtime.pci_bus_id(1) != runtime.pci_bus_id(0)
        assert runtime.device_name(0)
        assert [part.isdecimal() for part in runtime.capability(0).split(".")] == [True, True]
        free, total = runtime.memory_info(1)
        assert 0 < free <= total

    def test_copies_on_two_streams_follow_the_order_of_events(self, runtime: CudaRuntime) -> None:
        there, first, second = runtime.allocate(SIZE, 1), *(runtime.allocate_pinned(SIZE, 1) for _ in range(2))
        streams, events = [runtime.create_stream(1) for _ in range(2)], [runtime.create_event(1) for _ in range(2)]
        ctypes.memset(first, 7, SIZE)
        runtime.copy(there, first, SIZE, streams[0])
        runtime.record_event(events[0], streams[0])
        runtime.wait_event(streams[1], events[0])
        runtime.copy(second, there, SIZE, streams[1])
        runtime.record_event(events[1], streams[1])
        runtime.synchronize_event(events[1])
        runtime.synchronize_stream(streams[0])

        assert runtime.is_event_done(events[1])
        assert runtime.elapsed_ns(*events) >= 0
        assert ctypes.string_at(second, SIZE) == b"\7" * SIZE
        for stream, event in zip(streams, events, strict=True):
            runtime.destroy_stream(stream, 1)
            runtime.destroy_event(event, 1)
        runtime.free_pinned(first, 1)
        runtime.free_pinned(second, 1)
        runtime.free(there, 1)

    def test_memory_at_64_bit_addresses_is_read_and_written(self, runtime: CudaRuntime) -> None:
        pointer = runtime.allocate(SIZE, 0)
        runtime.write(pointer + 100, 0, memoryview(b"12345678"))
        into = bytearray(10)
        runtime.read(pointer + 99, 0, memoryview(into))

        assert into[1:9] == b"12345678"
        assert pointer > 1 << 32
        assert runtime.bytes_to_end(pointer + 100, 0) == SIZE - 100
        runtime.free(pointer, 0)

    def test_memory_is_shared_with_another_process(self, runtime: CudaRuntime, environment: dict[str, str]) -> None:
        pointer = runtime.allocate(SIZE, 0)
        runtime.write(pointer, 0, b"from here")
        program = f"""
from penstock.backends.cuda import find_runtime
runtime = find_runtime()
there = runtime.open_handle(bytes.fromhex({runtime.export_handle(pointer, 0).hex()!r}), 0)
into = bytearray(9)
runtime.read(there, 0, memoryview(into))
runtime.write(there, 0, b"from there")
runtime.close_handle(there, 0)
print(into.decode(), runtime.device_count())
"""
        child = subprocess.run(
            [sys.executable, "-c", program], env=os.environ | environment, check=True, capture_output=True, text=True
        )
        into = bytearray(10)
        runtime.read(pointer, 0, memoryview(into))

        assert child.stdout.split("\n")[0] == "from here 2"
        assert bytes(into) == b"from there"
        runtime.free(pointer, 0)

    def test_pinning_memory_twice_or_without_pages_is_an_error(self, runtime: CudaRuntime, tmp_path: Path) -> None:
        shared = SharedArrays(tmp_path)
        whole, short = (shared.hold(name, np.zeros(5000, np.float32), 0).memory for name in ("whole", "short"))
        shared.truncate("short", 4096)
        runtime.pin(whole.pointer, 20000, 1)
        for memory, status in ((whole, 712), (short, 1)):
            with pytest.raises(CudaError) as caught:
                runtime.pin(memory.pointer, 20000, 1)
            assert caught.value.status == status
        runtime.unpin(whole.pointer, 1)
        with pytest.raises(CudaError):
            runtime.unpin(whole.pointer, 1)

    def test_a_failed_call_raises_cuda_error_with_its_status(
        self, runtime: CudaRuntime, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(CudaError) as caught:
            runtime.set_device(2)
        assert (caught.value.status, caught.value.call) == (101, "cudaSetDevice")
        monkeypatch.setenv("STUB_CUDA_FAIL", "cudaMalloc:2,cudaEventQuery:600")
        with pytest.raises(CudaError, match=r"^cudaMalloc: CUDA error 2: "):
            runtime.allocate(SIZE, 0)
        event = runtime.create_event(0)
        assert not runtime.is_event_done(event)
        monkeypatch.setenv("STUB_CUDA_FAIL", "cudaEventQuery:700")
        with pytest.raises(CudaError, match="700"):
            runtime.is_event_done(event)
        runtime.destroy_event(event, 0)

    def test_a_failed_call_leaves_no_last_error_for_onnx_runtime(self, environment: dict[str, str]) -> None:
        folder = Path(environment["LD_LIBRARY_PATH"])
        runtime = CudaRuntime(str(folder / "libcudart.so.13"), str(folder / "libcuda.so.1"))
        with pytest.raises(CudaError):
            runtime.set_device(99)

        assert ctypes.CDLL(str(folder / "libcudart.so.13")).cudaGetLastError() == 0


class _AtOnce(CudaRuntime):
    """The stub's streams run queued work immediately, and so does a session on it."""

    alive = SimpleNamespace(device=0)

    def compute(self, stream: int, do: Callable[[], object]) -> None:
        do()

    def take(self, size: int, device: int) -> None:
        pass

    def memory_at(self, pointer: int, size: int) -> SimpleNamespace:
        assert self.bytes_to_end(pointer, 0) >= size
        return self.alive


@needs_compiler
def test_a_backend_runs_on_the_stub_library_as_on_the_fake_device(runtime: CudaRuntime, tmp_path: Path) -> None:
    runtime.__class__ = _AtOnce
    ground: Any = FakeGround(cast("FakeRuntime", runtime))
    free = runtime.memory_info(0)[0]
    backend = load_on_gpu(contract_model("rows", tmp_path / "model.onnx"), 0, {}, ground)
    bindings = [backend.bind(batched(backend.graph), 8) for _ in range(2)]
    for turn in range(3):
        for binding in bindings:
            x = float_rows(5, turn)
            doubled, total = infer(binding, [x], (0, 1))
            np.testing.assert_array_equal(x * 2, doubled)
            np.testing.assert_array_equal(x.sum(axis=1), total)
    assert runtime.memory_info(0)[0] < free
    backend.close()
    assert runtime.memory_info(0)[0] == free


class TestFinding:
    @pytest.fixture(autouse=True)
    def _anew(self) -> Iterator[None]:
        cuda._load_runtime.cache_clear()
        yield
        cuda._load_runtime.cache_clear()

    def test_a_missing_driver_is_the_reason_for_no_runtime(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "DRIVER", "libnothing.so.1")

        assert find_runtime() is None
        assert unavailable_reason().startswith("no NVIDIA driver was found (libnothing.so.1: ")

    def test_a_missing_runtime_library_is_the_reason_for_no_runtime(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda, "DRIVER", "libc.so.6")
        monkeypatch.setattr(cuda, "_LIBRARY_NAMES", ("libnothing.so",))
        monkeypatch.setattr(cuda, "_MAPS", Path("/none"))
        monkeypatch.setattr(sys, "path", [])

        assert find_runtime() is None
        assert unavailable_reason().startswith("no CUDA runtime library could be loaded (libnothing.so: ")

    def test_loaded_runtime_libraries_come_first_and_pip_libraries_last(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        maps, folder = tmp_path / "maps", tmp_path / "nvidia" / "cu13" / "lib"
        maps.write_text("7f00-7f01 r-xp 00000000 00:00 1  /opt/x/libcudart.so.13.0\n7f02 rw-p 0 00:00 1 /usr/libc.so\n")
        folder.mkdir(parents=True)
        (folder / "libcudart.so.13").touch()
        monkeypatch.setattr(cuda, "_MAPS", maps)
        monkeypatch.setattr(sys, "path", [str(tmp_path)])

        found = list(cuda._candidates())
        assert found[0] == "/opt/x/libcudart.so.13.0"
        assert found[-1] == str(folder / "libcudart.so.13")
        assert "libcudart.so.13" in found

    @needs_compiler
    def test_find_runtime_returns_one_shared_runtime(
        self, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(environment["LD_LIBRARY_PATH"])
        monkeypatch.setattr(cuda, "DRIVER", str(folder / "libcuda.so.1"))
        monkeypatch.setattr(cuda, "_LIBRARY_NAMES", (str(folder / "libcudart.so.13"),))
        monkeypatch.setattr(cuda, "_MAPS", Path("/none"))

        assert find_runtime() is not None
        assert find_runtime() is find_runtime()
        assert unavailable_reason() == ""


def test_a_runtime_with_missing_libraries_is_an_error() -> None:
    with pytest.raises(OSError, match="no-such-library"):
        CudaRuntime("no-such-library.so")
    with pytest.raises(AttributeError):
        CudaRuntime("libc.so.6", "libc.so.6")


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [(2, OutOfMemory, Code.OVERLOADED), (1, InferError, Code.INTERNAL), (901, InferError, Code.INTERNAL)]
    + [(status, DeviceLost, Code.NOT_READY) for status in sorted(LOST_STATUSES)],
)
def test_a_cuda_error_becomes_an_infer_error_by_its_status(status: int, kind: type, code: Code) -> None:
    error = to_infer_error(CudaError(status, "cudaMalloc", "words"))

    assert type(error) is kind
    assert error.code is code
    assert error.message == f"cudaMalloc: CUDA error {status}: words"
