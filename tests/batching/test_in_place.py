"""Tensors that are read and written in place, on a device whose memory is simulated by bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.device_array import DeviceArray
from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.batching.running.in_place import devices_of
from penstock.batching.running.isolation import execute
from penstock.batching.spec import BatchPolicy, HookSpec, ModelSpec
from tests.fakes import FakeBackend, FakeBinding, fake_request
from tests.shared import SharedArrays

X = TensorSpec("x", "FP32", (-1, 4))
DOUBLED = Signature((X,), (TensorSpec("y", "FP32", (-1, 4)), TensorSpec("sum", "FP32", (-1,))), batched=True)


class Region:
    """A client's memory on device 0: 16 values at most. `broken`: the device refuses it."""

    device, pointer, byte_size = 0, 0x10000, 64

    def __init__(self, values: Array | None = None) -> None:
        self.content = np.zeros(16, np.float32)
        self.broken = False
        self.copied = 0
        if values is not None:
            self.content[: values.size] = values.ravel()

    def read(self, offset: int, into: Array) -> None:
        self.copied += 1
        if self.broken:
            raise self.access_error("read", ValueError())
        into.data.cast("B")[:] = self.content.view(np.uint8).data[offset : offset + into.nbytes]

    def access_error(self, doing: str, error: Exception) -> InferError:
        return InferError(Code.INVALID, f"unable to {doing} shared memory region: 'r'")

    def array(self, rows: int = 1, tail: tuple[int, ...] = (4,)) -> DeviceArray:
        return DeviceArray(self, 0, (rows, *tail), np.dtype(np.float32))


class PlacingBinding(FakeBinding):
    """A Binding of device 0 that copies rows in place; `aims` lists the outputs it can write in place."""

    device = 0
    aims: Sequence[int] = (0, 1)

    def acquire_buffers(self, rows: int, shapes: Sequence[tuple[int, ...] | None]) -> list[Array | None]:
        self.targets: dict[int, Sequence[tuple[int, DeviceArray]]] = {}
        return super().acquire_buffers(rows, shapes)

    def can_copy(self, part: DeviceArray) -> bool:
        return part.device == self.device

    def set_input_parts(self, position: int, parts: Sequence[Any]) -> None:
        into = self._lent[position]
        assert into is not None
        rows: list[Any] = []
        for part in parts:
            if isinstance(part, DeviceArray):
                memory = cast("Region", part.memory)
                if memory.broken:
                    raise memory.access_error("read", ValueError())
                start = part.offset // 4
                rows += list(memory.content[start : start + part.size].reshape(part.shape))
            else:
                rows += list(part)
        for number in range(len(into)):
            into[number] = rows[min(number, len(rows) - 1)]

    def set_output_targets(self, position: int, targets: Sequence[tuple[int, DeviceArray]]) -> bool:
        if position in self.aims:
            self.targets[position] = targets
        return position in self.aims

    def run(self, wanted: Sequence[int]) -> list[Any]:
        outputs = super().run(wanted)
        for at, position in enumerate(wanted):
            for first, target in self.targets.get(position, ()):
                rows = outputs[at][first : first + len(target)]
                cast("Region", target.memory).content[: rows.size] = rows.ravel()
                outputs[at][first : first + len(target)] = np.nan
        return outputs


def doubled(inputs: list[Any]) -> list[Any]:
    return [inputs[0] * 2, inputs[0].sum(axis=1)]


def model_of(**policy: Any) -> tuple[Model, PlacingBinding, FakeBackend]:
    backend = FakeBackend(DOUBLED, doubled)
    batch_policy = BatchPolicy(max_batch_rows=8, executor="thread", **policy)
    model = Model(ModelSpec("m", 1, Path("m"), policy=batch_policy, signature=DOUBLED), [backend], lambda *_: None)
    binding = PlacingBinding(backend, DOUBLED, 8)
    model.in_place_devices = devices_of(model, [binding])
    return model, binding, backend


def request_of(model: Model, value: float, region: Region | None = None, rows: int = 1) -> InferRequest:
    """Make a request whose input is in a region, if there is one."""
    request = fake_request(model, rows, value=value)
    if region is not None:
        region.content[: 4 * rows] = value
        request.inputs = [cast("Array", region.array(rows))]
    return request


