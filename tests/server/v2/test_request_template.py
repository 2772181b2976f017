"""Repeated requests with tensors in shared memory: which parts are cached, and which are read again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.request import InferRequest
from penstock.server.v2 import layout as http_layout
from penstock.server.v2.call_parameters import Options, PerOutputPlan
from penstock.server.v2.decode import decode_and_cache
from penstock.server.v2.finish import finish_all
from penstock.server.v2.regions import InlineRegions, LargeRead, Regions
from penstock.server.v2.rpc import decode as rpc
from penstock.server.v2.rpc import layout as rpc_layout
from penstock.server.v2.system_regions import SystemRegions
from tests.fakes import NoSink, fake_model
from tests.processes import descriptors
from tests.server.v2.rpc.calls import pb

SINK = NoSink()
SIZE = 256
A, B, Y = "a", "b", "y"
PAIR = Signature(
    (TensorSpec(A, "INT32", (-1, 4)), TensorSpec(B, "INT32", (-1, 4))), (TensorSpec(Y, "FP32", (-1, 4)),), batched=True
)


def place(offset: int, byte_size: int = 16, region: str = "r") -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_byte_size": byte_size, "shared_memory_offset": offset}


class Transport:
    """Decodes as a lane does, for a model with two inputs. `in_full` counts full decodes; `sent` is the last size."""

    def __init__(self, regions: Regions, signature: Signature) -> None:
        self.model = fake_model(signature=signature)
        self.regions = regions
        self.in_full = 0
        self.sent = 0

    def read(
        self, inputs: Mapping[str, dict[str, Any] | bytes], outputs: Mapping[str, dict[str, Any]], request_id: str = ""
    ) -> tuple[InferRequest, Options]:
        """Decode a request of one row whose inputs are places in shared memory, or bytes."""
        raise NotImplementedError

    def entries(self, inputs: Mapping[str, dict[str, Any] | bytes]) -> Sequence[tuple[str, str, list[int], Any]]:
        known = self.model.signature.input
        return [(name, known[name].datatype, [1, *known[name].shape[1:]], value) for name, value in inputs.items()]


class Http(Transport):
    def __init__(self, regions: Regions, signature: Signature) -> None:
        super().__init__(regions, signature)
        self.layouts = http_layout.Layouts(regions)

    def read(
        self, inputs: Mapping[str, dict[str, Any] | bytes], outputs: Mapping[str, dict[str, Any]], request_id: str = ""
    ) -> tuple[InferRequest, Options]:
        document: dict[str, Any] = {"id": request_id} if request_id else {}
        document["inputs"] = [
            {"name": name, "datatype": datatype, "shape": shape,
             "parameters": {"binary_data_size": len(value)} if isinstance(value, bytes) else value}
            for name, datatype, shape, value in self.entries(inputs)
        ]  # fmt: skip
        document["outputs"] = [{"name": name, "parameters": value} for name, value in outputs.items()]
        text = json.dumps(document).encode()
        body = text + b"".join(value for value in inputs.values() if isinstance(value, bytes))
        header_bytes = len(text) if len(body) > len(text) else -1
        found = self.layouts.find(self.model, body, header_bytes, SINK)
        if found is None:
            self.in_full += 1
            found = decode_and_cache(self.model, body, header_bytes, 100, SINK, self.layouts)
        self.sent = len(body)
        return found


class Grpc(Transport):
    def __init__(self, regions: Regions, signature: Signature) -> None:
        super().__init__(regions, signature)
        self.layouts = rpc_layout.RpcLayouts(regions)

    def read(
        self, inputs: Mapping[str, dict[str, Any] | bytes], outputs: Mapping[str, dict[str, Any]], request_id: str = ""
    ) -> tuple[InferRequest, Options]:
        infer_request = pb.ModelInferRequest(model_name="m", id=request_id)
        for name, datatype, shape, value in self.entries(inputs):
            tensor = infer_request.inputs.add(name=name, datatype=datatype, shape=shape)
            if isinstance(value, bytes):
                infer_request.raw_input_contents.append(value)
            else:
                self._say(tensor, value)
        for name, value in outputs.items():
            self._say(infer_request.outputs.add(name=name), value)
        message = infer_request.SerializeToString(deterministic=True)
        _, start, _ = rpc_layout.read_head(message)
        self.sent = len(message)
        found = self.layouts.find(self.model, message, start, request_id, SINK)
        if found is None:
            self.in_full += 1
            found = rpc.decode(self.model, infer_request, SINK, self.regions)
            found[0].nbytes += len(message)
            self.layouts.add(*found, message, start, infer_request)
        return found

    @staticmethod
    def _say(tensor: Any, items: dict[str, Any]) -> None:
        for key, value in items.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(tensor.parameters[key], kind, value)


KINDS = pytest.mark.parametrize("kind", [Http, Grpc])


class Shared:
    """A server's system regions in a folder, with `r` registered; `memory` is what a client has there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.regions = InlineRegions(Regions(allowed=True))
        self.system = SystemRegions(self.regions, folder)
        self.create("key")
        self.system.register("r", "key", 0, SIZE)

    def create(self, key: str) -> None:
        (self.folder / key).write_bytes(bytes(range(SIZE)))

    def write(self, offset: int, content: bytes, key: str = "key") -> None:
        with (self.folder / key).open("r+b") as file:
            file.seek(offset)
            file.write(content)

    def at(self, offset: int, size: int = 16, key: str = "key") -> bytes:
        return (self.folder / key).read_bytes()[offset : offset + size]


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    return Shared(tmp_path)


