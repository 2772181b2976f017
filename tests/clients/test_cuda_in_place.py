"""CUDA shared memory of a model on the same device: the copies, counted on a fake device."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from penstock.backends.backend import Array
from penstock.server.repository import mirrors
from penstock.server.repository.gpus import Gpus
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import FakeGround, fake_cuda_loader
from tests.backends.onnx_models import node
from tests.clients import models
from tests.live import Live, live_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="front ends copy to the host"),
]
CONFIG = "max_batch_size: 3 instance_group {{ kind: KIND_GPU gpus: [ {device} ] }} {more}"
FULL = "dynamic_batching { max_queue_delay_microseconds: 20000000 }"
"""A batch begins when it has three rows, and no sooner."""
GRAPHS, NO_GRAPHS = (f"optimization {{ cuda {{ graphs: {word} }} }}" for word in ("true", "false"))
"""A graph has its own addresses."""
NBYTES = 16
PATIENCE_S = 20.0


class Device(FakeRuntime):
    """Two devices, and the copies that were made: "h2d", "d2h", "d2d". `begun`: a run has been; `unmapped`: memory."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: Counter[str] = Counter()
        self.begun = threading.Event()
        self.unmapped = threading.Event()

    def record_event(self, event: int, stream: int) -> None:
        super().record_event(event, stream)
        self.begun.set()

    def close_handle(self, pointer: int, device: int) -> None:
        super().close_handle(pointer, device)
        self.unmapped.set()

    def copy(self, to: int, source: int, size: int, stream: int, *, pageable: bool = False) -> None:
        self.copied["2".join("d" if self.memory_at(each, size).device >= 0 else "h" for each in (source, to))] += 1
        super().copy(to, source, size, stream, pageable=pageable)

    def read(self, pointer: int, device: int, into: memoryview) -> None:
        self.copied["d2h"] += 1
        super().read(pointer, device, into)

    def write(self, pointer: int, device: int, raw: bytes | memoryview) -> None:
        self.copied["h2d"] += 1
        super().write(pointer, device, raw)


@pytest.fixture(scope="module")
def device() -> Device:
    return Device()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, device: Device) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    tensors: tuple[models.Tensors, models.Tensors] = ({"x": (1, ["N", 4])}, {"y": (1, ["N", 4])})
    kinds = {
        "alone": (0, NO_GRAPHS), "both": ("0, 1", NO_GRAPHS), "full": (0, FULL), "other": (1, ""),
        "graphs": (0, GRAPHS), "silent": (0, ""),
    }  # fmt: skip
    for name, (number, more) in kinds.items():
        config = CONFIG.format(device=number, more=more)
        models.write(root, name, [node("Add", ["x", "x"], ["y"])], tensors, config=config)
    words = [node("Add", ["x", "x"], ["y"]), node("Cast", ["y"], ["words"], to=8)]
    outputs: models.Tensors = {"y": (1, ["N", 4]), "words": (8, ["N", 4])}
    models.write(root, "words", words, (tensors[0], outputs), config=CONFIG.format(device=0, more=""))
    for name, batching in (("parts", "max_batch_size = 2\nsplit = true"), ("filled", "allowed_sizes = [3]")):
        models.write(root, name, [node("Add", ["x", "x"], ["y"])], tensors)
        (root / name / "penstock.toml").write_text(f'[instances]\ndevices = ["cuda:0"]\n[batching]\n{batching}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirrors, "Gpus", lambda *_: Gpus.from_numbers((0, 1)))
        loaders = {"onnxruntime": fake_cuda_loader(FakeGround(device))}
        with live_server(root, loaders=loaders, allow_client_shm=True) as server:
            server.server.shared_memory.cuda._runtime = device
            yield server


class Region:
    """A client's allocation on device 0: an input at its begin, an output at 1024."""

    def __init__(self, device: Device, name: str, value: float, at: int = 0) -> None:
        self._device = device
        self.name = name
        self.at = at
        self.values = np.full((1, 4), value, np.float32)
        self.pointer = device.allocate(2048, 0)
        device.write(self.pointer + at, 0, self.values.tobytes())

    def read(self, at: int = 1024) -> Array:
        into = np.empty((1, 4), np.float32)
        self._device.read(self.pointer + at, 0, into.reshape(-1).view(np.uint8).data)
        return into


class Client:
    """One of tritonclient's clients; what is copied between the server's device and host while it asks is `copied`."""

    def __init__(self, triton: Any, address: str, device: Device) -> None:
        self.triton = triton
        self.address = address
        self.device = device
        self.copied: dict[str, int] = {}

    def region(self, name: str, value: float = 1, at: int = 0) -> Region:
        region = Region(self.device, name, value, at)
        with self.triton.InferenceServerClient(self.address) as client:
            handle = base64.b64encode(self.device.export_handle(region.pointer, 0))
            client.register_cuda_shared_memory(name, handle, 0, 2048)
        return region

    def infer(self, model: str, region: Region, out: int = 1024, size: int = NBYTES) -> Any:
        tensor = self.triton.InferInput("x", [1, 4], "FP32").set_shared_memory(region.name, NBYTES, region.at)
        requested = self.triton.InferRequestedOutput("y")
        requested.set_shared_memory(region.name, size, out)
        return self.ask(model, tensor, [requested])

    def ask(self, model: str, tensor: Any, outputs: Sequence[Any] = ()) -> Any:
        with self.triton.InferenceServerClient(self.address) as client:
            return client.infer(model, [tensor], outputs=list(outputs) or None)

    def carried(self, value: float) -> Any:
        return self.triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.full((1, 4), value, np.float32))

    def counted(self, *calls: Any) -> list[Any]:
        """Make calls in parallel; return their results or exceptions."""
        self.device.copied.clear()
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
        self.copied = dict(self.device.copied)
        return [future.exception() or future.result() for future in futures]


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, live: Live, device: Device) -> Iterator[Client]:
    http = request.param == "http"
    yield Client(over_http, live.address, device) if http else Client(over_grpc, live.grpc_address, device)
    with over_http.InferenceServerClient(live.address) as ending:
        ending.unregister_cuda_shared_memory()


