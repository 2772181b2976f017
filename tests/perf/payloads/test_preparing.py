"""From options to payloads, with shared memory and without."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.perf.generator.orders import GrpcCall, Target
from penstock.perf.payloads import cuda_regions
from penstock.perf.payloads.preparing import InputError, Prepared, prepare_payloads
from penstock.perf.profiling.control import ControlError
from penstock.perf.profiling.model import ModelDescription, Tensor
from penstock.perf.profiling.options import Input
from tests.backends.fake_cuda import FakeRuntime
from tests.perf.payloads.readers import http, message, over_http, sent_again
from tests.perf.payloads.strategies import model_of

HTTP, GRPC = Target("host", 80), Target("host", 80, grpc=GrpcCall("/m"))
X = Tensor("x", "INT32", (2,))
MODEL = model_of(X, Tensor("w", "BYTES", (1,)))


class Registry:
    """A server's regions: `register` maps each, as a server would, and refuses from the `most`th on."""

    def __init__(self, most: int = 100) -> None:
        self.sizes: dict[str, int] = {}
        self.keys: dict[str, str] = {}
        self.handles: dict[str, bytes] = {}
        self._most = most

    def register(self, region: str, key: str, size: int) -> None:
        if len(self.sizes) == self._most:
            raise ControlError("full")
        assert content(key)
        self.sizes[region], self.keys[region] = size, key

    def unregister(self, region: str) -> None:
        del self.sizes[region]

    def register_cuda(self, region: str, handle: bytes, device: int, size: int) -> None:
        if len(self.sizes) == self._most:
            raise ControlError("full")
        assert device == 0
        self.sizes[region], self.handles[region] = size, handle

    unregister_cuda = unregister


def content(key: str) -> bytes:
    return Path(f"/dev/shm{key}").read_bytes()


@contextmanager
def ready(model: ModelDescription = MODEL, target: Target = HTTP, **input_options: Any) -> Iterator[Prepared]:
    with prepare_payloads(model, Input(**input_options), target, Registry(), slots=4) as prepared:
        yield prepared


def requests(prepared: Prepared, count: int, slot: int = 0) -> list[bytes]:
    return list(itertools.islice(prepared.payloads.stream(slot), count))


@pytest.mark.parametrize("target", [HTTP, GRPC])
@pytest.mark.parametrize("sequences", [False, True])
def test_payloads_pickle_and_send_the_same_requests(target: Target, sequences: bool) -> None:
    model = model_of(X, sequences=sequences)
    with ready(model, target, batch=2) as prepared:
        travelled = Prepared(pickle.loads(pickle.dumps(prepared.payloads)))

        assert travelled.payloads.rows == 2
        assert requests(travelled, 30) == requests(prepared, 30)


def test_independent_requests_are_sent_in_turn_by_each_slot(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"x": [number, 0]} for number in range(3)]}))
    with ready(model_of(X), source=(str(path),)) as prepared:
        sent = [sent_again(model_of(X), over_http(model_of(X), each)[0])[0].raw[0] for each in requests(prepared, 4, 1)]

    assert sent == [1, 2, 0, 1]
    assert prepared.payloads.ending(1) is None


def test_streams_without_sequences_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [[{"x": [1, 0]}], [{"x": [2, 0]}]]}))
    with ready(model_of(X), source=(str(path),)) as prepared:
        assert len(set(requests(prepared, 4))) == 1
        assert prepared.notes == ("--input-data: of 2 streams the first is sent: the model has no sequences",)
    with ready(model_of(X, sequences=True), source=(str(path),)) as prepared:
        assert prepared.notes == ()
        assert [over_http(model_of(X), each)[1].sequence for each in requests(prepared, 2)] == [
            (1, True, True), (5, True, True)
        ]  # fmt: skip


def test_the_length_of_sequences_is_twenty_or_as_specified_or_that_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"x": [1, 0]}, {"x": [2, 0]}]}))

    def length(**input_options: Any) -> int:
        with ready(model_of(X, sequences=True), sequence_variation=0, **input_options) as prepared:
            marks = [over_http(model_of(X), each)[1].sequence for each in requests(prepared, 30)]
        return 1 + next(index for index, mark in enumerate(marks) if mark and mark.end)

    assert length() == 20
    assert length(sequence_length=7) == 7
    assert length(source=(str(path),)) == 2
    assert length(source=(str(path),), sequence_length=7) == 7


def test_requests_to_a_decoupled_model_ask_for_an_empty_final_response() -> None:
    model = model_of(X, decoupled=True)
    streaming = Target("host", 80, grpc=GrpcCall("/m", streaming=True))
    with ready(model, streaming) as one, ready(model, GRPC) as other:
        assert message(requests(one, 1)[0]).parameters
        assert not message(requests(other, 1)[0]).parameters