def values(request: InferRequest) -> list[bytes]:
    return [np.asarray(array).tobytes() for array in request.inputs]


INPUTS: dict[str, dict[str, Any] | bytes] = {A: place(0), B: place(16)}
OUTPUT = {Y: place(32)}


@KINDS
def test_a_repeated_request_reads_its_shared_memory_again(shared: Shared, kind: type[Transport]) -> None:
    lane = kind(shared.regions, PAIR)
    first, _ = lane.read(INPUTS, OUTPUT)
    shared.write(0, b"another value 16")
    second, options = lane.read(INPUTS, OUTPUT)

    assert lane.in_full == 1
    assert values(first) == [bytes(range(16)), bytes(range(16, 32))]
    assert values(second) == [b"another value 16", bytes(range(16, 32))]
    assert (second.rows, second.key, second.output_positions) == (first.rows, first.key, first.output_positions)
    assert first.nbytes == second.nbytes == lane.sent + 32
    finish_all(lane.model, second.output_positions, options.plan, [np.arange(4, dtype=np.float32)[np.newaxis]])
    assert shared.at(32) == np.arange(4, dtype=np.float32).tobytes()


@KINDS
def test_repeated_requests_keep_their_own_ids(shared: Shared, kind: type[Transport]) -> None:
    lane = kind(shared.regions, PAIR)
    assert [lane.read(INPUTS, OUTPUT, name)[0].id for name in ("1", "22", "three", "1")] == ["1", "22", "three", "1"]
    assert lane.in_full == 1


@KINDS
def test_a_repeated_request_may_mix_inline_and_shared_memory_inputs(shared: Shared, kind: type[Transport]) -> None:
    lane = kind(shared.regions, PAIR)
    for raw in (b"0123456789abcdef", b"fedcba9876543210"):
        for inputs in ({A: raw, B: place(16)}, {B: place(16), A: raw}):
            request, _ = lane.read(inputs, OUTPUT)
            assert values(request) == [raw, bytes(range(16, 32))]
            assert request.nbytes == lane.sent + 16
    assert lane.in_full == 2


@KINDS
def test_strings_and_booleans_in_shared_memory_are_decoded_again_for_each_request(
    shared: Shared, kind: type[Transport]
) -> None:
    signature = Signature((TensorSpec(A, "BYTES", (-1, 1)), TensorSpec(B, "BOOL", (-1, 2))), PAIR.outputs, batched=True)
    lane = kind(shared.regions, signature)
    for word, flags in ((b"abc", b"\0\7"), (b"xyz", b"\1\0")):
        shared.write(0, (3).to_bytes(4, "little") + word + flags)
        request, _ = lane.read({A: place(0, 7), B: place(7, 2)}, OUTPUT)
        assert [np.asarray(each).tolist() for each in request.inputs] == [[[word]], [[bool(flag) for flag in flags]]]
    assert lane.in_full == 1


@KINDS
def test_an_empty_tensor_in_shared_memory_needs_no_byte_size(shared: Shared, kind: type[Transport]) -> None:
    free = Signature((TensorSpec(A, "INT32", (-1, 0)), PAIR.inputs[1]), PAIR.outputs, batched=True)
    lane = kind(shared.regions, free)
    for _ in range(2):
        request, _ = lane.read({A: {"shared_memory_region": "r"}, B: place(16)}, OUTPUT)
        assert values(request) == [b"", bytes(range(16, 32))]
        assert request.nbytes == lane.sent + 16
    assert lane.in_full == 1


