from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import uvloop

from penstock.backends.cuda import CudaError
from penstock.backends.errors import InferError
from penstock.server.fronts.shared_state import SharedState
from penstock.server.grpc.method import Status
from penstock.server.protobuf import service_pb2
from penstock.server.serve import Server
from penstock.server.v2.cuda_regions import CudaRegions
from penstock.server.v2.regions import Regions
from tests.server.fronts.control_sides import Client, FrontEnd, engine_of, turns
from tests.server.ipc.wire_pairs import memory_use
from tests.server.v2.rpc.calls import FakeCall

SERVICE = "/inference.GRPCInferenceService/"
pb = service_pb2()


@pytest.fixture
def key() -> Iterator[str]:
    """A shared memory object of 8 bytes."""
    path = Path("/dev/shm") / f"test_{uuid.uuid4().hex}"
    path.write_bytes(b"12345678")
    yield "/" + path.name
    path.unlink(missing_ok=True)


def fronts_of(server: Server, count: int, patience_s: float = 10.0) -> tuple[SharedState, list[FrontEnd]]:
    state = SharedState(server.shared_memory, server.observability.logging, patience_s)
    app, methods = server.app(), server.grpc_methods()
    return state, [FrontEnd(app, methods, state) for _ in range(count)]


async def register(front: FrontEnd, key: str, name: str = "r") -> Client:
    body = json.dumps({"key": key, "byte_size": 8}).encode()
    return await Client("POST", f"/v2/systemsharedmemory/region/{name}/register", body).ask(front.app)


def read(front: FrontEnd, name: str = "r") -> bytes:
    return read_of(front.memory.regions, name, 8)


def read_of(regions: Regions, name: str, byte_size: int) -> bytes:
    return bytes(regions.lease(name, 0, byte_size).read())


def test_a_region_is_in_every_front_end_before_its_registration_is_answered(tmp_path: Path, key: str) -> None:
    before = memory_use()

    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            _, fronts = fronts_of(server, 3)
            assert (await register(fronts[0], key)).status == 200
            assert [read(front) for front in fronts] == [b"12345678"] * 3

            fronts[1].memory.regions.lease("r", 4, 4).write(b"abcd")
            assert [read(front) for front in fronts] == [b"1234abcd"] * 3
            assert [front.memory.system.status() for front in fronts] == [server.shared_memory.system.status()] * 3

            answer = await Client("POST", "/v2/systemsharedmemory/region/r/unregister").ask(fronts[2].app)
            assert answer.status == 200
            assert [len(front.memory.regions) for front in fronts] == [0, 0, 0]
            for front in fronts:
                front.close()

    uvloop.run(main())
    assert memory_use() == before


