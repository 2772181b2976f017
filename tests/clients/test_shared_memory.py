"""tritonclient's shared memory against a live server: all clients, and clients that misbehave."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from penstock.backends.backend import Array
from penstock.backends.datatypes import DATATYPES
from penstock.server.v2.regions import DISABLED_TEXT
from tests.clients import models
from tests.clients.client_errors import refused
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.full((1, 16), 3, np.int32)
WIDE = 1 << 20
"""Values enough for 4 MiB, which are copied on a thread."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    models.write_examples(root)
    models.write_identities(root)
    models.write_heavy(root)
    with live_server(root, allow_client_shm=True) as server:
        yield server


@pytest.fixture
def client(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(live.address) as new_client:
        yield new_client
        new_client.unregister_system_shared_memory()


@contextmanager
def memory(name: str, byte_size: int) -> Iterator[Any]:
    """A region of the client's own, under a key that no other test has."""
    handle = shm.create_shared_memory_region(name, f"/{name}_{os.getpid()}", byte_size)
    try:
        yield handle
    finally:
        shm.destroy_shared_memory_region(handle)


def key(handle: Any) -> str:
    return str(handle._shm_key)


def placed(
    name: str, datatype: str, shape: tuple[int, ...], place: tuple[Any, ...], of: Any = triton
) -> tuple[Any, Any]:
    """An input and an output in shared memory; `place` is the region, the bytes of each, and both offsets."""
    region, byte_size, offset, offset_out = place
    tensor = of.InferInput(name, list(shape), datatype)
    tensor.set_shared_memory(region, byte_size, offset)
    requested = of.InferRequestedOutput("y" if name == "x" else name.replace("IN", "OUT"))
    requested.set_shared_memory(region, byte_size, offset_out)
    return tensor, requested


class TestTensors:
    def test_inputs_and_outputs_use_shared_memory_as_in_nvidias_example(self, client: Any) -> None:
        with memory("input_data", 128) as inputs, memory("output_data", 128) as outputs:
            client.register_system_shared_memory("output_data", key(outputs), 128)
            shm.set_shared_memory_region(inputs, [A])
            shm.set_shared_memory_region(inputs, [B], offset=64)
            client.register_system_shared_memory("input_data", key(inputs), 128)
            tensors, requested = [], []
            for number in (0, 1):
                tensors.append(triton.InferInput(f"INPUT{number}", [1, 16], "INT32"))
                tensors[-1].set_shared_memory("input_data", 64, offset=64 * number)
                requested.append(triton.InferRequestedOutput(f"OUTPUT{number}", binary_data=True))
                requested[-1].set_shared_memory("output_data", 64, offset=64 * number)
            result = client.infer("simple", tensors, outputs=requested, request_id="1")

            assert result.get_response() == {
                "id": "1", "model_name": "simple", "model_version": "1",
                "outputs": [
                    {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16]},
                    {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16]},
                ],
            }  # fmt: skip
            np.testing.assert_array_equal(shm.get_contents_as_numpy(outputs, np.int32, [1, 16]), A + B)
            np.testing.assert_array_equal(shm.get_contents_as_numpy(outputs, np.int32, [1, 16], 64), A - B)
            assert client.get_system_shared_memory_status() == [
                {"name": "input_data", "key": key(inputs), "offset": 0, "byte_size": 128},
                {"name": "output_data", "key": key(outputs), "offset": 0, "byte_size": 128},
            ]
            assert [each["name"] for each in client.get_system_shared_memory_status("output_data")] == ["output_data"]

    @pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
    def test_tensors_of_every_datatype_are_returned_unchanged(self, client: Any, datatype: str) -> None:
        values: Array = np.array([[0, 1, 1, 0]]).astype(DATATYPES[datatype].dtype)
        size = values.nbytes
        with memory("region", 2 * size) as region:
            shm.set_shared_memory_region(region, [values])
            client.register_system_shared_memory("region", key(region), 2 * size)
            tensor, requested = placed("x", datatype, (1, 4), ("region", size, 0, size))
            client.infer(f"identity_{datatype}", [tensor], outputs=[requested])

            found = shm.get_contents_as_numpy(region, values.dtype, [1, 4], size)
            np.testing.assert_array_equal(found, values)

    def test_strings_are_returned_unchanged(self, client: Any) -> None:
        words = np.array([[b"one", b"", "drei ü".encode(), b"\0"]], np.object_)
        raw = serialize_byte_tensor(words)
        size = len(raw.item())
        with memory("words", 2 * size) as region:
            shm.set_shared_memory_region(region, [raw])
            client.register_system_shared_memory("words", key(region), 2 * size)
            tensor, requested = placed("x", "BYTES", (1, 4), ("words", size, 0, size))
            client.infer("identity_BYTES", [tensor], outputs=[requested])

            assert shm.get_contents_as_numpy(region, np.object_, [1, 4], size).tolist() == words.tolist()

    def test_shared_memory_tensors_mix_with_inline_tensors(self, client: Any) -> None:
        with memory("mixed", 128) as region:
            shm.set_shared_memory_region(region, [A])
            client.register_system_shared_memory("mixed", key(region), 64, offset=0)
            tensor, _ = placed("INPUT0", "INT32", (1, 16), ("mixed", 64, 0, 0))
            other = triton.InferInput("INPUT1", [1, 16], "INT32").set_data_from_numpy(B)
            requested = triton.InferRequestedOutput("OUTPUT1", binary_data=True)
            stored = triton.InferRequestedOutput("OUTPUT0")
            stored.set_shared_memory("mixed", 64)

            for _ in range(3):
                # the output overwrites the input
                result = client.infer("simple", [tensor, other], outputs=[stored, requested])
                np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
                np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.int32, [1, 16]), A + B)
                shm.set_shared_memory_region(region, [A])

    def test_tensors_of_several_megabytes_are_copied_on_a_thread(self, client: Any) -> None:
        values = np.random.default_rng(0).random((1, WIDE), dtype=np.float32)
        with memory("wide", 2 * values.nbytes) as region:
            shm.set_shared_memory_region(region, [values])
            client.register_system_shared_memory("wide", key(region), 2 * values.nbytes)
            tensor, requested = placed("x", "FP32", values.shape, ("wide", values.nbytes, 0, values.nbytes))
            client.infer("identity_FP32", [tensor], outputs=[requested])

            found = shm.get_contents_as_numpy(region, np.float32, values.shape, values.nbytes)
            np.testing.assert_array_equal(found, values)

    def test_the_asyncio_client_can_use_shared_memory(self, live: Live) -> None:
        async def main() -> None:
            async with triton_aio.InferenceServerClient(live.address) as aio:
                with memory("aio", 32) as region:
                    shm.set_shared_memory_region(region, [np.array([[1.5, 2, 3, 4]], np.float32)])
                    await aio.register_system_shared_memory("aio", key(region), 32)
                    tensor, output = placed("x", "FP32", (1, 4), ("aio", 16, 0, 16))
                    await asyncio.gather(*(aio.infer("identity_FP32", [tensor], outputs=[output]) for _ in range(20)))
                    assert shm.get_contents_as_numpy(region, np.float32, [4], 16).tolist() == [1.5, 2, 3, 4]
                    assert await aio.get_system_shared_memory_status("aio")
                    await aio.unregister_system_shared_memory("aio")
                    assert await aio.get_system_shared_memory_status() == []

        asyncio.run(main())

    def test_http_and_grpc_use_the_same_regions(self, client: Any, live: Live) -> None:
        values = np.array([[1.5, 2, 3, 4]], np.float32)
        with memory("rpc", 32) as region, triton_grpc.InferenceServerClient(f"127.0.0.1:{live.grpc_port}") as rpc:
            shm.set_shared_memory_region(region, [values])
            rpc.register_system_shared_memory("rpc", key(region), 32)
            tensor, requested = placed("x", "FP32", (1, 4), ("rpc", 16, 0, 16), triton_grpc)
            answer = rpc.infer("identity_FP32", [tensor], outputs=[requested])

            assert shm.get_contents_as_numpy(region, np.float32, [1, 4], 16).tolist() == values.tolist()
            assert list(answer.get_response().raw_output_contents) == [b""]
            assert [each["name"] for each in client.get_system_shared_memory_status()] == ["rpc"]
            best = triton_grpc.InferRequestedOutput("y", class_count=2)
            classes = rpc.infer("identity_FP32", [tensor], outputs=[best]).as_numpy("y")
            assert classes.tolist() == [[b"4.000000:3", b"3.000000:2"]]
            rpc.unregister_system_shared_memory("rpc")
            assert client.get_system_shared_memory_status() == []


