"""CUDA graphs: captured exclusively, one per bucket of rows, and replayed on the thread that captured them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends import cuda_calls, cuda_gate, onnx_cuda, onnx_cuda_binding, onnx_cuda_session, onnx_cuda_slabs
from penstock.backends.backend import Array
from penstock.backends.cuda_gate import Gate
from penstock.backends.device_array import DeviceArray
from penstock.backends.errors import Code, InferError
from penstock.backends.onnx_cuda import CudaBackend, load_on_gpu
from penstock.backends.onnx_cuda_binding import CudaBinding
from tests.backends import fake_cuda
from tests.backends.contract import batched, float_rows, infer
from tests.backends.fake_cuda import FakeMemory, FakeRuntime
from tests.backends.fake_session import FakeBinding, FakeGround, FakeSession
from tests.backends.onnx_models import FLOAT, contract_model, ints, node, save, value

PATIENCE_S = 10.0
A_MOMENT_S = 0.05
"""Enough time for a thread that is not blocked to advance."""
WORDS = (
    "This session cannot use the graph capture feature as requested by the user as the model has control flow nodes "
    "which can't be supported by CUDAExecutionProvider"
)


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate for the test alone: the gate of the process stays open for other tests."""
    new_gate = Gate()
    for module in (cuda_gate, cuda_calls, onnx_cuda, onnx_cuda_session, onnx_cuda_binding, onnx_cuda_slabs, fake_cuda):
        monkeypatch.setattr(module, "GATE", new_gate)
    return new_gate


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return contract_model("rows", tmp_path / "model.onnx")


def loaded(path: Path, ground: FakeGround, graphs: str = "1", rows: str = "") -> tuple[CudaBackend, CudaBinding]:
    backend = load_on_gpu(path, 0, {"penstock.gpu_graphs": graphs, "penstock.rows": rows}, ground)
    binding = backend.bind(batched(backend.graph), 8)
    assert isinstance(binding, CudaBinding)
    return backend, binding


def prepare(binding: CudaBinding, rows: int) -> None:
    for buffer in binding.acquire_buffers(rows, [(rows, 4)]):
        assert buffer is not None
        buffer[...] = 0
    binding.prepare(rows, [(rows, 4)])


def session_of(ground: FakeGround) -> FakeSession:
    (session,) = ground.sessions
    return session


def check(binding: CudaBinding, rows: int, first: float = 0.0, positions: tuple[int, ...] = (0, 1)) -> None:
    array = float_rows(rows, first)
    all_outputs: list[Array] = [array * 2, array.sum(axis=1)]
    for position, output in zip(positions, infer(binding, [array], positions), strict=True):
        np.testing.assert_array_equal(all_outputs[position], output)


def test_only_prepared_sizes_are_replayed(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground)
    prepare(binding, 4)
    prepare(binding, 2)
    prepare(binding, 4)
    for turn in range(3):
        check(binding, 4, turn)
        check(binding, 2, turn)
        check(binding, 3, turn)

    assert ground.providers[0][0][1]["enable_cuda_graph"] == "1"
    assert session_of(ground).captures == ["1", "2"]
    assert session_of(ground).replays == ["1", "2"] * 3


def test_a_size_runs_once_before_its_graph_is_captured(runtime: FakeRuntime, path: Path) -> None:
    took: list[int] = []
    ground = FakeGround(runtime, capturing=lambda: took.append(binding.device_ns))
    _, binding = loaded(path, ground)
    prepare(binding, 4)

    assert took == [fake_cuda.COMPUTE_NS]


def test_a_size_that_does_not_fit_in_memory_gets_no_graph(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground, "auto")
    runtime.fail("cudaMemcpyAsync", 2)
    for rows in (8, 8, 4):
        prepare(binding, rows)
    check(binding, 8)
    check(binding, 4)

    assert session_of(ground).captures == ["1"]
    assert session_of(ground).replays == ["1"]


