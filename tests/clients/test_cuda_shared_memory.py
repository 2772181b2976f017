"""tritonclient's CUDA shared memory against a live server, on a fake device: NVIDIA's utilities, both clients.

The calls are those of NVIDIA's simple_{http,grpc}_cudashm_client.py and of Triton's qa/L0_cuda_shared_memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from tests.backends.fake_cuda import FakeRuntime
from tests.clients import models
from tests.clients.cuda_bindings import cuda_shared_memory
from tests.live import Live, live_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="reaches into the process that maps"),
]

A = np.arange(16, dtype=np.int32).reshape(1, 16)
B = np.ones((1, 16), np.int32)
SIZE = 64
NAMES = "input0_data", "input1_data", "output0_data", "output1_data"


@pytest.fixture(scope="module")
def device() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture(scope="module")
def cudashm(device: FakeRuntime) -> Iterator[Any]:
    with cuda_shared_memory(device) as module:
        yield module


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, device: FakeRuntime) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    models.write_examples(root)
    with live_server(root, allow_client_shm=True) as server:
        server.server.shared_memory.cuda._runtime = device
        yield server


class Client:
    """One of tritonclient's clients, and the regions of a test."""

    def __init__(self, client: Any, triton: Any, cudashm: Any) -> None:
        self.client = client
        self.triton = triton
        self.cudashm = cudashm
        self.handles: dict[str, Any] = {}

    def create(self, *names: str, size: int = SIZE, registered: int = SIZE) -> None:
        for name in names:
            handle = self.handles[name] = self.cudashm.create_shared_memory_region(name, size, 0)
            self.client.register_cuda_shared_memory(name, self.cudashm.get_raw_handle(handle), 0, registered)

    def regions(self, name: str = "") -> dict[str, tuple[int, int]]:
        """The registered regions: device and size of each."""
        found = self.client.get_cuda_shared_memory_status(name)
        if self.triton is over_http:
            return {each["name"]: (each["device_id"], each["byte_size"]) for each in found}
        return {name: (each.device_id, each.byte_size) for name, each in found.regions.items()}

    def infer(self, sizes: tuple[int, int] = (SIZE, SIZE), out: tuple[int, int] = (SIZE, 0)) -> Any:
        """Infer `simple` with all inputs and outputs in their regions; `out`: size and offset of the second output."""
        inputs = [self.triton.InferInput(f"INPUT{number}", [1, 16], "INT32") for number in (0, 1)]
        outputs = [self.triton.InferRequestedOutput(f"OUTPUT{number}") for number in (0, 1)]
        for number, each in enumerate(inputs):
            each.set_shared_memory(NAMES[number], sizes[number])
        outputs[0].set_shared_memory(NAMES[2], SIZE)
        outputs[1].set_shared_memory(NAMES[3], *out)
        return self.client.infer("simple", inputs, outputs=outputs)

    def read(self, name: str) -> Any:
        return self.cudashm.get_contents_as_numpy(self.handles[name], np.int32, [1, 16])


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, live: Live, cudashm: Any) -> Iterator[Client]:
    triton, address = (over_http, live.address) if request.param == "http" else (over_grpc, live.grpc_address)
    with ExitStack() as stack:
        new_client = Client(stack.enter_context(triton.InferenceServerClient(address)), triton, cudashm)
        new_client.client.unregister_system_shared_memory()
        new_client.client.unregister_cuda_shared_memory()
        yield new_client
        new_client.client.unregister_cuda_shared_memory()


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call(*args)
    return str(caught.value.message())


def test_nvidias_example(client: Client, device: FakeRuntime) -> None:
    client.create(*NAMES)
    client.cudashm.set_shared_memory_region(client.handles[NAMES[0]], [A])
    client.cudashm.set_shared_memory_region(client.handles[NAMES[1]], [B])
    result = client.infer()

    for number, (name, expected) in enumerate(zip(NAMES[2:], (A + B, A - B), strict=True)):
        described = result.get_output(f"OUTPUT{number}")
        shape = described["shape"] if isinstance(described, dict) else list(described.shape)
        assert shape == [1, 16]
        np.testing.assert_array_equal(client.read(name), expected)
    assert client.regions() == dict.fromkeys(NAMES, (0, SIZE))
    assert client.regions("input0_data") == {"input0_data": (0, SIZE)}
    client.client.unregister_cuda_shared_memory("output0_data")
    assert len(client.regions()) == 3
    client.client.unregister_cuda_shared_memory()
    assert client.regions() == {}
    opened, closed = (device.calls[call] for call in ("cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle"))
    assert opened == closed


def test_invalid_registrations_and_undersized_regions_are_rejected_as_by_triton(client: Client) -> None:
    client.client.unregister_cuda_shared_memory("output0_data")
    text = refused(lambda: client.create("input0_data", registered=SIZE + 1))
    assert text == "failed to register shared memory region 'input0_data': invalid args"
    handle = client.cudashm.get_raw_handle(client.handles["input0_data"])
    text = refused(client.client.register_cuda_shared_memory, "input0_data", handle, 2, SIZE)
    assert text == "failed to register shared memory region 'input0_data': invalid args"
    client.create(*NAMES[2:])
    client.create(*NAMES[:2], size=2 * SIZE, registered=2 * SIZE)
    text = refused(client.client.register_cuda_shared_memory, "input0_data", handle, 0, SIZE)
    assert text == "shared memory region 'input0_data' already in manager"

    text = "input byte size mismatch for input 'INPUT1' for model 'simple'. Expected 64, got 128"
    assert refused(client.infer, (SIZE, 2 * SIZE)).endswith(text)
    far = 2**64 - 32 if client.triton is over_http else SIZE
    assert refused(client.infer, (SIZE, SIZE), (SIZE, far)).endswith(
        "Invalid offset for shared memory region: 'output1_data'"
    )
    assert refused(client.infer, (SIZE, SIZE), (SIZE, 60)).endswith(
        "Invalid offset + byte size for shared memory region: 'output1_data'"
    )
    assert "should be at least 64 bytes to hold the results" in refused(client.infer, (SIZE, SIZE), (SIZE - 1, 0))
    assert refused(client.regions, "nobody") == "Unable to find cuda shared memory region: 'nobody'"
    assert "simple" in str(client.infer().get_response())


def test_an_allocation_under_two_names_can_be_used_with_inline_inputs(client: Client) -> None:
    client.create("both", size=2 * SIZE, registered=2 * SIZE)
    handle = client.handles["both"]
    client.client.register_cuda_shared_memory("again", client.cudashm.get_raw_handle(handle), 0, SIZE)
    client.cudashm.set_shared_memory_region(handle, [A, B])
    first = client.triton.InferInput("INPUT0", [1, 16], "INT32").set_shared_memory("again", SIZE)
    other = client.triton.InferInput("INPUT1", [1, 16], "INT32").set_data_from_numpy(B)
    requested = client.triton.InferRequestedOutput("OUTPUT0")
    requested.set_shared_memory("both", SIZE, SIZE)
    result = client.client.infer(
        "simple", [first, other], outputs=[requested, client.triton.InferRequestedOutput("OUTPUT1")]
    )

    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), A - B)
    found = client.cudashm.get_contents_as_numpy(handle, np.int32, [2, 16])
    np.testing.assert_array_equal(found, np.concatenate([A, A + B]))