class TestRejections:
    def test_invalid_registrations_are_rejected(self, client: Any, live: Live) -> None:
        with memory("dup", 64) as region:
            client.register_system_shared_memory("dup", key(region), 64)

            register = client.register_system_shared_memory
            assert refused(register, "dup", key(region), 64) == ("400", "shared memory region 'dup' already in manager")
            assert refused(register, "more", key(region), 65) == (
                "400", "failed to register shared memory region 'more': invalid args"
            )  # fmt: skip
            assert refused(register, "none", "/no_such_key", 64) == (
                "400", "Unable to open shared memory region: '/no_such_key'"
            )  # fmt: skip
            assert refused(client.get_system_shared_memory_status, "none") == (
                "404", "Unable to find system shared memory region: 'none'"
            )  # fmt: skip
            for body, text in (
                ({"byte_size": 4}, "Shared memory register request has no 'key' field"),
                ({"key": key(region)}, "Shared memory register request has no 'byte_size' field"),
                ({"key": 1, "byte_size": 4}, "attempt to access JSON non-string as string"),
                ({"key": "k", "byte_size": -4}, "attempt to access JSON non-unsigned-integer as unsigned-integer"),
                ([], "failed to parse the request JSON buffer: the request must be a JSON object"),
            ):
                answer = httpx.post(f"{live.url}/v2/systemsharedmemory/region/b/register", json=body)
                assert (answer.status_code, answer.json()) == (400, {"error": text})

    def test_places_outside_a_region_are_rejected(self, client: Any) -> None:
        with memory("small", 64) as region:
            client.register_system_shared_memory("small", key(region), 64)

            def infer(*place: Any) -> tuple[str, str]:
                tensor, requested = placed("x", "FP32", (1, 4), place)
                return refused(client.infer, "identity_FP32", [tensor], outputs=[requested])

            assert infer("nobody", 16, 0, 0) == ("404", "Unable to find shared memory region: 'nobody'")
            assert infer("small", 16, 64, 0)[1].endswith("Invalid offset for shared memory region: 'small'")
            assert infer("small", 16, 56, 0)[1].endswith("Invalid offset + byte size for shared memory region: 'small'")
            assert infer("small", 8, 0, 0)[1].endswith(
                "input byte size mismatch for input 'x' for model 'identity_FP32'. Expected 16, got 8"
            )
            assert infer("small", 16, 0, 2**63)[0] == "400"
            tensor, requested = placed("x", "FP32", (1, 4), ("small", 16, 0, 0))
            requested.set_shared_memory("small", 15, 16)
            status, text = refused(client.infer, "identity_FP32", [tensor], outputs=[requested])
            assert status == "400"
            assert "for output 'y' (15 bytes) should be at least 16 bytes to hold the results" in text

    def test_every_call_is_rejected_while_shared_memory_is_off(self, tmp_path: Path) -> None:
        models.write_identity(tmp_path, "rows", "")
        with live_server(tmp_path) as off, triton.InferenceServerClient(off.address) as client:
            tensor, requested = placed("x", "FP32", (1, 4), ("r", 16, 0, 0))
            for call, *args in (
                (client.register_system_shared_memory, "r", "k", 16), (client.unregister_system_shared_memory,),
                (client.get_system_shared_memory_status,), (client.get_cuda_shared_memory_status,),
                (client.unregister_cuda_shared_memory,), (client.infer, "rows", [tensor], "", [requested]),
            ):  # fmt: skip
                assert refused(call, *args) == ("501", DISABLED_TEXT)

    def test_cuda_registration_without_cuda_is_rejected_and_unregistering_succeeds(
        self, client: Any, live: Live
    ) -> None:
        handle = {"raw_handle": {"b64": "aGg="}, "device_id": 0, "byte_size": 4}
        answer = httpx.post(f"{live.url}/v2/cudasharedmemory/region/c/register", json=handle)

        assert answer.status_code in {400, 501}
        assert "CUDA" in answer.json()["error"] or "cudaIpcMemHandle_t" in answer.json()["error"]
        client.unregister_cuda_shared_memory()
        client.unregister_cuda_shared_memory("nobody")
        assert client.get_cuda_shared_memory_status() == []


