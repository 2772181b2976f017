"""Tensors in shared memory, as both transports decode them: which stay on their device, and which are copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.device_array import HOST, DeviceArray
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.tracing.trace import tensors_of
from penstock.server.v2.call_parameters import Options, PerOutputPlan
from penstock.server.v2.cuda_regions import CudaRegions
from penstock.server.v2.decode import decode
from penstock.server.v2.finish import finish_all
from penstock.server.v2.layout import Layouts
from penstock.server.v2.regions import InlineRegions, LargeRead, Regions
from penstock.server.v2.rpc import decode as rpc
from tests.backends.fake_cuda import FakeRuntime
from tests.fakes import FakeBackend, NoSink, fake_model
from tests.server.v2.documents import decode_remembered
from tests.server.v2.rpc.calls import pb
from tests.shared import SharedArrays

SIZE = 256
SINK = NoSink()
TRANSPORTS = "http", "grpc"


class Device:
    """A server's regions `here`, on device 0, and `there`, on device 1, of 256 bytes each, filled with 0, 1, 2..."""

    def __init__(self) -> None:
        self.runtime = FakeRuntime()
        self.regions = Regions(allowed=True)
        self.cuda = CudaRegions(self.regions, self.runtime)
        self.pointers = []
        for device, name in enumerate(("here", "there")):
            pointer = self.runtime.allocate(SIZE, device)
            self.runtime.write(pointer, device, bytes(range(SIZE)))
            self.cuda.register(name, self.runtime.export_handle(pointer, device), device, SIZE)
            self.pointers.append(pointer)
        self.runtime.calls.clear()

    @property
    def copies(self) -> int:
        """Copies between the host and the devices."""
        return self.runtime.calls["cudaMemcpy"]


@pytest.fixture
def device() -> Device:
    return Device()


def model_of(
    datatype: str = "INT32", outputs: tuple[TensorSpec, ...] = (), *, batched: bool = True, **policy: Any
) -> Model:
    """Make a model whose Bindings are on device 0."""
    x = TensorSpec("x", datatype, (-1, 4) if batched else (4,))
    signature = Signature((x,), outputs or (TensorSpec("y", "FP32", x.shape),), batched=batched)
    spec = ModelSpec("m", 1, Path("model"), signature=signature, policy=BatchPolicy(max_batch_rows=8, **policy))
    model = Model(spec, [FakeBackend(signature, list)], lambda *_: None)
    model.in_place_devices = frozenset({0})
    return model


def place(region: str, byte_size: int, offset: int = 0) -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_byte_size": byte_size, "shared_memory_offset": offset}


def body_of(shape: list[int], where: dict[str, Any], datatype: str, outputs: dict[str, dict[str, Any]]) -> bytes:
    document: dict[str, Any] = {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "parameters": where}]}
    if outputs:
        document["outputs"] = [{"name": name, "parameters": each} for name, each in outputs.items()]
    return json.dumps(document).encode()


def message_of(shape: list[int], where: dict[str, Any], datatype: str, outputs: dict[str, dict[str, Any]]) -> Any:
    def parameters_of(items: dict[str, Any]) -> dict[str, Any]:
        return {
            key: pb.InferParameter(string_param=value)
            if isinstance(value, str)
            else pb.InferParameter(int64_param=value)
            for key, value in items.items()
        }

    message = pb.ModelInferRequest(
        model_name="m", inputs=[{"name": "x", "datatype": datatype, "shape": shape}],
        outputs=[{"name": name} for name in outputs],
    )  # fmt: skip
    for tensor, items in zip((message.inputs[0], *message.outputs), (where, *outputs.values()), strict=True):
        for key, value in parameters_of(items).items():
            tensor.parameters[key].CopyFrom(value)
    return message


