"""The CUDA Backend on a fake device (tests/backends/fake_cuda.py)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array, needs_thread, supports_in_place, supports_overlap
from penstock.backends.datatypes import DATATYPES
from penstock.backends.errors import Code, DeviceLost, InferError, OutOfMemory, RunStopped
from penstock.backends.node import Node
from penstock.backends.onnx_cuda import CudaBackend, load_on_gpu
from penstock.backends.onnx_cuda_binding import CudaBinding
from tests.backends.contract import BackendContract, batched, float_rows, infer
from tests.backends.fake_cuda import COMPUTE_NS, FakeRuntime
from tests.backends.fake_session import FakeGround
from tests.backends.onnx_models import FLOAT, contract_model, floats, ints, node, save, value

NOTHING = {"device": 0, "pinned": 0, "streams": 0, "events": 0, "opened": 0, "bytes": 0}


class TestCudaBackend(BackendContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, name: str) -> CudaBackend:
        path = contract_model(name, self.folder / "model.onnx")
        return load_on_gpu(path, 0, {}, FakeGround(FakeRuntime()))


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return contract_model("rows", tmp_path / "model.onnx")


def bound(backend: CudaBackend, rows: int = 4) -> CudaBinding:
    binding = backend.bind(batched(backend.graph), rows)
    assert isinstance(binding, CudaBinding)
    return binding


def fill(binding: CudaBinding, *inputs: Array) -> None:
    for buffer, array in zip(
        binding.acquire_buffers(len(inputs[0]), [each.shape for each in inputs]), inputs, strict=True
    ):
        assert buffer is not None
        buffer[...] = array


def refusal(path: Path, ground: FakeGround, device: int = 0, **options: str) -> InferError:
    with pytest.raises(InferError) as caught:
        load_on_gpu(path, device, {name.replace("__", "."): value for name, value in options.items()}, ground)
    return caught.value


def pipe(path: Path, axes: list[int | str], code: int = FLOAT) -> Path:
    """Write y = x."""
    return save(path, [node("Identity", ["x"], ["y"])], [value("x", code, axes)], [value("y", code, axes)])


class TestRun:
    def test_a_run_is_queued_by_begin_and_finished_by_end(self, runtime: FakeRuntime, path: Path) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        with runtime.hold():
            fill(binding, float_rows(3))
            binding.begin((0, 1))
            assert not binding.is_done()
        doubled, total = binding.end()

        np.testing.assert_array_equal(float_rows(3) * 2, doubled)
        np.testing.assert_array_equal(float_rows(3).sum(axis=1), total)
        assert binding.is_done()

    def test_runs_of_two_bindings_overlap_on_one_stream(self, runtime: FakeRuntime, path: Path) -> None:
        backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
        first, second = bound(backend), bound(backend)
        assert supports_overlap(first)
        for turn in range(3):
            with runtime.hold():
                fill(first, float_rows(2, turn))
                first.begin((0,))
                fill(second, float_rows(4, 100.0 + turn))
                second.begin((0,))

            np.testing.assert_array_equal(float_rows(2, turn) * 2, first.end()[0])
            np.testing.assert_array_equal(float_rows(4, 100.0 + turn) * 2, second.end()[0])

    def test_device_ns_is_the_compute_time_without_the_copies(self, runtime: FakeRuntime, path: Path) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        infer(binding, [float_rows(3)])

        assert binding.device_ns == COMPUTE_NS

    def test_a_run_copies_only_the_requested_outputs(self, runtime: FakeRuntime, path: Path) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        infer(binding, [float_rows(3)], (1,))

        assert runtime.copies == {"h2d": 1, "d2h": 1}

    @pytest.mark.parametrize("name", [name for name in DATATYPES if name != "BYTES"])
    def test_every_datatype_passes_through_the_device_unchanged(
        self, runtime: FakeRuntime, tmp_path: Path, name: str
    ) -> None:
        path = pipe(tmp_path / "model.onnx", ["N", 3], DATATYPES[name].onnx_code)
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        bits = np.random.default_rng(7).integers(0, 2, (2, 3 * DATATYPES[name].size_bytes), np.uint8)
        array = bits.view(DATATYPES[name].dtype)

        (given_back,) = infer(binding, [array])

        np.testing.assert_array_equal(array, given_back)
        assert array.dtype == given_back.dtype
        assert runtime.copies == {"h2d": 1, "d2h": 1}

    def test_large_outputs_are_copied_from_the_slab(self, runtime: FakeRuntime, tmp_path: Path) -> None:
        binding = bound(load_on_gpu(pipe(tmp_path / "model.onnx", ["N", 40_000]), 0, {}, FakeGround(runtime)), 2)

        assert infer(binding, [np.ones((2, 40_000), np.float32)])[0].sum() == 80_000
        assert runtime.copies["d2h"] == 1

    def test_tensors_that_onnx_runtime_wants_on_the_host_are_bound_on_the_host(
        self, runtime: FakeRuntime, tmp_path: Path
    ) -> None:
        """If bound on the device, it would be copied to the host at binding, and never again."""
        path = save(
            tmp_path / "model.onnx",
            [node("Add", ["a", "b"], ["y"]), node("Identity", ["b"], ["c"])],
            [value("a", FLOAT, ["N"]), value("b", FLOAT, ["N"])],
            [value("y", FLOAT, ["N"]), value("c", FLOAT, ["N"])],
        )
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime, on_host={"b", "c"})))
        for turn in range(3):
            y, c = infer(binding, [floats([turn, 1]), floats([10, turn])], (0, 1))

            assert y.tolist() == [turn + 10, turn + 1]
            assert c.tolist() == [10, turn]
        assert runtime.copies == {"h2d": 3, "d2h": 3}

    def test_a_run_is_fed_when_onnx_runtime_does_not_report_memory_locations(
        self, runtime: FakeRuntime, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tests.backends.fake_session.FakeSession.get_input_memory_infos", None)
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))

        np.testing.assert_array_equal(float_rows(2) * 2, infer(binding, [float_rows(2)])[0])
        assert not runtime.copies
        assert binding.device_ns == 0

    def test_outputs_with_other_rows_than_the_input_are_returned_whole(
        self, runtime: FakeRuntime, tmp_path: Path
    ) -> None:
        path = save(
            tmp_path / "model.onnx",
            [node("Concat", ["x", "x"], ["y"], axis=0)],
            [value("x", FLOAT, ["N", 2])],
            [value("y", FLOAT, ["M", 2])],
        )
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime, eager=True)))

        for rows in (1, 2, 1):
            assert infer(binding, [np.ones((rows, 2), np.float32)])[0].shape == (2 * rows, 2)

    def test_the_slabs_of_host_and_device_grow(self, runtime: FakeRuntime, tmp_path: Path) -> None:
        path = save(
            tmp_path / "model.onnx",
            [node("ReduceSum", ["x", "one"], ["y"], keepdims=0)],
            [value("x", FLOAT, ["N", "M"])],
            [value("y", FLOAT, ["N"])],
            {"one": ints([1])},
        )
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        for rows, width in [(1, 1), (4, 100), (2, 3), (4, 1000), (1, 1), (4, 100)]:
            array = np.arange(rows * width, dtype=np.float32).reshape(rows, width)

            np.testing.assert_array_equal(array.sum(axis=1), infer(binding, [array])[0])
        assert runtime.alive["device"] == 2
        assert runtime.alive["pinned"] == 2

    @pytest.mark.parametrize("call", ["begin", "end"])
    def test_begin_and_end_out_of_order_are_errors(self, runtime: FakeRuntime, path: Path, call: str) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))

        with pytest.raises(ValueError, match="without"):
            binding.begin((0,)) if call == "begin" else binding.end()


class TestBackend:
    def test_a_cuda_backend_reports_its_device_and_needs_a_thread(self, runtime: FakeRuntime, path: Path) -> None:
        backend = load_on_gpu(path, 1, {}, FakeGround(runtime))

        assert backend.device == "cuda:1"
        assert needs_thread(backend)
        assert bound(backend).device == 1
        assert supports_in_place(bound(backend))

    def test_the_nodes_on_the_cpu_are_listed_and_logged(
        self, runtime: FakeRuntime, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "penstock.backends")

        assert load_on_gpu(path, 0, {}, FakeGround(runtime, cpu_nodes={"Mul"})).cpu_nodes == ("Mul",)
        assert "ONNX Runtime placed 1 of 2 nodes on the CPU: Mul" in caplog.text
        assert load_on_gpu(path, 0, {}, FakeGround(runtime)).cpu_nodes == ()

    def test_many_loads_leave_no_device_memory(self, runtime: FakeRuntime, path: Path) -> None:
        for _ in range(50):
            ground = FakeGround(runtime)
            backend = load_on_gpu(path, 0, {}, ground)
            binding = bound(backend)
            infer(binding, [float_rows(2)])
            assert backend.device_bytes >= binding.device_bytes > 0
            backend.close()
            assert not ground.sessions
            del binding

        assert runtime.alive == NOTHING

    def test_nodes_kept_by_a_hook_do_not_keep_the_session(self, runtime: FakeRuntime, path: Path) -> None:
        ground = FakeGround(runtime)
        backend = load_on_gpu(path, 0, {}, ground)
        nodes = list(backend.node_inputs)
        backend.close()

        assert not ground.sessions
        assert nodes == [Node("x", "tensor(float)", ["N", 4])]

    def test_a_backend_can_be_closed_during_a_run(self, runtime: FakeRuntime, path: Path) -> None:
        backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
        binding = bound(backend)
        fill(binding, float_rows(4))
        binding.begin((0,))
        backend.close()
        backend.close()
        gc.collect()

        assert runtime.alive == NOTHING

    def test_a_dropped_binding_frees_its_memory(self, runtime: FakeRuntime, path: Path) -> None:
        backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
        before = runtime.alive
        infer(bound(backend), [float_rows(2)])

        assert runtime.alive == before

    def test_an_acquired_array_keeps_its_pinned_memory_alive(self, runtime: FakeRuntime, path: Path) -> None:
        backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
        (array,) = bound(backend).acquire_buffers(4, [(4, 4)])
        backend.close()

        assert array is not None
        assert array.sum() == 0
        assert runtime.alive["pinned"] == 1
        del array
        assert runtime.alive == NOTHING

    def test_ordinary_host_memory_is_used_when_pinned_is_off(self, runtime: FakeRuntime, path: Path) -> None:
        binding = bound(load_on_gpu(path, 0, {"penstock.pinned": "0"}, FakeGround(runtime)))
        runtime.pageable = True

        np.testing.assert_array_equal(float_rows(3) * 2, infer(binding, [float_rows(3)])[0])
        assert runtime.alive["pinned"] == 0


class TestFaults:
    @pytest.mark.parametrize(
        "call", ["cudaSetDevice", "cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize"]
    )
    @pytest.mark.parametrize("after", [0, 1, 2, 3])
    def test_buffers_can_be_used_again_after_a_run_fails_at_any_call(
        self, runtime: FakeRuntime, path: Path, call: str, after: int
    ) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        infer(binding, [float_rows(3)])
        runtime.fail(call, 1, after)
        errors: list[InferError] = []
        for turn in range(6):
            try:
                (doubled,) = infer(binding, [float_rows(3, turn)])
            except InferError as error:
                errors.append(error)
            else:
                np.testing.assert_array_equal(float_rows(3, turn) * 2, doubled)

        assert [(type(error), error.code) for error in errors] == [(InferError, Code.INTERNAL)]

    @pytest.mark.parametrize("call", ["cudaMemcpyAsync", "cudaEventSynchronize", "the work before an event"])
    def test_a_lost_device_stays_lost_and_can_be_closed(self, runtime: FakeRuntime, path: Path, call: str) -> None:
        backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
        binding = bound(backend)
        runtime.fail(call, 700)
        for _ in range(2):
            with pytest.raises(DeviceLost, match="error 700"):
                infer(binding, [float_rows(3)])
        with pytest.raises(DeviceLost):
            backend.bind(batched(backend.graph), 4)
        backend.close()

        runtime.heal()
        np.testing.assert_array_equal(
            float_rows(1) * 2, infer(bound(load_on_gpu(path, 0, {}, FakeGround(runtime))), [float_rows(1)])[0]
        )

    @pytest.mark.parametrize(
        ("text", "kind"),
        [
            ("CUDA failure 2: out of memory ; GPU=0", OutOfMemory),
            ("CUDA failure 719: unspecified launch failure", DeviceLost),
            ("CUDNN failure 3: something else", InferError),
        ],
    )
    def test_errors_of_onnx_runtime_are_classified_by_their_text(
        self, runtime: FakeRuntime, path: Path, text: str, kind: type, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        binding: Any = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))

        def failing(*_: Any) -> None:
            raise RuntimeError(text)

        working, binding._run_bound = binding._run_bound, failing
        monkeypatch.setattr(binding._session, "run", failing)
        with pytest.raises(InferError) as caught:
            infer(binding, [float_rows(3)])
        binding._run_bound = working

        assert type(caught.value) is kind
        np.testing.assert_array_equal(float_rows(3) * 2, infer(binding, [float_rows(3)])[0])

    def test_an_error_of_the_device_takes_precedence_over_that_of_onnx_runtime(
        self, runtime: FakeRuntime, path: Path
    ) -> None:
        binding: Any = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))

        def failing(*_: Any) -> None:
            runtime.fail("cudaStreamSynchronize", 700)
            raise RuntimeError("something went wrong")

        binding._run_bound = failing
        with pytest.raises(DeviceLost):
            infer(binding, [float_rows(3)])

    def test_a_slab_that_does_not_fit_is_reported_with_its_size(self, path: Path) -> None:
        runtime = FakeRuntime(memory=100_000)
        backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
        before = runtime.alive

        with pytest.raises(
            OutOfMemory, match=r"160000 bytes do not fit in the memory of cuda:0: \d+ of its 100000 bytes"
        ):
            backend.bind(batched(backend.graph), 10_000)
        gc.collect()
        assert runtime.alive == before

    def test_smaller_runs_succeed_after_a_slab_could_not_grow(self, tmp_path: Path) -> None:
        path = save(
            tmp_path / "model.onnx",
            [node("ReduceSum", ["x", "one"], ["y"], keepdims=0)],
            [value("x", FLOAT, ["N", "M"])],
            [value("y", FLOAT, ["N"])],
            {"one": ints([1])},
        )
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(FakeRuntime(memory=100_000))), 2)
        small, large = np.ones((2, 10), np.float32), np.ones((2, 50_000), np.float32)
        for _ in range(2):
            assert infer(binding, [small])[0].tolist() == [10, 10]
            with pytest.raises(OutOfMemory):
                infer(binding, [large])
        assert infer(binding, [small])[0].tolist() == [10, 10]

    def test_a_run_that_the_device_has_begun_finishes_despite_a_stop(self, runtime: FakeRuntime, path: Path) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        fill(binding, float_rows(2))
        binding.begin((0,))
        binding.stop()

        np.testing.assert_array_equal(float_rows(2) * 2, binding.end()[0])
        fill(binding, float_rows(2))
        binding.stop()
        with pytest.raises(RunStopped):
            binding.begin((0,))
        np.testing.assert_array_equal(float_rows(2) * 2, infer(binding, [float_rows(2)])[0])

    @pytest.mark.parametrize("first", [True, False])
    def test_a_stop_while_buffers_are_acquired_does_not_affect_later_runs(
        self, runtime: FakeRuntime, path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
    ) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        clear_stop = binding._clear_stop

        def stopped_meanwhile() -> None:
            if first:
                binding.stop()
            clear_stop()
            if not first:
                binding.stop()

        binding.stop()
        with monkeypatch.context() as patched:
            patched.setattr(binding, "_clear_stop", stopped_meanwhile)
            fill(binding, float_rows(2))

        np.testing.assert_array_equal(float_rows(2) * 2, infer(binding, [float_rows(2)])[0])

    def test_a_fed_run_that_fails_on_a_lost_device_raises_device_lost(
        self, runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = load_on_gpu(contract_model("free", tmp_path / "model.onnx"), 0, {}, FakeGround(runtime))
        binding = bound(backend)

        def fail(*args: Any) -> None:
            raise RuntimeError("CUBLAS failure 13: the GPU program failed to execute ; GPU=0")

        monkeypatch.setattr(backend._cuda.session, "run", fail, raising=False)
        shape = tuple(2 if dim < 0 else dim for dim in backend.graph.inputs[0].shape)
        binding.acquire_buffers(2, [shape])
        binding._bindable.clear()
        runtime.fail("cudaStreamSynchronize", 700)
        with pytest.raises(DeviceLost):
            binding.begin((0,))


class TestLoad:
    def test_a_load_fails_when_the_provider_does_not_start(self, runtime: FakeRuntime, path: Path) -> None:
        error = refusal(path, FakeGround(runtime, starts=False))

        assert error.code is Code.UNSUPPORTED
        assert error.message.startswith(
            "device 'cuda:0' cannot be used: ONNX Runtime's CUDAExecutionProvider did not start: "
        )
        assert runtime.alive == NOTHING

    @pytest.mark.parametrize(("devices", "has"), [(1, "there is one GPU, 'cuda:0'"), (0, "there are 0 GPUs")])
    def test_a_load_fails_when_the_device_does_not_exist(self, path: Path, devices: int, has: str) -> None:
        error = refusal(path, FakeGround(FakeRuntime(devices=devices)), 1)

        assert error.code is Code.UNSUPPORTED
        assert error.message.startswith(f"device 'cuda:1' cannot be used: {has}")

    def test_a_load_fails_with_the_message_of_cuda(self, runtime: FakeRuntime, path: Path) -> None:
        runtime.fail("cudaGetDeviceCount", 35)
        error = refusal(path, FakeGround(runtime))

        assert error.code is Code.UNSUPPORTED
        assert "cannot be used: CUDA error 35 in cudaGetDeviceCount: said by the fake device" in error.message

    @pytest.mark.parametrize(
        ("status", "code"), [(35, Code.UNSUPPORTED), (46, Code.UNSUPPORTED), (805, Code.UNSUPPORTED),
                             (2, Code.OVERLOADED), (700, Code.NOT_READY)]
    )  # fmt: skip
    def test_a_load_fails_with_a_code_by_the_status_of_the_device(
        self, runtime: FakeRuntime, path: Path, status: int, code: Code
    ) -> None:
        runtime.fail("cudaSetDevice", status)

        assert refusal(path, FakeGround(runtime)).code is code

    def test_a_load_fails_when_the_provider_finds_the_device_unavailable(
        self, runtime: FakeRuntime, path: Path
    ) -> None:
        text = "CUDA failure 46: busy or unavailable ; GPU=0 ; hostname=secret ; file=/a/b.cc ; line=1 ; expr=f(); "
        error = refusal(path, FakeGround(runtime, fails=lambda options: RuntimeError(text)))

        assert error.code is Code.UNSUPPORTED
        redacted = "CUDA failure 46: busy or unavailable ; GPU=0 ; b.cc ; line=1 ; expr=f()"
        assert error.message == f"device 'cuda:0' cannot be used: {redacted}"
        assert runtime.alive == NOTHING

    def test_a_failed_load_leaves_no_device_memory(self, runtime: FakeRuntime, path: Path) -> None:
        error = refusal(path, FakeGround(runtime, fails=lambda options: RuntimeError("CUDA failure 2: out of memory")))

        assert error.code is Code.OVERLOADED
        path.write_bytes(b"no model")
        assert refusal(path, FakeGround(runtime)).code is Code.INVALID
        assert runtime.alive == NOTHING

    def test_a_session_gets_one_thread_and_the_stream_of_the_backend(self, runtime: FakeRuntime, path: Path) -> None:
        ground = FakeGround(runtime)
        load_on_gpu(path, 1, {"cuda.use_tf32": "0"}, ground)
        (((name, options),),) = ground.providers

        assert name == "CUDAExecutionProvider"
        assert options["device_id"] == "1"
        assert options["use_tf32"] == "0"
        assert int(options["user_compute_stream"])
        assert ground.session_options[0].intra_op_num_threads == 1
        load_on_gpu(path, 1, {"intra_op_thread_count": "3"}, ground)
        assert ground.session_options[1].intra_op_num_threads == 3

    def test_the_tensorrt_provider_comes_first_and_runs_are_padded_to_its_profiles(
        self, runtime: FakeRuntime, path: Path, tmp_path: Path
    ) -> None:
        ground = FakeGround(runtime)
        options = {"penstock.tensorrt": "1", "penstock.rows": "1,4", "penstock.gpu_graphs": "auto"}
        binding = bound(load_on_gpu(path, 0, options | {"penstock.engine_cache": str(tmp_path)}, ground))
        ((first, second),) = ground.providers

        assert [name for name, _ in (first, second)] == ["TensorrtExecutionProvider", "CUDAExecutionProvider"]
        assert first[1]["trt_profile_max_shapes"] == "x:4x4"
        assert first[1]["user_compute_stream"] == second[1]["user_compute_stream"]
        assert second[1]["enable_cuda_graph"] == "0"
        np.testing.assert_array_equal(float_rows(3) * 2, infer(binding, [float_rows(3)])[0])

    def test_a_memory_budget_limits_onnx_runtime_and_the_bindings(self, runtime: FakeRuntime, path: Path) -> None:
        ground = FakeGround(runtime)
        backend = load_on_gpu(path, 0, {"penstock.gpu_memory_bytes": "4096"}, ground)

        assert ground.providers[0][0][1]["gpu_mem_limit"] == "4096"
        with pytest.raises(InferError, match="but its memory budget is 4096 bytes") as caught:
            backend.bind(batched(backend.graph), 1000)
        assert caught.value.code is Code.OVERLOADED
        bound(backend)
        assert backend.device_bytes <= 4096

    def test_a_load_above_its_memory_budget_fails_and_leaves_no_device_memory(
        self, runtime: FakeRuntime, path: Path
    ) -> None:
        needs = path.stat().st_size
        error = refusal(path, FakeGround(runtime), penstock__gpu_memory_bytes=str(needs - 1))
        assert (error.code, error.retry_after_ns) == (Code.OVERLOADED, -1)
        ground = FakeGround(runtime, takes=2 * needs)
        error = refusal(path, ground, penstock__gpu_memory_bytes=str(2 * needs - 1))
        assert "the model takes" in error.message
        gc.collect()
        assert runtime.alive == NOTHING


class TestPrepare:
    def test_prepare_runs_each_size_once_for_all_bindings_of_a_session(self, runtime: FakeRuntime, path: Path) -> None:
        backend = load_on_gpu(path, 0, {}, FakeGround(runtime))
        first, second = bound(backend), bound(backend)
        for binding, rows, runs in ((first, 4, 1), (second, 4, 0), (second, 2, 1), (first, 2, 0)):
            fill(binding, float_rows(rows))
            binding.device_ns = 0
            binding.prepare(rows, [(rows, 4)])

            assert binding.device_ns == runs * COMPUTE_NS

    def test_prepare_ignores_a_run_that_does_not_fit_in_memory(self, runtime: FakeRuntime, path: Path) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        fill(binding, float_rows(3))
        runtime.fail("cudaMemcpyAsync", 2)
        binding.prepare(3, [(3, 4)])

        np.testing.assert_array_equal(float_rows(3) * 2, infer(binding, [float_rows(3)])[0])

    def test_prepare_raises_device_lost_on_a_lost_device(self, runtime: FakeRuntime, path: Path) -> None:
        binding = bound(load_on_gpu(path, 0, {}, FakeGround(runtime)))
        fill(binding, float_rows(3))
        runtime.fail("cudaMemcpyAsync", 700)
        with pytest.raises(DeviceLost):
            binding.prepare(3, [(3, 4)])


def test_trim_memory_shrinks_the_arena_once_after_runs(runtime: FakeRuntime, path: Path) -> None:
    ground = FakeGround(runtime)
    backend = load_on_gpu(path, 0, {}, ground)
    binding = bound(backend)
    (session,) = ground.sessions
    binding.trim_memory()
    infer(binding, [float_rows(3)])
    binding.trim_memory()
    binding.trim_memory()

    assert session.shrunk == 1
    np.testing.assert_array_equal(float_rows(3) * 2, binding.run((0,))[0])
    runtime.fail("cudaStreamSynchronize", 700)
    binding.trim_memory()
    with pytest.raises(DeviceLost):
        binding.run((0,))