def test_a_request_that_runs_alone_is_not_copied(client: Client) -> None:
    region = client.region("r", 3)
    client.counted(lambda: client.infer("alone", region))

    assert client.copied == {}
    np.testing.assert_array_equal(region.read(), 2 * region.values)


def test_requests_of_a_batch_are_gathered_and_scattered_on_the_device(client: Client) -> None:
    regions = [client.region(f"r{number}", number) for number in range(3)]
    client.counted(*[lambda region=region: client.infer("full", region) for region in regions])

    assert client.copied == {"d2d": 6}
    for region in regions:
        np.testing.assert_array_equal(region.read(), 2 * region.values)


def test_requests_with_inline_data_share_a_batch_with_shared_memory_requests(client: Client) -> None:
    region = client.region("r", 3)
    answers = client.counted(
        lambda: client.infer("full", region),
        lambda: client.ask("full", client.carried(5)),
        lambda: client.ask("full", client.carried(7)),
    )

    assert client.copied["d2d"] == 2
    np.testing.assert_array_equal(region.read(), 2 * region.values)
    assert [answer.as_numpy("y")[0, 0] for answer in answers[1:]] == [10, 14]


@pytest.mark.parametrize(
    ("model", "at", "out", "copied"),
    [
        ("alone", 4, 1024, {"d2d": 1}),
        ("alone", 0, 1028, {"d2d": 1}),
        ("alone", 0, 0, {"d2d": 1}),
        ("other", 0, 1024, {"h2d": 2, "d2h": 2}),
        ("graphs", 0, 1024, {"d2d": 2}),
        ("silent", 0, 1024, {"d2d": 2}),
        ("filled", 0, 1024, {"d2d": 4, "d2h": 1}),
    ],
    ids=[
        "input off its place",
        "output off its place",
        "the same place",
        "another device",
        "a graph",
        "graphs by default",
        "rows added",
    ],
)
def test_a_tensor_that_cannot_be_used_in_place_is_copied(
    client: Client, model: str, at: int, out: int, copied: dict[str, int]
) -> None:
    region = client.region("r", 3, at)
    client.counted(lambda: client.infer(model, region, out))

    assert client.copied == copied
    np.testing.assert_array_equal(region.read(out), 2 * region.values)


def test_an_output_that_does_not_fit_is_rejected_before_anything_is_written(client: Client) -> None:
    region = client.region("r", 3)
    before = region.read()
    (refused,) = client.counted(lambda: client.infer("alone", region, size=NBYTES - 1))

    assert "should be at least 16 bytes to hold the results" in str(refused)
    np.testing.assert_array_equal(region.read(), before)


