"""Tensors that a run reads and writes in place, in device memory shared by clients."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends import gathering, onnx_cuda_binding
from penstock.backends.backend import Array
from penstock.backends.device_array import DeviceArray
from penstock.backends.errors import Code, InferError, PartUnreadable
from penstock.backends.onnx_cuda import load_on_gpu
from penstock.backends.onnx_cuda_binding import CudaBinding
from tests.backends.contract import batched, float_rows
from tests.backends.fake_cuda import FakeMemory, FakeRuntime
from tests.backends.fake_session import FakeGround
from tests.backends.onnx_models import FLOAT, contract_model, node, save, value
from tests.shared import SharedArrays

FP32 = np.dtype(np.float32)


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def binding(runtime: FakeRuntime, tmp_path: Path) -> CudaBinding:
    return bound(contract_model("rows", tmp_path / "model.onnx"), FakeGround(runtime))


def bound(path: Path, ground: FakeGround, rows: int = 8) -> CudaBinding:
    backend = load_on_gpu(path, 0, {}, ground)
    binding = backend.bind(batched(backend.graph), rows)
    assert isinstance(binding, CudaBinding)
    return binding


def shared(runtime: FakeRuntime, array: Array, device: int = 0) -> DeviceArray:
    """Return an array in device memory, as shared by a client."""
    return DeviceArray(FakeMemory.holding(runtime, array, device), 0, array.shape, array.dtype)


def room(runtime: FakeRuntime, shape: tuple[int, ...], offset: int = 0) -> DeviceArray:
    """Return memory for an output."""
    return DeviceArray(FakeMemory(runtime, 4 * int(np.prod(shape)) + offset), offset, shape, FP32)


def content(array: DeviceArray) -> Array:
    raw = ctypes.string_at(array.pointer, array.nbytes)
    return np.frombuffer(raw, array.dtype).reshape(array.shape)


def run(
    binding: CudaBinding, rows: int, parts: Sequence[Array | DeviceArray], positions: tuple[int, ...] = (0,)
) -> Array:
    binding.acquire_buffers(rows, [(rows, 4)])
    binding.set_input_parts(0, parts)
    result: Array = binding.run(positions)[0]
    return result


def test_a_shared_tensor_for_the_whole_run_is_not_copied(runtime: FakeRuntime, binding: CudaBinding) -> None:
    x = float_rows(3, 7.0)
    np.testing.assert_array_equal(x * 2, run(binding, 3, [shared(runtime, x)]))
    assert runtime.copies == {"d2h": 1}

    # and the next run, without shared memory, reads the slab again
    for buffer in binding.acquire_buffers(3, [(3, 4)]):
        buffer[...] = float_rows(3)  # type: ignore[index]
    np.testing.assert_array_equal(float_rows(3) * 2, binding.run((0,))[0])


def test_unaligned_and_remote_tensors_are_copied_on_the_device(runtime: FakeRuntime, binding: CudaBinding) -> None:
    x = float_rows(3, 7.0)
    memory = FakeMemory.holding(runtime, np.concatenate([np.zeros(1, np.float32), x.ravel()]))
    skewed = DeviceArray(memory, 4, (3, 4), FP32)

    np.testing.assert_array_equal(x * 2, run(binding, 3, [skewed]))
    np.testing.assert_array_equal(x * 2, run(binding, 3, [shared(runtime, x, 1)]))
    assert runtime.copies == {"d2d": 2, "d2h": 2}


def test_parts_of_all_kinds_are_concatenated_and_padded_with_the_last_row(
    runtime: FakeRuntime, binding: CudaBinding
) -> None:
    first, second, third = float_rows(2, 1.0), float_rows(1, 50.0), float_rows(2, 90.0)
    joined = np.concatenate([first, second, third])
    result = run(binding, 8, [shared(runtime, first), second, shared(runtime, third)])

    np.testing.assert_array_equal(joined * 2, result[:5])
    np.testing.assert_array_equal(np.repeat(third[-1:], 3, axis=0) * 2, result[5:])


def test_a_shared_input_wanted_on_the_host_is_read_on_the_host(runtime: FakeRuntime, tmp_path: Path) -> None:
    path = contract_model("rows", tmp_path / "model.onnx")
    binding = bound(path, FakeGround(runtime, on_host={"x"}))
    x = float_rows(2, 3.0)

    np.testing.assert_array_equal(
        np.concatenate([x, x[-1:]]) * 2, run(binding, 3, [shared(runtime, x[:1]), shared(runtime, x[1:])])
    )


def test_a_target_for_the_whole_output_is_written_in_place(runtime: FakeRuntime, binding: CudaBinding) -> None:
    x, target = float_rows(3), room(runtime, (3, 4))
    for _ in range(2):
        binding.acquire_buffers(3, [(3, 4)])
        binding.set_input_parts(0, [shared(runtime, x)])
        assert binding.set_output_targets(0, [(0, target)])
        (doubled,) = binding.run((0,))

        assert doubled.shape == (3, 4)
        np.testing.assert_array_equal(x * 2, content(target))
    assert not runtime.copies


def test_rows_with_targets_are_written_in_place_and_other_rows_to_the_host(
    runtime: FakeRuntime, binding: CudaBinding
) -> None:
    x, first, last = float_rows(6), room(runtime, (2, 4), offset=4), room(runtime, (1, 4))
    (buffer,) = binding.acquire_buffers(6, [(6, 4)])
    buffer[...] = x  # type: ignore[index]
    assert binding.set_output_targets(0, [(1, first), (5, last)])
    doubled, total = binding.run((0, 1))

    np.testing.assert_array_equal((x * 2)[1:3], content(first))
    np.testing.assert_array_equal((x * 2)[5:], content(last))
    np.testing.assert_array_equal((x * 2)[[0, 3, 4]], doubled[[0, 3, 4]])
    np.testing.assert_array_equal(x.sum(axis=1), total)


def test_memory_used_as_input_and_output_is_written_after_it_is_read(
    runtime: FakeRuntime, binding: CudaBinding
) -> None:
    both = shared(runtime, float_rows(3))
    binding.acquire_buffers(3, [(3, 4)])
    binding.set_input_parts(0, [both])
    assert binding.set_output_targets(0, [(0, both)])
    binding.run((0,))

    np.testing.assert_array_equal(float_rows(3) * 2, content(both))
    assert runtime.copies == {"d2d": 1}


@pytest.mark.parametrize(
    ("position", "first", "shape"), [(0, 0, (3, 5)), (0, 2, (2, 4)), (1, 0, (3, 1)), (0, 0, (12,)), (0, 0, ())]
)
def test_a_target_that_does_not_fit_the_output_is_declined(
    runtime: FakeRuntime, binding: CudaBinding, position: int, first: int, shape: tuple[int, ...]
) -> None:
    binding.acquire_buffers(3, [(3, 4)])

    assert not binding.set_output_targets(position, [(first, room(runtime, shape))])


def test_acquiring_buffers_clears_input_parts_and_output_targets(runtime: FakeRuntime, binding: CudaBinding) -> None:
    target = room(runtime, (3, 4))
    binding.acquire_buffers(3, [(3, 4)])
    binding.set_input_parts(0, [shared(runtime, float_rows(3, 9.0))])
    binding.set_output_targets(0, [(0, target)])
    before = content(target).copy()
    (buffer,) = binding.acquire_buffers(3, [(3, 4)])
    buffer[...] = float_rows(3)  # type: ignore[index]

    np.testing.assert_array_equal(float_rows(3) * 2, binding.run((0,))[0])
    np.testing.assert_array_equal(before.view(np.uint8), content(target).view(np.uint8))


def test_a_fed_run_writes_its_output_targets(runtime: FakeRuntime, tmp_path: Path) -> None:
    """The shape of the other output is unknown beforehand, so no tensor of the run is bound."""
    path = save(
        tmp_path / "model.onnx",
        [node("Identity", ["x"], ["y"]), node("NonZero", ["x"], ["z"])],
        [value("x", FLOAT, ["N", 4])],
        [value("y", FLOAT, ["N", 4]), value("z", 7, [2, None])],
    )
    binding = bound(path, FakeGround(runtime))
    target = room(runtime, (2, 4))
    binding.acquire_buffers(3, [(3, 4)])
    binding.set_input_parts(0, [shared(runtime, float_rows(3, 2.0))])
    assert binding.set_output_targets(0, [(1, target)])
    y, z = binding.run((0, 1))

    np.testing.assert_array_equal(float_rows(3, 2.0)[1:], content(target))
    assert y.shape == (3, 4)
    assert z.shape == (2, 12)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedArrays:
    """Shared host memory, with limits so low that one row is copied by the device and gathered without the GIL."""
    monkeypatch.setattr(onnx_cuda_binding, "PINNED_BYTES", 16)
    monkeypatch.setattr(gathering, "NUMPY_GIL_ELEMENTS", 0)
    (tmp_path / "shared").mkdir()
    return SharedArrays(tmp_path / "shared")


def test_shared_host_memory_is_pinned_and_copied_by_the_device(
    runtime: FakeRuntime, binding: CudaBinding, clients: SharedArrays
) -> None:
    rows = [float_rows(1, 100.0 * number) for number in range(5)]
    parts = [clients.hold("a", rows[0]), rows[1], rows[2], clients.hold("b", rows[3]), shared(runtime, rows[4])]
    for _ in range(2):
        assert [binding.can_copy(part) for part in parts if isinstance(part, DeviceArray)] == [True] * 3
        np.testing.assert_array_equal(np.concatenate(rows) * 2, run(binding, 8, parts)[:5])

    # one for the rows from request bodies, and three padded rows
    assert runtime.copies == {"h2d": 2 * 3, "d2d": 2 * (1 + 3), "d2h": 2}
    assert runtime.calls["cudaHostRegister"] == 2


def test_small_or_unpinnable_shared_memory_is_gathered(
    runtime: FakeRuntime, binding: CudaBinding, clients: SharedArrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_cuda_binding, "PINNED_BYTES", 32)
    rows = [float_rows(count, 100.0 * count) for count in (2, 1, 3)]
    runtime.fail("cudaHostRegister", 1)
    parts = [clients.hold(str(len(row)), row) for row in rows]
    assert [binding.can_copy(part) for part in parts] == [False, False, True]

    np.testing.assert_array_equal(np.concatenate(rows) * 2, run(binding, 6, parts))
    assert runtime.copies == {"h2d": 2, "d2h": 1}


def test_truncated_shared_memory_is_an_error_that_names_its_part(
    runtime: FakeRuntime, binding: CudaBinding, clients: SharedArrays
) -> None:
    parts = [clients.hold(name, float_rows(1)) for name in "abc"]
    assert binding.can_copy(parts[0])
    runtime.fail("cudaHostRegister", 1)
    assert not binding.can_copy(parts[2])
    clients.truncate("c")
    binding.acquire_buffers(4, [(4, 4)])
    with pytest.raises(PartUnreadable) as caught:
        binding.set_input_parts(0, [parts[0], parts[1], float_rows(1), parts[2]])

    assert caught.value.part_index == 3
    np.testing.assert_array_equal(float_rows(2) * 2, run(binding, 2, [float_rows(2)]))


def test_shared_memory_stays_pinned_until_the_run_has_ended(
    runtime: FakeRuntime, binding: CudaBinding, clients: SharedArrays
) -> None:
    binding.acquire_buffers(1, [(1, 4)])
    parts = [clients.hold("a", float_rows(1, 5.0))]
    assert binding.can_copy(parts[0])
    binding.set_input_parts(0, parts)
    binding.begin((0,))
    clients.system.unregister()
    parts.clear()
    assert runtime.calls["cudaHostUnregister"] == 0

    np.testing.assert_array_equal(float_rows(1, 5.0) * 2, binding.end()[0])
    assert runtime.calls["cudaHostUnregister"] == 1


def test_releasing_a_binding_unpins_shared_memory_after_its_copies(
    runtime: FakeRuntime, binding: CudaBinding, clients: SharedArrays
) -> None:
    binding.acquire_buffers(1, [(1, 4)])
    binding.set_input_parts(0, [clients.hold("a", float_rows(1))])
    clients.system.unregister()
    binding.begin((0,))
    assert runtime.calls["cudaHostUnregister"] == 0
    binding.release()

    assert runtime.calls["cudaHostUnregister"] == runtime.calls["cudaHostRegister"] == 1


@pytest.mark.parametrize(("call", "says"), [(0, "unable to read"), (1, "unable to write to")])
def test_inaccessible_shared_memory_fails_only_its_own_run(
    runtime: FakeRuntime, binding: CudaBinding, call: int, says: str
) -> None:
    x, target = float_rows(2), room(runtime, (1, 4))
    binding.acquire_buffers(2, [(2, 4)])
    binding.set_input_parts(0, [shared(runtime, x[:1]), shared(runtime, x[1:])])
    binding.set_output_targets(0, [(1, target)])
    runtime.fail("cudaMemcpyAsync", 1, after=3 * call)
    with pytest.raises(InferError, match=says) as caught:
        binding.run((0,))

    assert caught.value.code is Code.INVALID
    np.testing.assert_array_equal(x * 2, run(binding, 2, [x]))


@pytest.fixture(scope="module")
def runtime_and_binding(tmp_path_factory: pytest.TempPathFactory) -> tuple[FakeRuntime, CudaBinding]:
    runtime = FakeRuntime()
    path = contract_model("rows", tmp_path_factory.mktemp("model") / "model.onnx")
    return runtime, bound(path, FakeGround(runtime), 16)


@settings(max_examples=25, deadline=None)
@given(requests=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_any_mix_of_shared_and_host_tensors_returns_the_right_rows(
    runtime_and_binding: tuple[FakeRuntime, CudaBinding], requests: list[tuple[int, bool, bool]]
) -> None:
    runtime, binding = runtime_and_binding
    rows = sum(count for count, _, _ in requests)
    parts: list[Array | DeviceArray] = []
    targets = []
    first = 0
    for count, lies_there, goes_there in requests:
        x = float_rows(count, 1000.0 * len(parts))
        parts.append(shared(runtime, x) if lies_there else x)
        if goes_there:
            targets.append((first, room(runtime, (count, 4))))
        first += count
    joined = np.concatenate([np.asarray(part) for part in parts])
    binding.acquire_buffers(rows, [(rows, 4)])
    binding.set_input_parts(0, parts)
    aimed = bool(targets) and binding.set_output_targets(0, targets)
    (doubled,) = binding.run((0,))

    expected = joined * 2
    for start, target in targets:
        assert aimed
        np.testing.assert_array_equal(expected[start : start + len(target)], content(target))
        doubled[start : start + len(target)] = expected[start : start + len(target)]
    np.testing.assert_array_equal(expected, doubled)