@pytest.mark.parametrize(
    ("input_options", "text"),
    [
        ({"batch": 99}, "-b 99"),
        ({"parameters": (("sequence_id", 1),)}, "--request-parameter"),
        ({"shared_memory": "cuda"}, "--shared-memory cuda: it needs a GPU beside this command: .*. Use system or none"),
        ({"shared_memory": "shm"}, "--shared-memory: the choices"),
        ({"source": ("nowhere",)}, "--input-data nowhere"),
        ({"sequence_length": 0}, "--sequence-length 0"),
        ({"sequence_ids": (1, 3)}, "--sequence-id-range 1:4: 3 ids are fewer than the 4 sequences"),
    ],
)
def test_input_that_cannot_be_sent_is_rejected_naming_the_flag(
    input_options: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_regions, "find_runtime", lambda: None)
    with pytest.raises(InputError, match=f"^{text}"), ready(model_of(X, sequences=True), **input_options):
        pass


@pytest.mark.parametrize("sequences", [False, True])
def test_values_that_json_cannot_represent_are_rejected_in_advance(sequences: bool) -> None:
    model = model_of(Tensor("h", "FP16", (1,)), sequences=sequences)
    with pytest.raises(InputError, match="--input-tensor-format json"), ready(model, binary_input=False):
        pass


def test_shared_memory_has_the_bytes_that_requests_would_carry(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps({"data": [{"x": [number, 0], "w": ["a" * number]} for number in range(3)]}))
    input_options = Input(source=(str(path),), batch=2, shared_memory="system", output_shared_memory_bytes=50)
    model = ModelDescription("m", "", "", MODEL.inputs, (Tensor("y", "FP32", (3,)), Tensor("s", "BYTES", (1,))), 8)
    server = Registry()
    with prepare_payloads(model, input_options, HTTP, server) as prepared:
        documents = [json.loads(http(each).body) for each in requests(prepared, 3)]
        inputs = [{each["name"]: each["parameters"] for each in document["inputs"]} for document in documents]
        outputs = [each["parameters"]["shared_memory_byte_size"] for each in documents[0]["outputs"]]
        parts = []
        for step in inputs:
            place = step["w"]
            offset = place.get("shared_memory_offset", 0)
            raw = content(server.keys[place["shared_memory_region"]])
            parts.append(raw[offset : offset + place["shared_memory_byte_size"]])
        assert len(server.sizes) == 4

    assert outputs == [2 * 3 * 4, 2 * 50]
    assert parts == [b"\0\0\0\0\1\0\0\0a", b"\2\0\0\0aa\0\0\0\0", b"\1\0\0\0a\2\0\0\0aa"]


def test_shared_memory_is_removed_when_its_block_ends_in_any_way() -> None:
    server = Registry()
    with pytest.raises(KeyError), prepare_payloads(MODEL, Input(shared_memory="system"), HTTP, server):
        raise KeyError

    assert server.sizes == {}
    assert [key for key in server.keys.values() if Path(f"/dev/shm{key}").exists()] == []


def test_shared_memory_is_removed_if_the_server_rejects_a_later_region() -> None:
    server = Registry(most=2)
    with pytest.raises(ControlError), prepare_payloads(MODEL, Input(shared_memory="system"), HTTP, server):
        pass

    assert server.sizes == {}
    assert [key for key in server.keys.values() if Path(f"/dev/shm{key}").exists()] == []


def test_two_runs_use_different_regions() -> None:
    server = Registry()
    input_options = Input(shared_memory="system")
    with prepare_payloads(MODEL, input_options, HTTP, server), prepare_payloads(MODEL, input_options, GRPC, server):
        assert len(server.sizes) == 6


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """What the command finds of CUDA."""
    runtime = FakeRuntime()
    monkeypatch.setattr(cuda_regions, "find_runtime", lambda: runtime)
    return runtime


@pytest.mark.parametrize("target", [HTTP, GRPC])
def test_device_memory_has_the_same_bytes_and_is_freed_with_its_block(device: FakeRuntime, target: Target) -> None:
    server = Registry()
    input_options = Input(shared_memory="cuda", batch=2, seed=7)
    with prepare_payloads(MODEL, input_options, target, server) as prepared:
        assert len(requests(prepared, 2)) == 2
        held = {region: device.open_handle(handle, 0) for region, handle in server.handles.items()}
        region = next(each for each in held if each.endswith("_input_0"))
        values = bytearray(16)
        device.read(held[region], 0, memoryview(values))
        assert [device.bytes_to_end(pointer, 0) >= server.sizes[region] for region, pointer in held.items()] == [
            True
        ] * 3

    with prepare_payloads(MODEL, Input(batch=2, seed=7), HTTP, server) as without_memory:
        assert bytes(values) in requests(without_memory, 1)[0]
    assert server.sizes == {}
    assert device.alive["device"] == 0


def test_device_memory_is_freed_if_the_server_or_the_device_rejects_a_later_region(device: FakeRuntime) -> None:
    with (
        pytest.raises(ControlError),
        prepare_payloads(MODEL, Input(shared_memory="cuda"), HTTP, server := Registry(most=2)),
    ):
        pass
    assert (server.sizes, device.alive["device"]) == ({}, 0)
    for call in ("cudaMalloc", "cudaIpcGetMemHandle", "cudaMemcpy"):
        device.fail(call, 2, after=1)
        with (
            pytest.raises(InputError, match=r"^--shared-memory cuda: .*the fake device"),
            prepare_payloads(MODEL, Input(shared_memory="cuda"), HTTP, server),
        ):
            pass
        assert (server.sizes, device.alive["device"]) == ({}, 0)