class TestMisbehavingClients:
    def test_a_region_unregistered_during_inference_is_still_used(self, client: Any) -> None:
        values = np.random.default_rng(0).random((1, models.HEAVY_WIDTH), dtype=np.float32)
        with memory("busy", 2 * values.nbytes) as region:
            shm.set_shared_memory_region(region, [values])
            tensor, requested = placed("x", "FP32", values.shape, ("busy", values.nbytes, 0, values.nbytes))
            texts = set()
            for _ in range(20):
                client.register_system_shared_memory("busy", key(region), 2 * values.nbytes)
                pending = client.async_infer("heavy", [tensor], outputs=[requested])
                client.unregister_system_shared_memory("busy")
                try:
                    pending.get_result()
                except InferenceServerException as error:
                    texts.add(error.message())
            # if unregistering was faster than the request
            assert texts <= {"Unable to find shared memory region: 'busy'"}
            client.register_system_shared_memory("busy", key(region), 2 * values.nbytes)
            client.infer("heavy", [tensor], outputs=[requested])

            found = shm.get_contents_as_numpy(region, np.float32, values.shape, values.nbytes)
            np.testing.assert_allclose(found, values)

    def test_a_truncated_file_is_rejected_and_the_server_survives(self, client: Any) -> None:
        with memory("cut", 8192) as region:
            client.register_system_shared_memory("cut", key(region), 8192)
            tensor, requested = placed("x", "FP32", (1, 1024), ("cut", 4096, 0, 4096))
            client.infer("identity_FP32", [tensor], outputs=[requested])
            path = Path("/dev/shm") / key(region).lstrip("/")
            for size in (4096, 100, 0):
                os.truncate(path, size)
                status, text = refused(client.infer, "identity_FP32", [tensor], outputs=[requested])
                assert status == "400"
                assert text.endswith("its file is smaller than when it was registered")
            os.truncate(path, 8192)
            client.infer("identity_FP32", [tensor], outputs=[requested])

            assert client.is_server_live()

    def test_a_client_that_dies_does_not_affect_later_requests(self, client: Any, live: Live) -> None:
        program = """
import os, sys, tritonclient.http as triton, tritonclient.utils.shared_memory as shm
handle = shm.create_shared_memory_region("dead", f"/dead_{sys.argv[2]}", 32)
client = triton.InferenceServerClient(sys.argv[1])
client.register_system_shared_memory("dead", f"/dead_{sys.argv[2]}", 32)
os.unlink(f"/dev/shm/dead_{sys.argv[2]}")
os.kill(os.getpid(), 9)
"""
        command = [sys.executable, "-c", program, live.address, str(os.getpid())]
        died = subprocess.run(command, check=False, timeout=60, capture_output=True)
        tensor, requested = placed("x", "FP32", (1, 4), ("dead", 16, 0, 16))
        client.infer("identity_FP32", [tensor], outputs=[requested])

        assert died.returncode == -9
        assert [region["name"] for region in client.get_system_shared_memory_status()] == ["dead"]
        client.unregister_system_shared_memory("dead")
        assert client.get_system_shared_memory_status() == []