@pytest.mark.parametrize(("graphs", "captures"), [("auto", ["1"]), ("1", ["1", "2"])])
def test_automatic_graphs_are_not_captured_when_memory_is_short(
    runtime: FakeRuntime, path: Path, graphs: str, captures: list[str]
) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground, graphs)
    prepare(binding, 8)
    runtime.take(runtime.total * 15 // 16, 0)
    prepare(binding, 4)
    check(binding, 8)
    check(binding, 4)

    assert session_of(ground).captures == captures
    assert session_of(ground).replays == captures


def test_a_graph_serves_any_selection_of_outputs(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground)
    prepare(binding, 4)
    for positions in [(0,), (1,), (1, 0)]:
        check(binding, 4, positions=positions)

    assert session_of(ground).replays == ["1"] * 3


def test_rows_are_padded_to_the_next_bucket_and_answers_are_cut(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground, rows="1,4,8")
    for rows in (1, 4, 8):
        prepare(binding, rows)
    for rows in (1, 2, 3, 4, 5, 8):
        check(binding, rows, first=rows)

    assert session_of(ground).replays == ["1", "2", "2", "2", "3", "3"]


def test_each_binding_has_its_own_graphs(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    backend, first = loaded(path, ground)
    second = backend.bind(batched(backend.graph), 8)
    assert isinstance(second, CudaBinding)
    prepare(first, 4)
    prepare(second, 4)
    for turn in range(2):
        for binding in (first, second):
            check(binding, 4, turn)

    assert session_of(ground).replays == ["1", "2"] * 2


def test_runs_on_another_thread_do_not_use_graphs(runtime: FakeRuntime, path: Path) -> None:
    """ONNX Runtime would capture again there, and not exclusively."""
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground)
    prepare(binding, 4)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check, binding, 4).result(PATIENCE_S)
        pool.submit(prepare, binding, 2).result(PATIENCE_S)

    assert session_of(ground).captures == ["1"]
    assert session_of(ground).replays == []


def test_growing_a_slab_discards_its_graphs(runtime: FakeRuntime, tmp_path: Path) -> None:
    path = save(
        tmp_path / "model.onnx",
        [node("ReduceSum", ["x", "one"], ["y"], keepdims=0)],
        [value("x", FLOAT, ["N", "M"])],
        [value("y", FLOAT, ["N"])],
        {"one": ints([1])},
    )
    ground = FakeGround(runtime)
    backend = load_on_gpu(path, 0, {"penstock.gpu_graphs": "1"}, ground)
    binding = backend.bind(batched(backend.graph), 2)
    assert isinstance(binding, CudaBinding)
    binding.prepare(2, [(2, 3)])
    array = np.ones((2, 3), np.float32)
    assert infer(binding, [array])[0].tolist() == [3, 3]
    assert infer(binding, [np.ones((2, 100), np.float32)])[0].tolist() == [100, 100]
    assert infer(binding, [array])[0].tolist() == [3, 3]

    assert session_of(ground).replays == ["1"]


def test_a_shared_tensor_is_copied_to_the_input_of_the_graph(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground)
    prepare(binding, 4)
    memory = FakeMemory.holding(runtime, float_rows(4, 5.0))
    binding.acquire_buffers(4, [(4, 4)])
    binding.set_input_parts(0, [DeviceArray(memory, 0, (4, 4), np.dtype(np.float32))])

    np.testing.assert_array_equal(float_rows(4, 5.0) * 2, binding.run((0,))[0])
    assert session_of(ground).replays == ["1"]
    assert runtime.copies["d2d"] == 1


def test_shared_rows_are_padded_to_the_bucket_of_the_graph(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground, rows="1,8")
    prepare(binding, 8)
    memory = FakeMemory.holding(runtime, float_rows(3, 5.0))
    binding.acquire_buffers(3, [(3, 4)])
    binding.set_input_parts(0, [DeviceArray(memory, 0, (3, 4), np.dtype(np.float32))])

    np.testing.assert_array_equal(float_rows(3, 5.0) * 2, binding.run((0,))[0])
    assert session_of(ground).replays == ["1"]
    assert runtime.copies["d2d"] == 1 + 5