def test_a_front_end_that_joins_later_maps_the_original_region_of_a_reused_key(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            state, (first,) = fronts_of(server, 1)
            for name in ("r", "gone", "s"):
                assert (await register(first, key, name)).status == 200
            await Client("POST", "/v2/systemsharedmemory/region/gone/unregister").ask(first.app)
            await Client("POST", "/v2/logging", b'{"log_verbose_level": 2}').ask(first.app)
            (Path("/dev/shm") / key[1:]).unlink()
            (Path("/dev/shm") / key[1:]).write_bytes(b"impostor")

            second = FrontEnd(server.app(), {}, state)
            await turns(lambda: not state._changes)

            assert read(second) == b"12345678"
            assert [each["name"] for each in second.memory.system.status()] == ["r", "s"]
            assert [levels.verbose for levels in second.levels] == [2]
            first.close()
            second.close()

    uvloop.run(main())


def test_a_front_end_drops_its_regions_when_a_new_engine_starts(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            _, (front,) = fronts_of(server, 1)
            await register(front, key)
            async with engine_of(tmp_path / "other", allow_client_shm=True) as other:
                state, (again,) = fronts_of(other, 0), (FrontEnd(other.app(), {}, None),)
                again.copy = front.copy
                state[0].attach(again.engine_link)
                await turns(lambda: len(front.memory.regions) == 0)
                again.close()
            front.close()

    uvloop.run(main())


def test_log_settings_are_the_same_everywhere_before_their_change_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of(tmp_path) as server:
            _, fronts = fronts_of(server, 2)
            request = pb.LogSettingsRequest()
            request.settings["log_verbose_level"].uint32_param = 3
            call = FakeCall()
            fronts[0].methods[SERVICE + "LogSettings"].unary(call, request.SerializeToString())  # type: ignore[misc]
            await turns(lambda: call.ended)
            assert call.status is Status.OK
            assert [[levels.verbose for levels in front.levels] for front in fronts] == [[3], [3]]
            assert server.observability.logging.read()["log_verbose_level"] == 3
            for front in fronts:
                front.close()

    uvloop.run(main())


def test_a_change_waits_for_a_silent_front_end_until_the_front_end_disconnects(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            _, (one, silent) = fronts_of(server, 2)
            await turns(lambda: not one.state._changes)  # type: ignore[union-attr]
            silent.mute = True
            control = asyncio.ensure_future(register(one, key))
            await turns(lambda: len(one.memory.regions) == 1)
            assert (await Client(path="/v2").ask(one.app)).status == 200  # others do not wait
            assert not control.done()
            silent.link.close()
            assert (await control).status == 200
            one.close()
            silent.close()

    uvloop.run(main())


def test_a_change_stops_waiting_for_a_silent_front_end_after_a_timeout(
    tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            _, (one, silent) = fronts_of(server, 2, patience_s=0.01)
            silent.mute = True
            assert (await register(one, key)).status == 200
            assert "1 front ends did not respond to a change within 0.01 s" in caplog.text
            one.close()
            silent.close()

    uvloop.run(main())


class Runtime:
    """CUDA for one process; `refuses` simulates a device that this process cannot see."""

    def __init__(self) -> None:
        self.refuses = False
        self.opened = 0

    def device_count(self) -> int:
        return 1

    def open_handle(self, handle: bytes, device: int) -> int:
        if self.refuses:
            raise CudaError(101, "cudaIpcOpenMemHandle", "no device")
        self.opened += 1
        return 1

    def close_handle(self, pointer: int, device: int) -> None:
        self.opened -= 1

    def bytes_to_end(self, pointer: int, device: int) -> int:
        return 100

    def read(self, pointer: int, device: int, into: memoryview) -> None:
        into[:] = bytes(range(len(into)))

    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None:
        """Do nothing."""


def with_cuda(memory: Any) -> Runtime:
    runtime = Runtime()
    memory.cuda._runtime = runtime
    assert isinstance(memory.cuda, CudaRegions)
    return runtime


async def register_cuda(front: FrontEnd) -> FakeCall:
    request = pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=bytes(64), device_id=0, byte_size=50)
    call = FakeCall()
    front.methods[SERVICE + "CudaSharedMemoryRegister"].unary(call, request.SerializeToString())  # type: ignore[misc]
    await turns(lambda: call.ended)
    return call


def test_cuda_memory_is_mapped_by_every_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            _, fronts = fronts_of(server, 2)
            runtimes = [with_cuda(memory) for memory in (server.shared_memory, *(front.memory for front in fronts))]
            assert (await register_cuda(fronts[0])).status is Status.OK
            assert [runtime.opened for runtime in runtimes] == [1, 1, 1]
            assert read_of(fronts[1].memory.regions, "c", 3) == b"\0\1\2"
            await Client("POST", "/v2/cudasharedmemory/unregister").ask(fronts[1].app)
            assert [runtime.opened for runtime in runtimes] == [0, 0, 0]
            for front in fronts:
                front.close()

    uvloop.run(main())


def test_cuda_memory_that_one_front_end_cannot_map_is_not_registered_anywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            state, fronts = fronts_of(server, 2)
            runtimes = [with_cuda(memory) for memory in (server.shared_memory, *(front.memory for front in fronts))]
            runtimes[2].refuses = True
            call = await register_cuda(fronts[0])
            assert call.status is Status.INVALID_ARGUMENT
            assert call.text == "failed to register shared memory region 'c': invalid args"
            await turns(lambda: not state._changes)
            assert [runtime.opened for runtime in runtimes] == [0, 0, 0]
            with pytest.raises(InferError, match="Unable to find"):
                read_of(fronts[0].memory.regions, "c", 1)

            body = json.dumps({"raw_handle": {"b64": "A" * 86 + "=="}, "device_id": 0, "byte_size": 8}).encode()
            client = await Client("POST", "/v2/cudasharedmemory/region/c/register", body).ask(fronts[0].app)
            assert client.status == 400
            assert "failed to register shared memory region 'c'" in json.loads(client.answer)["error"]
            assert client.is_complete
            assert "a front end rejected a change" in caplog.text
            for front in fronts:
                front.close()

    uvloop.run(main())


def test_a_received_descriptor_without_a_region_is_closed(tmp_path: Path) -> None:
    before = memory_use()

    async def main() -> None:
        async with engine_of(tmp_path, allow_client_shm=True) as server:
            _, (front,) = fronts_of(server, 1)
            await Client("POST", "/v2/logging", b'{"log_verbose_level": 2}').ask(front.app)
            message = json.dumps({"log": asdict(front.levels[0])}).encode()
            front.engine_link.send(68, 99, message, descriptors=[0, 0])
            await turns(lambda: len(front.levels) == 2)
            front.close()

    uvloop.run(main())
    assert memory_use() == before