@KINDS
def test_a_repeated_request_for_an_unregistered_region_is_not_found(shared: Shared, kind: type[Transport]) -> None:
    lane = kind(shared.regions, PAIR)
    lane.read(INPUTS, OUTPUT)
    shared.system.unregister("r")
    with pytest.raises(InferError) as caught:
        lane.read(INPUTS, OUTPUT)

    assert caught.value.code is Code.NOT_FOUND
    assert caught.value.message == "Unable to find shared memory region: 'r'"


@KINDS
@pytest.mark.parametrize(("size", "what"), [(16, "Invalid offset for"), (24, "Invalid offset + byte size for")])
def test_the_bounds_of_a_reregistered_input_region_are_checked_again(
    shared: Shared, kind: type[Transport], size: int, what: str
) -> None:
    lane = kind(shared.regions, PAIR)
    lane.read(INPUTS, {Y: place(0)})
    shared.system.unregister("r")
    shared.system.register("r", "key", 0, size)
    with pytest.raises(InferError) as caught:
        lane.read(INPUTS, {Y: place(0)})

    assert caught.value.message == f"[request id: <id_unknown>] {what} shared memory region: 'r'"


@KINDS
def test_the_bounds_of_a_reregistered_output_region_are_checked_again(shared: Shared, kind: type[Transport]) -> None:
    lane = kind(shared.regions, PAIR)
    lane.read(INPUTS, OUTPUT)
    shared.system.unregister("r")
    shared.system.register("r", "key", 0, 40)
    with pytest.raises(InferError, match=r"Invalid offset \+ byte size for shared memory region: 'r'"):
        lane.read(INPUTS, OUTPUT)


@KINDS
def test_a_repeated_request_reads_the_new_region_registered_under_the_same_name(
    shared: Shared, kind: type[Transport]
) -> None:
    lane = kind(shared.regions, PAIR)
    lane.read(INPUTS, OUTPUT)
    shared.create("other")
    shared.write(0, b"in the other one", "other")
    shared.system.unregister("r")
    shared.system.register("r", "other", 0, SIZE)
    request, _ = lane.read(INPUTS, OUTPUT)

    assert lane.in_full == 1
    assert values(request)[0] == b"in the other one"


@KINDS
def test_a_cached_request_template_keeps_no_region_open(shared: Shared, kind: type[Transport]) -> None:
    before = descriptors()
    lane = kind(shared.regions, PAIR)
    held = [lane.read(INPUTS, OUTPUT) for _ in range(3)]
    shared.system.unregister("r")
    assert descriptors() == before

    # a request in progress still writes to its region, and the last one releases the region
    for request, options in held[:2]:
        assert type(options.plan) is PerOutputPlan
        finish_all(lane.model, request.output_positions, options.plan, [np.ones((1, 4), np.float32)])
    assert shared.at(32) == np.ones(4, np.float32).tobytes()
    assert descriptors() == before
    del held, request, options
    assert descriptors() == before - 1
    assert len(lane.layouts) == 1  # type: ignore[attr-defined]


@KINDS
def test_a_repeated_request_for_a_truncated_file_is_rejected_without_crashing_the_server(
    shared: Shared, kind: type[Transport]
) -> None:
    lane = kind(shared.regions, PAIR)
    lane.read(INPUTS, OUTPUT)
    with (shared.folder / "key").open("r+b") as file:
        file.truncate(20)
    with pytest.raises(InferError, match="its file is smaller than when it was registered"):
        lane.read(INPUTS, OUTPUT)


@KINDS
def test_a_tensor_too_large_to_copy_on_the_event_loop_is_not_read_there(shared: Shared, kind: type[Transport]) -> None:
    lane = kind(InlineRegions(shared.regions, 15), PAIR)
    for _ in range(2):
        with pytest.raises(LargeRead):
            lane.read(INPUTS, OUTPUT)


@KINDS
def test_repeated_classification_requests_share_their_options(shared: Shared, kind: type[Transport]) -> None:
    lane = kind(shared.regions, PAIR)
    (_, first), (_, second) = (lane.read(INPUTS, {Y: {"classification": 2}}) for _ in range(2))

    assert lane.in_full == 1
    assert first is second
    assert type(second.plan) is PerOutputPlan


def test_a_registered_region_does_not_change_the_accounting_of_inline_requests(shared: Shared) -> None:
    lane = Http(shared.regions, PAIR)
    for raw in (b"0123456789abcdef", b"fedcba9876543210"):
        request, _ = lane.read({A: raw, B: raw}, {Y: {"binary_data": True}})
        assert request.nbytes == lane.sent
    assert lane.in_full == 1
