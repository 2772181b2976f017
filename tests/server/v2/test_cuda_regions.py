"""CUDA shared memory, against a runtime of our own: an object, and a library that a compiler makes on the spot."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.v2 import cuda_regions
from penstock.server.v2.cuda_regions import HANDLE_BYTES, CudaError, CudaRegions, CudaRuntime
from penstock.server.v2.regions import Regions, SystemRegions

HANDLE = b"h" * HANDLE_BYTES
MEMORY = bytes(range(32))
STUB = """
#include <stddef.h>
#include <string.h>
static char memory[32];
static int open_handles, device;
typedef struct { char reserved[64]; } Handle;
int cudaSetDevice(int number) { device = number; return number > 1 ? 101 : 0; }
int cudaIpcOpenMemHandle(void **pointer, Handle handle, unsigned flags) {
    if (handle.reserved[0] != 'h' || handle.reserved[63] != 'h' || flags != 1) return 201;
    *pointer = memory; open_handles++; return 0;
}
int cudaIpcCloseMemHandle(void *pointer) { open_handles--; return pointer == memory ? 0 : 1; }
int cudaMemcpy(void *to, const void *from, size_t count, int kind) {
    if (kind != 1 && kind != 2) return 21;
    memcpy(to, from, count); return 0;
}
const char *cudaGetErrorString(int status) { return "stub error"; }
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long pointer) {
    *base = (unsigned long long)memory; *size = sizeof memory; return 0;
}
int handles(void) { return open_handles; }
"""


class FakeRuntime:
    """One device with 32 bytes."""

    def __init__(self) -> None:
        self.memory = bytearray(MEMORY)
        self.calls: list[str] = []
        self.failing = ""

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if self.failing == what:
            raise CudaError(f"{what}: 999 a secret of the device")

    def open_handle(self, handle: bytes, device: int) -> int:
        self._do("open")
        return 1000

    def close_handle(self, pointer: int, device: int) -> None:
        self._do("close")

    def size(self, pointer: int, device: int) -> int:
        self._do("size")
        return 32

    def read(self, pointer: int, device: int, into: memoryview) -> None:
        self._do("read")
        into[:] = self.memory[pointer - 1000 : pointer - 1000 + len(into)]

    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None:
        self._do("write")
        self.memory[pointer - 1000 : pointer - 1000 + len(raw)] = raw


def made(runtime: Any) -> CudaRegions:
    return CudaRegions(Regions(allowed=True), runtime)


def refused(call: Any, *args: Any) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        call(*args)
    return caught.value.code, caught.value.message


def test_a_region_is_registered_read_written_and_closed() -> None:
    runtime = FakeRuntime()
    cuda = made(runtime)
    cuda.register("r", HANDLE, 0, 16)
    lease = cuda.lease("r", 4, 8)

    assert cuda.status("r") == [{"name": "r", "device_id": 0, "byte_size": 16}] == cuda.status()
    assert bytes(lease.read()) == MEMORY[4:12]
    lease.write(b"abc")
    assert runtime.memory[:8] == MEMORY[:4] + b"abc" + MEMORY[7:8]
    cuda.unregister("r")
    assert "close" not in runtime.calls
    lease.release()
    assert runtime.calls[-1] == "close"


def test_what_was_not_registered_is_closed_again() -> None:
    runtime = FakeRuntime()
    refusal = Code.INVALID, "failed to register shared memory region 'r': invalid args"

    assert refused(made(runtime).register, "r", HANDLE, 0, 33) == refusal
    assert runtime.calls == ["open", "size", "close"]
    assert refused(made(runtime).register, "r", HANDLE, -1, 16) == refusal
    assert refused(made(runtime).register, "r", HANDLE, 0, 0) == refusal
    assert refused(made(runtime).register, "r", HANDLE[1:], 0, 16)[1] == (
        "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
    )


@pytest.mark.parametrize("failing", ["open", "size", "read", "write", "close"])
def test_what_the_device_says_stays_in_the_log(failing: str, caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime()
    runtime.failing = failing
    cuda = made(runtime)
    if failing in ("open", "size"):
        code, text = refused(cuda.register, "r", HANDLE, 0, 16)
    else:
        cuda.register("r", HANDLE, 0, 16)
        lease = cuda.lease("r", 0, 4)
        code, text = Code.INVALID, ""
        if failing == "close":
            cuda.unregister()
            lease.release()
        else:
            code, text = refused(*((lease.read,) if failing == "read" else (lease.write, b"a")))

    assert code is Code.INVALID
    assert "secret" not in text
    assert "secret" in caplog.text


def test_without_a_runtime_there_is_a_clear_501_and_unregistering_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_regions, "find_runtime", lambda: None)
    cuda = CudaRegions(Regions(allowed=True))

    code, text = refused(cuda.register, "r", HANDLE, 0, 16)
    assert code is Code.UNSUPPORTED
    assert text == "failed to register CUDA shared memory region: 'r', GPUs not supported: no CUDA runtime was found"
    cuda.unregister()
    assert cuda.status() == []


def test_a_name_belongs_to_one_kind(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(MEMORY)
    regions = Regions(allowed=True)
    system, cuda = SystemRegions(regions, tmp_path), CudaRegions(regions, FakeRuntime())
    system.register("s", "key", 0, 4)
    cuda.register("c", HANDLE, 0, 4)

    assert refused(cuda.register, "s", HANDLE, 0, 4)[0] is Code.ALREADY_EXISTS
    assert refused(cuda.status, "s") == (
        Code.NOT_FOUND, "The region named 's' is registered as system shared memory, not CUDA shared memory"
    )  # fmt: skip
    assert refused(system.status, "c")[1].endswith("registered as CUDA shared memory, not system shared memory")
    assert refused(cuda.status, "x") == (Code.NOT_FOUND, "Unable to find cuda shared memory region: 'x'")
    system.unregister("c")
    cuda.unregister()
    assert [region["name"] for region in system.status()] == ["s"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_the_runtime_is_called_as_its_header_says(tmp_path: Path) -> None:
    source, library = tmp_path / "stub.c", tmp_path / "libstub.so"
    source.write_text(STUB)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    handles = ctypes.CDLL(str(library)).handles
    cuda = made(CudaRuntime(str(library), str(library)))
    cuda.register("r", HANDLE, 1, 32)
    lease = cuda.lease("r", 8, 8)
    lease.write(memoryview(b"12345678"))

    assert bytes(lease.read()) == b"12345678"
    assert bytes(cuda.lease("r", 0, 32).read()) == bytes(8) + b"12345678" + bytes(16)
    assert handles() == 1
    assert refused(cuda.register, "a", b"x" * HANDLE_BYTES, 0, 4)[0] is Code.INVALID
    assert refused(cuda.register, "a", HANDLE, 2, 4)[0] is Code.INVALID
    assert refused(cuda.register, "a", HANDLE, 0, 33)[0] is Code.INVALID
    lease.release()
    cuda.unregister()
    assert handles() == 0


def test_libraries_that_are_not_there_are_no_runtime() -> None:
    with pytest.raises(OSError, match="no-such-library"):
        CudaRuntime("no-such-library.so")