def test_a_region_whose_memory_was_freed_fails_only_its_own_request(client: Client) -> None:
    regions = [client.region(f"r{number}", number, at=4) for number in range(3)]
    client.device.free(regions[1].pointer, 0)
    answers = client.counted(*[lambda region=region: client.infer("full", region) for region in regions])

    assert isinstance(answers[1], InferenceServerException)
    assert answers[1].message() == "unable to read shared memory region: 'r1'"
    for number in (0, 2):
        np.testing.assert_array_equal(regions[number].read(), 2 * regions[number].values)


def test_a_region_in_use_stays_mapped_until_its_request_has_ended(client: Client) -> None:
    region = client.region("r", 3)
    client.device.begun.clear()
    client.device.unmapped.clear()
    with ThreadPoolExecutor(1) as pool:
        with client.device.hold(0):
            answer = pool.submit(client.infer, "alone", region)
            assert client.device.begun.wait(PATIENCE_S)
            with client.triton.InferenceServerClient(client.address) as other:
                other.unregister_cuda_shared_memory("r")
            assert not client.device.unmapped.is_set()
        answer.result(PATIENCE_S)

    np.testing.assert_array_equal(region.read(), 2 * region.values)
    assert client.device.unmapped.wait(PATIENCE_S)


def test_a_region_is_unmapped_after_the_request_of_a_disconnected_client_has_ended(client: Client, live: Live) -> None:
    region = client.region("r", 3)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": NBYTES}
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": place}
    y = {"name": "y", "parameters": place | {"shared_memory_offset": 1024}}
    asking = HTTPConnection("127.0.0.1", live.http_port)
    client.device.begun.clear()
    client.device.unmapped.clear()
    with client.device.hold(0):
        asking.request("POST", "/v2/models/alone/infer", json.dumps({"inputs": [x], "outputs": [y]}))
        assert client.device.begun.wait(PATIENCE_S)
        asking.close()
        with client.triton.InferenceServerClient(client.address) as other:
            other.unregister_cuda_shared_memory("r")
        assert not client.device.unmapped.is_set()
    assert client.device.unmapped.wait(PATIENCE_S)

    region = client.region("r", 5)
    client.infer("alone", region)
    np.testing.assert_array_equal(region.read(), 2 * region.values)


def test_an_output_without_a_binding_is_written_into_shared_memory(client: Client) -> None:
    region = client.region("r", 3)
    tensor = client.triton.InferInput("x", [1, 4], "FP32").set_shared_memory("r", NBYTES)
    requested, words = (client.triton.InferRequestedOutput(name) for name in ("y", "words"))
    requested.set_shared_memory("r", NBYTES, 1024)
    (answer,) = client.counted(lambda: client.ask("words", tensor, [requested, words]))

    assert answer.as_numpy("words").tolist() == [[b"6"] * 4]
    np.testing.assert_array_equal(region.read(), 2 * region.values)


def test_a_split_request_is_returned_whole_in_shared_memory(client: Client) -> None:
    region = client.region("r")
    values = np.arange(20, dtype=np.float32).reshape(5, 4)
    client.device.write(region.pointer, 0, values.tobytes())
    tensor = client.triton.InferInput("x", [5, 4], "FP32").set_shared_memory("r", values.nbytes)
    requested = client.triton.InferRequestedOutput("y")
    requested.set_shared_memory("r", values.nbytes, 1024)
    (answer,) = client.counted(lambda: client.ask("parts", tensor, [requested]))
    assert not isinstance(answer, Exception), answer

    found = np.empty((5, 4), np.float32)
    client.device.read(region.pointer + 1024, 0, found.reshape(-1).view(np.uint8).data)
    np.testing.assert_array_equal(found, 2 * values)


def test_parallel_requests_of_every_kind_receive_their_own_results(client: Client) -> None:
    regions = [client.region(f"r{number}", number, at=4 * (number % 3)) for number in range(6)]

    def ask(number: int) -> None:
        region, model = regions[number], ("alone", "both")[number % 2]
        for turn in range(8):
            if turn % 4 == 3:
                assert client.ask(model, client.carried(turn)).as_numpy("y")[0, 0] == 2 * turn
                continue
            client.infer(model, region, 1024 + 4 * (turn % 2))
            np.testing.assert_array_equal(region.read(1024 + 4 * (turn % 2)), 2 * region.values)

    answers = client.counted(*[lambda number=number: ask(number) for number in range(6)])
    assert answers == [None] * 6