def run(model: Model, binding: FakeBinding, *requests: InferRequest) -> None:
    rows = sum(request.rows for request in requests)
    execute(model, binding, Batch(list(requests), rows, requests[0].key, 1))


def values(request: InferRequest) -> list[Any]:
    assert request.error is None
    assert request.outputs is not None
    return [np.asarray(output).ravel().tolist() for output in request.outputs]


def test_inputs_in_shared_memory_are_read_in_place_and_padded() -> None:
    model, binding, backend = model_of(allowed_rows=(4, 8))
    region = Region()
    requests = [request_of(model, 1), request_of(model, 2, region, rows=2)]
    run(model, binding, *requests)

    inputs = backend.runs[0].inputs[0]
    assert inputs is not None
    assert inputs[:, 0].tolist() == [1, 2, 2, 2]
    assert region.copied == 0
    assert [values(request)[1] for request in requests] == [[4], [8, 8]]


def test_outputs_are_written_into_requested_regions_and_others_to_the_host() -> None:
    model, binding, _ = model_of()
    region, requests = Region(), [request_of(model, value) for value in (1, 2, 3)]
    target = region.array()
    requests[1].output_targets = {0: target}
    run(model, binding, *requests)

    assert requests[1].outputs is not None
    assert requests[1].outputs[0] is target
    assert region.content[:4].tolist() == [4] * 4
    assert [values(request) for request in requests] == [[[2] * 4, [4]], [[4] * 4, [8]], [[6] * 4, [12]]]


def test_an_output_that_the_binding_cannot_write_in_place_is_returned_on_the_host() -> None:
    model, binding, _ = model_of()
    binding.aims = (1,)
    region, request = Region(), request_of(model, 1)
    request.output_targets = {0: region.array()}
    run(model, binding, request)

    assert region.content.tolist() == [0] * 16
    assert values(request) == [[2] * 4, [4]]


def test_only_requested_outputs_are_written_into_regions() -> None:
    model, binding, _ = model_of()
    regions = Region(), Region()
    requests = [request_of(model, value) for value in (1, 2)]
    requests[0].output_positions, requests[0].output_targets = (1,), {1: regions[0].array(tail=())}
    requests[1].output_positions, requests[1].output_targets = (1, 0), {0: regions[1].array()}
    run(model, binding, *requests)

    assert regions[0].content[:2].tolist() == [4, 0]
    assert regions[1].content[:4].tolist() == [4] * 4
    assert [values(request) for request in requests] == [[[4]], [[8], [4] * 4]]


def test_an_unreadable_region_fails_only_its_own_request() -> None:
    model, binding, _ = model_of()
    regions = [Region() for _ in range(3)]
    requests = [request_of(model, number + 1, region) for number, region in enumerate(regions)]
    for request, region in zip(requests, regions, strict=True):
        request.output_targets = {0: region.array()}
    regions[1].broken = True
    run(model, binding, *requests)

    assert requests[1].error is not None
    assert requests[1].error.message == "unable to read shared memory region: 'r'"
    assert requests[1].outputs is None
    assert [regions[number].content[0] for number in (0, 2)] == [2, 6]
    assert [values(requests[number])[1] for number in (0, 2)] == [[4], [12]]


def test_a_failed_region_is_released_with_its_request() -> None:
    model, binding, _ = model_of()
    gc.disable()
    try:
        regions = [Region() for _ in range(2)]
        refs = [weakref.ref(region) for region in regions]
        requests = [request_of(model, number + 1, region) for number, region in enumerate(regions)]
        regions[1].broken = True
        run(model, binding, *requests)
        assert requests[1].error is not None
        binding.acquire_buffers(1, [(1, 4)])
        del requests, regions
        assert [each() for each in refs] == [None, None]
    finally:
        gc.enable()


def test_a_binding_without_in_place_access_copies_its_inputs() -> None:
    model, _, backend = model_of()
    region, other = Region(), Region()
    requests = [request_of(model, 1), request_of(model, 2, region)]
    requests[1].output_targets = {0: other.array()}
    for batch in (requests, requests[1:]):
        run(model, FakeBinding(backend, DOUBLED, 8), *batch)

    assert values(requests[1]) == [[4] * 4, [8]]
    assert region.copied == 2
    assert other.content.tolist() == [0] * 16