def read(
    transport: str, model: Model, regions: Regions, shape: list[int], where: dict[str, Any], **outputs: dict[str, Any]
) -> tuple[InferRequest, Options]:
    datatype = model.signature.inputs[0].datatype
    if transport == "http":
        return decode(model, body_of(shape, where, datatype, outputs), -1, 100, SINK, regions)
    return rpc.decode(model, message_of(shape, where, datatype, outputs), SINK, regions)


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestDeviceInputs:
    def test_an_input_on_the_models_device_is_not_copied(self, device: Device, transport: str) -> None:
        model = model_of()
        request, _ = read(transport, model, InlineRegions(device.regions, 8), [2, 4], place("here", 32, 16))
        array: Any = request.inputs[0]

        assert type(array) is DeviceArray
        assert (array.shape, array.dtype, array.pointer) == ((2, 4), np.dtype(np.int32), device.pointers[0] + 16)
        assert (request.rows, request.key, device.copies) == (2, ((4,),), 0)
        assert np.asarray(array).tobytes() == bytes(range(16, 48))

    @pytest.mark.parametrize("why", ["no model", "another device", "no rows", "BOOL", "BYTES"])
    def test_an_input_is_copied_if_it_is_on_another_device_or_must_be_inspected(
        self, device: Device, transport: str, why: str
    ) -> None:
        model, rows, byte_size, offset = model_of(why if why.startswith("B") else "INT32"), 1, 16, 0
        if why == "no model":
            model.in_place_devices = frozenset()
        elif why == "no rows":
            rows = byte_size = 0
        elif why == "BOOL":
            byte_size = 4
        elif why == "BYTES":
            # four empty strings
            offset = 32
            device.runtime.write(device.pointers[0] + offset, 0, bytes(16))
        where = place("there" if why == "another device" else "here", byte_size, offset)
        request, _ = read(transport, model, device.regions, [rows, 4], where)

        assert type(request.inputs[0]) is np.ndarray
        assert request.inputs[0].shape == (rows, 4)
        if why == "BOOL":
            assert request.inputs[0].tolist() == [[False, True, True, True]]
        if byte_size > 8 and why != "BYTES":
            with pytest.raises(LargeRead):
                read(transport, model, InlineRegions(device.regions, 8), [rows, 4], where)

    @pytest.mark.parametrize(("region", "held"), [("here", 0), ("there", 32)])
    def test_only_copied_inputs_count_toward_the_queues_bytes(
        self, device: Device, transport: str, region: str, held: int
    ) -> None:
        where = place(region, 32)
        request, _ = read(transport, model_of(), device.regions, [2, 4], where)
        carried = len(body_of([2, 4], where, "INT32", {})) if transport == "http" else 0

        assert request.nbytes == carried + held

    def test_an_input_on_the_models_device_is_not_limited_by_the_queues_bytes(
        self, device: Device, transport: str
    ) -> None:
        model = model_of(max_queue_bytes=31)
        assert read(transport, model, device.regions, [2, 4], place("here", 32))[0].rows == 2

        with pytest.raises(InferError, match="has 32 bytes, its queue accepts 31"):
            read(transport, model, device.regions, [2, 4], place("there", 32))
        assert device.copies == 0

    @pytest.mark.parametrize(
        ("where", "code", "text"),
        [
            (place("here", 12), Code.INVALID, "size mismatch for input 'x' for model 'm'. Expected 16, got 12"),
            (place("here", 16, SIZE), Code.INVALID, "Invalid offset for shared memory region: 'here'"),
            (place("here", 16, 244), Code.INVALID, "Invalid offset + byte size for shared memory region: 'here'"),
            (place("nowhere", 16), Code.NOT_FOUND, "Unable to find shared memory region: 'nowhere'"),
        ],
        ids=["size", "offset", "end", "name"],
    )  # fmt: skip
    def test_an_invalid_size_range_or_region_is_rejected_without_a_copy(
        self, device: Device, transport: str, where: dict[str, Any], code: Code, text: str
    ) -> None:
        with pytest.raises(InferError) as caught:
            read(transport, model_of(), device.regions, [1, 4], where)

        assert caught.value.code is code
        assert caught.value.message.endswith(text)
        assert device.copies == 0


def test_a_cached_layout_refers_to_the_device_memory_of_each_request(device: Device) -> None:
    both = Signature(
        (TensorSpec("x", "INT32", (-1, 4)), TensorSpec("w", "INT32", (-1, 1))), (TensorSpec("y", "FP32", (-1, 4)),),
        batched=True,
    )  # fmt: skip
    model = fake_model(signature=both)
    model.in_place_devices = frozenset({0})
    document = json.loads(body_of([1, 4], place("here", 16), "INT32", {"y": place("here", 16, 32)}))
    binary = {"name": "w", "datatype": "INT32", "shape": [1, 1], "parameters": {"binary_data_size": 4}}
    document["inputs"].append(binary)
    text = json.dumps(document).encode()
    layouts = Layouts(device.regions)
    for _ in range(2):
        request, options = decode_remembered(model, text + bytes(4), len(text), 100, SINK, layouts)
        array: Any = request.inputs[0]
        target = request.output_targets[0]
        assert type(array) is DeviceArray
        assert (array.pointer, target.pointer) == (device.pointers[0], device.pointers[0] + 32)
        assert type(options.plan) is PerOutputPlan
        options.plan.release()

    assert len(layouts) == 1
    assert device.copies == 0