@pytest.mark.parametrize("graphs", ["1", "auto"])
def test_a_model_that_cannot_have_graphs_is_rejected_or_loaded_without_graphs(
    runtime: FakeRuntime, path: Path, graphs: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(options: Mapping[str, str]) -> Exception | None:
        return RuntimeError(WORDS) if options["enable_cuda_graph"] == "1" else None

    ground = FakeGround(runtime, fails=fails)
    if graphs == "1":
        with pytest.raises(InferError, match="control flow") as caught:
            loaded(path, ground, graphs)
        assert caught.value.code is Code.INVALID
        return
    _, binding = loaded(path, ground, graphs)
    prepare(binding, 4)
    check(binding, 4)

    assert session_of(ground).captures == []
    assert caplog.text.count("no CUDA graphs") == 1
    assert "control flow" in caplog.text


@pytest.mark.parametrize("graphs", ["1", "auto"])
def test_a_failed_capture_is_an_error_or_turns_graphs_off(
    runtime: FakeRuntime, path: Path, graphs: str, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil() -> None:
        raise RuntimeError("CUDA failure 901: operation failed due to a previous error during capture")

    ground = FakeGround(runtime, capturing=spoil)
    backend, binding = loaded(path, ground, graphs)
    other = backend.bind(batched(backend.graph), 8)
    assert isinstance(other, CudaBinding)
    check(other, 3)
    if graphs == "1":
        with pytest.raises(InferError, match="CUDA failure 901") as caught:
            prepare(binding, 4)
        assert caught.value.code is Code.INVALID
    else:
        prepare(binding, 4)
        prepare(other, 4)
        for each in (binding, other):
            check(each, 4)
            check(each, 3)
        assert ground.providers[1][0][1]["enable_cuda_graph"] == "0"
        assert caplog.text.count("no CUDA graphs") == 1
    backend.close()
    assert not ground.sessions
    assert runtime.alive["streams"] == 0


@pytest.mark.parametrize("on_host", [(), ("total",)])
def test_a_session_reloaded_without_graphs_runs_the_prepared_size(
    runtime: FakeRuntime, path: Path, on_host: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil() -> None:
        raise RuntimeError("CUDA failure 901: operation failed due to a previous error during capture")

    ran: list[str] = []
    run = FakeSession.run_with_iobinding

    def noted(session: FakeSession, *takes: Any) -> None:
        ran.append("with graphs" if session._graphs else "without")
        run(session, *takes)

    monkeypatch.setattr(FakeSession, "run_with_iobinding", noted)
    _, binding = loaded(path, FakeGround(runtime, capturing=spoil, on_host=on_host), "auto")
    prepare(binding, 4)

    assert ran[-1] == "without"
    assert "with graphs" in ran


def test_a_model_with_a_tensor_on_the_host_is_not_captured(runtime: FakeRuntime, path: Path) -> None:
    _, binding = loaded(path, FakeGround(runtime, on_host={"total"}), "auto")
    prepare(binding, 4)
    check(binding, 4)

    _, binding = loaded(path, FakeGround(runtime, on_host={"total"}), "1")
    with pytest.raises(InferError, match="not bound on the device"):
        prepare(binding, 4)


def test_a_model_with_unbound_outputs_is_not_captured_and_not_reloaded(runtime: FakeRuntime, tmp_path: Path) -> None:
    outputs = [value("y", FLOAT, ["N", "M"])]
    path = save(tmp_path / "model.onnx", [node("Add", ["x", "x"], ["y"])], [value("x", FLOAT, ["N", "M"])], outputs)
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground, "auto")
    prepare(binding, 4)

    assert infer(binding, [float_rows(4)])[0].tolist() == (2 * float_rows(4)).tolist()
    assert len(ground.providers) == 1
    _, binding = loaded(path, ground, "1")
    with pytest.raises(InferError, match="CUDA graphs are enabled, but a tensor of the model is not bound"):
        prepare(binding, 4)


def test_other_uses_of_cuda_wait_during_a_capture(runtime: FakeRuntime, path: Path) -> None:
    """Other uses wait until the capture is over; otherwise they would fail, and the capture with them."""
    _, other = loaded(path, FakeGround(runtime), "0")
    began, ended = threading.Event(), threading.Event()

    def use() -> None:
        began.set()
        check(other, 3)
        runtime.free(runtime.allocate(100, 1), 1)
        ended.set()

    with ThreadPoolExecutor(1) as pool:

        def meanwhile() -> None:
            running.append(pool.submit(use))
            assert began.wait(PATIENCE_S)
            assert not ended.wait(A_MOMENT_S)

        running: list[object] = []
        _, binding = loaded(path, FakeGround(runtime, capturing=meanwhile), "1")
        prepare(binding, 4)
        assert ended.wait(PATIENCE_S)
    check(binding, 4)


def test_trim_memory_keeps_memory_that_graphs_use(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    _, binding = loaded(path, ground)
    prepare(binding, 4)
    check(binding, 4)
    binding.trim_memory()

    assert session_of(ground).shrunk == 0


def test_graphs_are_off_when_every_run_shrinks_the_arena(runtime: FakeRuntime, path: Path) -> None:
    shrinks = {"memory.enable_memory_arena_shrinkage": "cpu:0;gpu:0"}
    ground = FakeGround(runtime)
    backend = load_on_gpu(path, 0, {"penstock.gpu_graphs": "auto", **shrinks}, ground)
    binding = backend.bind(batched(backend.graph), 4)
    assert isinstance(binding, CudaBinding)
    prepare(binding, 4)
    check(binding, 4)

    assert session_of(ground).captures == []
    with pytest.raises(InferError, match="releases the memory that graphs use"):
        load_on_gpu(path, 0, {"penstock.gpu_graphs": "1", **shrinks}, ground)


def test_invalid_graph_options_are_rejected(runtime: FakeRuntime, path: Path) -> None:
    for options in ({"penstock.gpu_graphs": "yes"}, {"penstock.gpu_graphs": "1", "penstock.rows": "1,two"}):
        with pytest.raises(InferError, match=r"option 'penstock\.\w+' must ") as caught:
            load_on_gpu(path, 0, options, FakeGround(runtime))
        assert caught.value.code is Code.INVALID
    with pytest.raises(InferError, match="with TensorRT"):
        load_on_gpu(path, 0, {"penstock.gpu_graphs": "1", "penstock.tensorrt": "1"}, FakeGround(runtime))


class Waiting(threading.Condition):
    """`begun` is set when a thread waits."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.set()
        return super().wait(timeout)


class TestGate:
    def test_the_gate_is_open_until_captures_are_enabled(self, gate: Gate) -> None:
        assert gate.shared() is gate.shared()
        gate.enable()
        assert gate.shared() is not gate.shared()

    def test_a_thread_inside_the_gate_may_enter_again(self, gate: Gate) -> None:
        gate.enable()
        with gate.shared(), gate.shared():
            pass
        with gate.exclusive(), gate.shared():
            pass
        with gate.shared(), pytest.raises(RuntimeError), gate.exclusive():
            pass

    def test_exclusive_entry_waits_until_all_have_left(self, gate: Gate) -> None:
        gate.enable()
        order: list[str] = []
        inside = threading.Event()

        def capture() -> None:
            inside.set()
            with gate.exclusive():
                order.append("alone")

        with ThreadPoolExecutor(1) as pool:
            with gate.shared():
                waiting = pool.submit(capture)
                assert inside.wait(PATIENCE_S)
                order.append("shared")
            waiting.result(PATIENCE_S)
        with gate.shared():
            order.append("shared")

        assert order == ["shared", "alone", "shared"]

    def test_exclusive_entry_blocks_no_short_uses_while_it_waits_for_a_load(self, gate: Gate) -> None:
        gate.enable()
        order: list[str] = []
        requested = threading.Event()

        def capture() -> None:
            requested.set()
            with gate.exclusive():
                order.append("alone")

        with ThreadPoolExecutor(2) as pool:
            with gate.shared(long=True):
                waiting = pool.submit(capture)
                assert requested.wait(PATIENCE_S)
                for _ in range(3):
                    pool.submit(self._use, gate, order).result(PATIENCE_S)
            waiting.result(PATIENCE_S)
            pool.submit(self._use, gate, order).result(PATIENCE_S)

        assert order == ["shared"] * 3 + ["alone", "shared"]

    def test_a_finalizer_inside_the_gate_does_not_deadlock_with_its_own_thread(self, gate: Gate) -> None:
        gate.enable()
        gate._changed = waiting = Waiting()
        order: list[str] = []

        def free(*_: Any) -> Any:
            """Use CUDA in the middle of any code, as a finalizer does."""
            with gate.shared():
                order.append("freed")
            return free

        def use() -> None:
            sys.settrace(free)
            with gate.shared():
                capturing.start()
                assert waiting.begun.wait(PATIENCE_S)
            sys.settrace(None)

        def capture() -> None:
            with gate.exclusive():
                order.append("alone")

        using, capturing = (threading.Thread(target=each, daemon=True) for each in (use, capture))
        using.start()
        for each in (using, capturing):
            each.join(PATIENCE_S)

        assert not using.is_alive()
        assert order.count("alone") == 1

    def _use(self, gate: Gate, order: list[str]) -> None:
        with gate.shared():
            order.append("shared")


def test_tensors_are_bound_only_while_the_gate_is_held(
    runtime: FakeRuntime, path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime uses a stream for each tensor that is bound."""
    gate.enable()
    inside: list[bool] = []
    bind = FakeBinding.bind_input

    def noted(*args: Any) -> None:
        inside.append(gate.is_held)
        bind(*args)

    monkeypatch.setattr(FakeBinding, "bind_input", noted)
    backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
    infer(backend.bind(batched(backend.graph), 4), [float_rows(2)])

    assert inside
    assert all(inside)