WIDE = Signature((TensorSpec("x", "FP32", (-1, 4096)),), (TensorSpec("y", "FP32", (-1,)),), batched=True)


def _first_of_rows(x: Any) -> Any:
    return x[:, 0].copy()


def wide(shared: SharedArrays, count: int, binding: type[FakeBinding] = FakeBinding) -> tuple[Any, ...]:
    """A model that returns the first value of each row, and requests 0, 1, 2..., every second in shared memory."""
    backend = FakeBackend(WIDE, lambda inputs: [_first_of_rows(inputs[0])])
    policy = BatchPolicy(max_batch_rows=64, executor="thread")
    model = Model(ModelSpec("m", 1, Path("m"), policy=policy, signature=WIDE), [backend], lambda *_: None)
    requests = [fake_request(model, key=((4096,),), value=number) for number in range(count)]
    for number, request in enumerate(requests):
        if number % 2:
            request.inputs = [shared.hold(str(number), cast("Array", request.inputs[0]))]
    return model, binding(backend, WIDE, 64), backend, requests


@pytest.mark.parametrize("count", [1, 2, 5])
def test_host_shared_memory_is_gathered_with_other_inputs(tmp_path: Path, count: int) -> None:
    model, binding, _, requests = wide(SharedArrays(tmp_path), count)
    run(model, binding, *requests)

    assert [values(request) for request in requests] == [[[number]] for number in range(count)]


def test_a_device_binding_does_not_read_host_shared_memory_itself(tmp_path: Path) -> None:
    model, binding, _, requests = wide(SharedArrays(tmp_path), 2, PlacingBinding)
    model.in_place_devices = frozenset({0})
    run(model, binding, *requests)

    assert [values(request) for request in requests] == [[[0]], [[1]]]


@pytest.mark.parametrize(("shrunk", "runs"), [([3], [3, 4]), ([1], [1, 6]), ([7], [7]), ([1, 5], [1, 3, 2])])
def test_a_region_that_shrinks_before_it_is_gathered_fails_only_its_own_request(
    tmp_path: Path, shrunk: list[int], runs: list[int]
) -> None:
    shared = SharedArrays(tmp_path)
    model, binding, backend, requests = wide(shared, 8)
    for number in shrunk:
        shared.truncate(str(number))
    run(model, binding, *requests)

    for number, request in enumerate(requests):
        if number in shrunk:
            assert request.error is not None
            assert request.error.code is Code.INVALID
            assert request.error.message.endswith("its file is smaller than when it was registered")
        else:
            assert values(request) == [[number]]
    assert [len(cast("Array", each.inputs[0])) for each in backend.runs] == runs


def test_a_region_is_held_until_its_request_has_finished(tmp_path: Path) -> None:
    shared = SharedArrays(tmp_path)
    model, binding, _, requests = wide(shared, 2)
    shared.system.unregister("1")
    shared.system.register("1", "1", 0, 8)
    run(model, binding, *requests)

    assert values(requests[1]) == [[1]]


@pytest.mark.parametrize("why", ["cached", "hooks", "nothing"])
def test_inputs_are_read_late_only_if_neither_cache_nor_hooks_read_them(why: str) -> None:
    model, _, _ = model_of()
    assert not model.reads_at_gather
    if why == "cached":
        model.spec = replace(model.spec, cached=True)
    elif why == "hooks":
        model.spec = replace(model.spec, hooks=HookSpec(path=Path("hooks.py")))
    model.open()
    try:
        assert model.reads_at_gather == (why == "nothing")
    finally:
        model.close()


@pytest.mark.parametrize("why", ["cached", "hooks", "nothing"])
def test_values_read_by_a_cache_or_hooks_are_not_left_on_the_device(why: str) -> None:
    model, binding, _ = model_of()
    if why == "cached":
        model.spec = replace(model.spec, cached=True)
    elif why == "hooks":
        model.spec = replace(model.spec, hooks=HookSpec(path=Path("hooks.py")))
    found = devices_of(model, [binding, FakeBinding(FakeBackend(DOUBLED, doubled), DOUBLED, 8)])

    assert found == (frozenset({0}) if why == "nothing" else frozenset())