def test_the_queue_accounting_of_a_cached_layout_follows_its_region_to_another_device(device: Device) -> None:
    model, layouts = model_of(), Layouts(device.regions)
    body = body_of([2, 4], place("moves", 32), "INT32", {})
    held = []
    for number, pointer in enumerate(device.pointers):
        device.cuda.register("moves", device.runtime.export_handle(pointer, number), number, SIZE)
        for _ in range(2):
            request, _ = decode_remembered(model, body, -1, 100, SINK, layouts)
            held.append(request.nbytes - len(body))
        device.cuda.unregister("moves")

    assert held == [0, 0, 32, 32]
    assert len(layouts) == 1


def test_json_without_regions_is_cached_while_regions_are_registered(device: Device) -> None:
    model, layouts = model_of(), Layouts(device.regions)
    text = body_of([1, 4], {"binary_data_size": 16}, "INT32", {})
    first, _ = decode_remembered(model, text + bytes(16), len(text), 100, SINK, layouts)
    again = layouts.find(model, text + bytes(16), len(text), SINK)

    assert again is not None
    assert first.nbytes == again[0].nbytes == len(text) + 16


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestHostInputs:
    """System regions of 32 KiB, which is more than is copied immediately."""

    SHAPE = (2048, 4)
    WHERE = place("r", 32768)

    @pytest.fixture
    def shared(self, tmp_path: Path) -> SharedArrays:
        shared_arrays = SharedArrays(tmp_path)
        shared_arrays.hold("r", self.values())
        return shared_arrays

    @classmethod
    def values(cls) -> Array:
        return np.arange(8192, dtype=np.int32).reshape(cls.SHAPE)

    def model(self, *, reads_late: bool = True, **policy: Any) -> Model:
        model = model_of(max_queue_rows=4096, split=True, **policy)
        model.reads_at_gather = reads_late
        return model

    def test_a_large_input_stays_in_shared_memory_until_its_batch_is_gathered(
        self, shared: SharedArrays, transport: str
    ) -> None:
        regions, where = InlineRegions(shared.regions, 8), place("r", 32768)
        request, _ = read(transport, self.model(), regions, [*self.SHAPE], where)
        array: Any = request.inputs[0]
        shared.system.unregister("r")

        assert type(array) is DeviceArray
        assert (array.device, array.shape, request.rows, request.key) == (HOST, self.SHAPE, 2048, ((4,),))
        np.testing.assert_array_equal(np.asarray(array), self.values())

    @pytest.mark.parametrize("why", ["looked at", "little", "BOOL"])
    def test_an_input_is_copied_immediately_if_it_is_small_or_must_be_inspected(
        self, shared: SharedArrays, transport: str, why: str
    ) -> None:
        rows, model = (8 if why == "little" else 2048), self.model(reads_late=why != "looked at")
        if why == "BOOL":
            model = model_of("BOOL", max_queue_rows=8192, split=True)
            model.reads_at_gather, rows = True, 8192
        request, _ = read(transport, model, shared.regions, [rows, 4], place("r", min(rows * 16, 32768)))

        assert type(request.inputs[0]) is np.ndarray

    def test_an_input_in_shared_memory_counts_toward_the_queues_bytes_and_their_limit(
        self, shared: SharedArrays, transport: str
    ) -> None:
        request, _ = read(transport, self.model(), shared.regions, [*self.SHAPE], self.WHERE)
        carried = len(body_of([*self.SHAPE], self.WHERE, "INT32", {})) if transport == "http" else 0

        assert request.nbytes == carried + 32768
        with pytest.raises(InferError, match="has 32768 bytes, its queue accepts 32767"):
            read(transport, self.model(max_queue_bytes=32767), shared.regions, [*self.SHAPE], self.WHERE)

    def test_an_input_whose_file_has_been_truncated_is_rejected(self, shared: SharedArrays, transport: str) -> None:
        shared.truncate("r", 32767 + 40)
        with pytest.raises(InferError) as caught:
            read(transport, self.model(), shared.regions, [*self.SHAPE], self.WHERE)

        text = "Invalid shared memory region: 'r', its file is smaller than when it was registered"
        assert (caught.value.code, caught.value.message) == (Code.INVALID, f"[request id: <id_unknown>] {text}")

    def test_an_input_on_another_device_is_copied_immediately(self, device: Device, transport: str) -> None:
        pointer = device.runtime.allocate(32768, 1)
        device.cuda.register("large", device.runtime.export_handle(pointer, 1), 1, 32768)
        request, _ = read(transport, self.model(), device.regions, [*self.SHAPE], place("large", 32768))

        assert type(request.inputs[0]) is np.ndarray


