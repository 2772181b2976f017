"""CUDA shared memory on a fake device (tests/backends/fake_cuda.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.cuda import HANDLE_BYTES
from penstock.backends.errors import Code, InferError
from penstock.server.v2 import cuda_regions
from penstock.server.v2.cuda_regions import CudaRegions
from penstock.server.v2.regions import Regions
from penstock.server.v2.system_regions import SystemRegions
from tests.backends.fake_cuda import FakeRuntime

MEMORY = bytes(range(32))
INVALID = 1
"""cudaErrorInvalidValue: the call has failed, the device goes on."""


class Client:
    """Another process's allocation of 32 bytes, and the server's regions on the same device."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.pointer = self.runtime.allocate(len(MEMORY), 0)
        self.runtime.write(self.pointer, 0, MEMORY)
        self.handle = self.runtime.export_handle(self.pointer, 0)
        self.runtime.calls.clear()
        self.regions = Regions(allowed=True)
        self.cuda = CudaRegions(self.regions, self.runtime)

    @property
    def memory(self) -> bytes:
        into = bytearray(len(MEMORY))
        self.runtime.read(self.pointer, 0, memoryview(into))
        return bytes(into)

    @property
    def mapped(self) -> tuple[int, int]:
        """How often the allocation was mapped and unmapped."""
        return self.runtime.calls["cudaIpcOpenMemHandle"], self.runtime.calls["cudaIpcCloseMemHandle"]


@pytest.fixture
def client() -> Client:
    return Client()


def refused(call: Any, *args: Any) -> tuple[Code, str]:
    with pytest.raises(InferError) as caught:
        call(*args)
    return caught.value.code, caught.value.message


def test_a_region_is_registered_read_written_and_unmapped(client: Client) -> None:
    cuda = client.cuda
    cuda.register("r", client.handle, 0, 16)
    lease = cuda.regions.lease("r", 4, 8)

    assert cuda.status("r") == [{"name": "r", "device_id": 0, "byte_size": 16}] == cuda.status()
    assert bytes(lease.read()) == MEMORY[4:12]
    lease.write(b"abc")
    assert client.memory == MEMORY[:4] + b"abc" + MEMORY[7:]
    cuda.unregister("r")
    assert client.mapped == (1, 0)
    lease.release()
    assert client.mapped == (1, 1)


def test_an_allocation_is_unmapped_when_its_registration_fails(client: Client) -> None:
    refusal = Code.INVALID, "failed to register shared memory region 'r': invalid args"

    assert refused(client.cuda.register, "r", client.handle, 0, 33) == refusal
    assert client.mapped == (1, 1)
    for device, byte_size in ((-1, 16), (2, 16), (2**31, 16), (0, 0)):
        assert refused(client.cuda.register, "r", client.handle, device, byte_size) == refusal
    assert refused(client.cuda.register, "r", b"x" * HANDLE_BYTES, 0, 16) == refusal
    assert refused(client.cuda.register, "r", client.handle[1:], 0, 16)[1] == (
        "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
    )
    assert client.cuda.status() == []


def test_an_allocation_registered_under_several_names_is_mapped_once(client: Client) -> None:
    for name in ("a", "b"):
        client.cuda.register(name, client.handle, 0, 32)
    assert refused(client.cuda.register, "c", client.handle, 0, 33)[0] is Code.INVALID
    assert client.mapped == (1, 0)
    client.cuda.unregister("a")
    assert bytes(client.cuda.regions.lease("b", 0, 4).read()) == MEMORY[:4]
    client.cuda.unregister("b")
    assert client.mapped == (1, 1)

    client.cuda.register("a", client.handle, 0, 32)
    assert client.mapped == (2, 1)


@pytest.mark.parametrize(
    ("doing", "call"),
    [
        ("map", "cudaIpcOpenMemHandle"),
        ("measure", "cuMemGetAddressRange_v2"),
        ("read", "cudaMemcpy"),
        ("write", "cudaMemcpy"),
        ("unmap", "cudaIpcCloseMemHandle"),
    ],
)
def test_a_device_error_is_logged_and_hidden_from_the_client(
    client: Client, doing: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = client.cuda
    client.runtime.fail(call, INVALID)
    code, text = Code.INVALID, ""
    if doing in ("map", "measure"):
        code, text = refused(cuda.register, "r", client.handle, 0, 16)
    else:
        cuda.register("r", client.handle, 0, 16)
        lease = cuda.regions.lease("r", 0, 4)
        if doing == "unmap":
            cuda.unregister()
            lease.release()
        else:
            code, text = refused(*((lease.read,) if doing == "read" else (lease.write, b"a")))

    assert code is Code.INVALID
    assert "the fake device" not in text
    assert "said by the fake device" in caplog.text


def test_a_failed_read_of_a_region_does_not_affect_later_reads(client: Client) -> None:
    client.cuda.register("r", client.handle, 0, 32)
    client.runtime.fail("cudaMemcpy", INVALID)

    assert refused(client.cuda.regions.lease("r", 0, 4).read)[1] == "unable to read shared memory region: 'r'"
    assert bytes(client.cuda.regions.lease("r", 0, 4).read()) == MEMORY[:4]


def test_the_array_of_a_lease_outlives_the_lease_and_its_region(client: Client) -> None:
    client.cuda.register("r", client.handle, 0, 32)
    lease = client.cuda.regions.lease("r", 8, 16)
    array = lease.array((2, 4), np.dtype(np.uint16))
    same, elsewhere = (
        lease.array((8,), np.dtype(np.uint16)),
        client.cuda.regions.lease("r", 4, 16).array((16,), np.dtype("u1")),
    )

    assert (lease.device, array.device, array.pointer) == (0, 0, client.pointer + 8)
    assert lease.is_same_memory(array)
    assert lease.is_same_memory(same)
    assert not lease.is_same_memory(elsewhere)
    assert not lease.is_same_memory(np.zeros(2))
    client.cuda.unregister()
    lease.release()
    assert lease.device == -1
    assert np.asarray(array).tobytes() == MEMORY[8:24]
    del array, same, elsewhere
    assert client.mapped == (1, 1)


def test_registering_without_a_cuda_runtime_is_unsupported_and_unregistering_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_regions, "find_runtime", lambda: None)
    cuda = CudaRegions(Regions(allowed=True))

    code, text = refused(cuda.register, "r", bytes(HANDLE_BYTES), 0, 16)
    assert code is Code.UNSUPPORTED
    assert text == "failed to register CUDA shared memory region: 'r', GPUs not supported: no CUDA runtime was found"
    cuda.unregister()
    assert cuda.status() == []


def test_a_region_name_belongs_to_either_system_or_cuda_shared_memory(client: Client, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(MEMORY)
    system, cuda = SystemRegions(client.regions, tmp_path), client.cuda
    system.register("s", "key", 0, 4)
    cuda.register("c", client.handle, 0, 4)

    assert system.regions.lease("s", 0, 4).device == -1
    assert refused(cuda.register, "s", client.handle, 0, 4)[0] is Code.ALREADY_EXISTS
    assert refused(cuda.status, "s") == (
        Code.NOT_FOUND, "The region named 's' is registered as system shared memory, not CUDA shared memory"
    )  # fmt: skip
    assert refused(system.status, "c")[1].endswith("registered as CUDA shared memory, not system shared memory")
    assert refused(cuda.status, "x") == (Code.NOT_FOUND, "Unable to find cuda shared memory region: 'x'")
    system.unregister("c")
    cuda.unregister()
    assert [region["name"] for region in system.status()] == ["s"]