def test_an_input_of_a_cached_layout_is_read_late_and_its_region_is_checked_again(tmp_path: Path) -> None:
    shared, values = SharedArrays(tmp_path), np.arange(8192, dtype=np.int32).reshape(2048, 4)
    shared.hold("r", values)
    model, layouts = model_of(max_queue_rows=4096, split=True), Layouts(InlineRegions(shared.regions))
    model.reads_at_gather = True
    body = body_of([2048, 4], place("r", 32768), "INT32", {})
    for _ in range(2):
        request, _ = decode_remembered(model, body, -1, 100, SINK, layouts)
        array: Any = request.inputs[0]
        assert type(array) is DeviceArray
        assert request.nbytes == len(body) + 32768
    assert len(layouts) == 1

    shared.truncate("r")
    assert layouts.find(model, body, -1, SINK) is None


@pytest.mark.parametrize("transport", TRANSPORTS)
class TestDeviceOutputs:
    def test_outputs_are_written_directly_to_the_models_device_if_their_region_is_large_enough(
        self, device: Device, transport: str
    ) -> None:
        names = "y", "free", "there", "small", "words", "flags"
        shapes = {"free": (-1, -1), "there": (-1, 2), "words": (-1, 2)}
        types = {"words": "BYTES", "flags": "BOOL"}
        specs = tuple(TensorSpec(each, types.get(each, "FP32"), shapes.get(each, (-1, 4))) for each in names)
        model = model_of(outputs=specs)
        expected = {each: place("there" if each == "there" else "here", 64, 8) for each in names}
        expected["small"] = place("here", 31)
        request, options = read(transport, model, device.regions, [2, 4], place("here", 32), **expected)

        assert type(options.plan) is PerOutputPlan
        assert sorted(request.output_targets) == [0, 5]
        assert [(each.shape, each.pointer) for each in request.output_targets.values()] == [
            ((2, 4), device.pointers[0] + 8)
        ] * 2
        assert request.output_targets[5].dtype == np.dtype(np.bool_)

    def test_outputs_of_a_model_on_another_device_are_not_written_directly(
        self, device: Device, transport: str
    ) -> None:
        model = model_of()
        model.in_place_devices = frozenset({3})
        request, _ = read(transport, model, device.regions, [2, 4], place("here", 32), y=place("here", 32))
        assert not hasattr(request, "output_targets")

    def test_an_output_already_written_on_the_device_is_not_copied_again(self, device: Device, transport: str) -> None:
        model = model_of(batched=False)
        request, options = read(transport, model, device.regions, [4], place("here", 16), y=place("here", 64, 8))
        finished = finish_all(model, request.output_positions, options.plan, [request.output_targets[0]])

        assert finished == [("y", "FP32", (4,), None, False)]
        assert device.copies == 0

    def test_an_output_computed_on_the_host_is_checked_and_copied_into_its_region(
        self, device: Device, transport: str
    ) -> None:
        model, y = model_of(), place("here", 32, 8)
        request, options = read(transport, model, device.regions, [2, 4], place("here", 32), y=y)
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        finish_all(model, request.output_positions, options.plan, [values])
        assert np.asarray(request.output_targets[0]).tolist() == values.tolist()

        request, options = read(transport, model, device.regions, [2, 4], place("here", 32), y=place("here", 31))
        copies = device.copies
        with pytest.raises(InferError, match="at least 32 bytes to hold the results"):
            finish_all(model, request.output_positions, options.plan, [values])
        assert device.copies == copies


def test_a_trace_includes_only_the_tensors_that_can_be_read(device: Device) -> None:
    model = model_of()
    request, _ = read("http", model, device.regions, [2, 4], place("here", 32), y=place("here", 32, 64))
    request.outputs = [request.output_targets[0]]
    device.runtime.fail("cudaMemcpy", 1, after=1)
    (found,) = tensors_of(model, request, ("TENSORS",))

    assert (found.name, found.values.tobytes()) == ("x", bytes(range(32)))
