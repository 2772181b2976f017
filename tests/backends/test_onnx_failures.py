from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from penstock.backends.backend import FREE_ROWS
from penstock.backends.errors import Code, DeviceLost, InferError, OutOfMemory, RunStopped
from penstock.backends.onnx import OnnxBackend, load
from penstock.backends.onnx_failures import error_text, is_unavailable, run_error
from tests.backends.contract import batched, infer
from tests.backends.onnx_models import FLOAT, INT64, STRING, floats, ints, node, save, value

NODE = "Non-zero status code returned while running Conv node. Name:'c' Status Message: "

FROM_CUDA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Exception during initialization: "
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:154 std::conditional_t<THRW, void, Status> "
    "onnxruntime::CudaCall(ERRTYPE, const char*) [with ERRTYPE = cudaError; bool THRW = true] "
    "/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_call.cc:146 void onnxruntime::CudaCall(ERRTYPE) "
    "[with ERRTYPE = cudaError; bool THRW = true; std::conditional_t<THRW, void, common::Status> = void] "
    "CUDA failure {}: {} ; GPU=1 ; hostname=secret.example.org ; "
    "file=/onnxruntime_src/onnxruntime/core/providers/cuda/cuda_allocator.cc ; line=47 ; "
    "expr=cudaMalloc((void**)&p, size); \n\n"
)
"""The text of ONNX Runtime 1.31."""
OUT_OF_MEMORY = [
    NODE + "/onnxruntime_src/onnxruntime/core/framework/bfc_arena.cc:376 void* onnxruntime::BFCArena::"
    "AllocateRawInternal(size_t, bool, onnxruntime::Stream*) Failed to allocate memory for requested buffer of size 64",
    NODE + "std::bad_alloc",
    NODE
    + "onnxruntime/core/framework/bfc_arena.cc:168 Available memory of 512 is smaller than requested bytes of 1024",
    NODE + "CUDA failure 2: out of memory ; GPU=0 ; hostname=h ; expr=cudaMalloc((void**)&p, size); ",
    NODE + "CUDNN failure 2: CUDNN_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=h",
    NODE + "CUDNN failure 4004: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED ; GPU=0 ; hostname=h",
    NODE + "CUBLAS failure 3: the resource allocation failed ; GPU=0 ; hostname=h ; file=a.cc ; line=1 ; expr=x; ",
    NODE + "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED ; GPU=0 ; hostname=h ; expr=cublasCreate(&cublas_handle_); ",
]
LOST = [
    "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=h ; expr=cudaStreamSynchronize(s); ",
    NODE + "CUDA error cudaErrorLaunchFailure:unspecified launch failure",
    NODE + "CUDA failure 710: device-side assert triggered ; GPU=1 ; hostname=h",
    "CUDA failure 214: uncorrectable ECC error encountered ; GPU=0",
    "CUDA failure 100: no CUDA-capable device is detected ; GPU=0",
    "CUDA failure 46: CUDA-capable device(s) is/are busy or unavailable ; GPU=0",
]


def test_trailing_newlines_are_removed_from_error_text() -> None:
    # as in StringNormalizer's error about a missing locale: `penstock check` printed an empty line after it
    assert error_text(RuntimeError("[ONNXRuntimeError] : 1 : FAIL : configure locales\n\n")) == (
        "onnx runtime error 1: configure locales"
    )


def test_a_failed_load_writes_nothing_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # ONNX Runtime wrote it to stderr in red, among the server's JSON log lines and the output of check
    lowered = node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale="none.SUCH")
    path = save(tmp_path / "model.onnx", [lowered], [value("x", STRING, ["N"])], [value("y", STRING, ["N"])])

    with pytest.raises(InferError, match="Failed to construct locale"):
        load(path, "cpu", {})

    assert capfd.readouterr().err == ""


class TestErrorText:
    @pytest.mark.parametrize("text", OUT_OF_MEMORY)
    def test_out_of_memory_errors_may_be_retried_later(self, text: str) -> None:
        error = run_error(RuntimeError(f"Error in execution: {text}"), on_gpu=True)

        assert type(error) is OutOfMemory
        assert error.code is Code.OVERLOADED
        assert error.retry_after_ns > 0

    def test_a_memory_error_of_python_is_out_of_memory(self) -> None:
        assert type(run_error(MemoryError("std::bad_alloc"))) is OutOfMemory

    @pytest.mark.parametrize("text", LOST)
    def test_sticky_errors_of_the_device_mean_it_is_lost(self, text: str) -> None:
        error = run_error(RuntimeError(text), on_gpu=True)

        assert type(error) is DeviceLost
        assert error.code is Code.NOT_READY

    @pytest.mark.parametrize("text", LOST)
    def test_sticky_cuda_errors_without_a_device_are_ordinary_errors(self, text: str) -> None:
        assert type(run_error(RuntimeError(text))) is InferError

    @pytest.mark.parametrize(
        "text",
        [
            NODE + "indices element out of data bounds, idx=700 must be within the inclusive range [-3,2]",
            "CUDA failure 1: invalid argument ; GPU=0 ; hostname=h ; expr=cudaMemcpyAsync(d, s, n)",
            "CUDA failure 7000: nobody knows",
            "CUDNN failure 3: CUDNN_STATUS_BAD_PARAM ; GPU=0",
        ],
    )
    def test_any_other_error_is_an_internal_error_of_the_run(self, text: str) -> None:
        error = run_error(RuntimeError(text), on_gpu=True)

        assert type(error) is InferError
        assert error.code is Code.INTERNAL

    def test_error_text_does_not_reveal_the_host_or_its_paths(self) -> None:
        error = run_error(RuntimeError(FROM_CUDA.format(2, "out of memory")), on_gpu=True)

        text = "CUDA failure 2: out of memory ; GPU=1 ; cuda_allocator.cc ; line=47 ; expr=cudaMalloc((void**)&p, size)"
        assert error.message == f"onnx runtime error 6: Exception during initialization: {text}"

    def test_the_json_of_a_convolution_plan_is_left_out_of_error_text(self) -> None:
        text = NODE + 'Failed to initialize CUDNN Frontend: no engine with the cudnn frontend json:\n{"context": {}}'

        assert run_error(RuntimeError(text)).message == NODE + "Failed to initialize CUDNN Frontend: no engine"

    @pytest.mark.parametrize("status", [3, 35, 46, 100, 209, 805])
    def test_errors_of_an_unavailable_device_are_recognized(self, status: int) -> None:
        assert is_unavailable(RuntimeError(FROM_CUDA.format(status, "said by CUDA")))

    @pytest.mark.parametrize("status", [2, 700, 719, 999, 3000])
    def test_errors_of_a_full_or_lost_device_do_not_mean_unavailable(self, status: int) -> None:
        assert not is_unavailable(RuntimeError(FROM_CUDA.format(status, "said by CUDA")))

    def test_a_terminated_run_raises_run_stopped(self) -> None:
        error = run_error(RuntimeError(NODE + "Exiting due to terminate flag being set to true."))

        assert type(error) is RunStopped


def gather(path: Path) -> OnnxBackend:
    """Load y = table[x], a table of 2, with a bound output."""
    table = {"table": floats([1, 2])}
    save(path, [node("Gather", ["table", "x"], ["y"])], [value("x", INT64, ["N"])], [value("y", FLOAT, ["N"])], table)
    return load(path, "cpu", {})


class TestFailedRun:
    def test_a_failed_run_is_repeated_once_per_kind_of_failure_to_learn_its_code(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = gather(tmp_path / "model.onnx")
        binding = backend.bind(batched(backend.graph), 4)
        session = next(each for each in vars(backend).values() if isinstance(each, onnxruntime.InferenceSession))
        again: list[Any] = []
        run = session.run

        def count_and_run(*args: Any) -> Any:
            again.append(args)
            return run(*args)

        monkeypatch.setattr(session, "run", count_and_run)
        refusals = []
        for wrong in (7, 7, 8, 7):
            with pytest.raises(InferError) as caught:
                infer(binding, [ints([0, wrong])])
            refusals.append((caught.value.code, caught.value.message))

        text = "onnx runtime error 2: Non-zero status code returned while running Gather node. Name:'' Status Message: "
        text += "indices element out of data bounds, idx={} must be within the inclusive range [-2,1]"
        assert refusals == [(Code.INVALID, text.format(wrong)) for wrong in (7, 7, 8, 7)]
        assert len(again) == 1

    def test_a_run_that_needs_too_much_memory_raises_out_of_memory(self, tmp_path: Path) -> None:
        """Expand to 2**50 elements and sum them: no machine has that much memory."""
        save(
            tmp_path / "model.onnx",
            [
                node("Expand", ["x", "shape"], ["vast"]),
                node("ReduceSum", ["vast"], ["sum"], keepdims=0),
                node("Mul", ["x", "sum"], ["y"]),
            ],
            [value("x", FLOAT, ["N"])],
            [value("y", FLOAT, ["N"])],
            {"shape": ints([1 << 50, 1])},
        )
        for options in ({}, {"enable_mem_arena": "0"}):
            backend = load(tmp_path / "model.onnx", "cpu", options)
            binding = backend.bind(batched(backend.graph), 4)
            for _ in range(2):
                with pytest.raises(OutOfMemory):
                    infer(binding, [np.ones(1, np.float32)])


@pytest.mark.parametrize(("environment_value", "telemetry"), [(None, "1"), ("0", "0")])
def test_telemetry_of_onnx_runtime_is_off_unless_the_operator_turns_it_on(
    environment_value: str | None, telemetry: str
) -> None:
    environment = {name: word for name, word in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    if environment_value is not None:
        environment["ORT_DISABLE_TELEMETRY"] = environment_value
    program = "import os, penstock.backends; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == telemetry


@pytest.mark.parametrize("options", [{}, {FREE_ROWS: "1"}])
def test_a_path_that_is_not_utf8_is_rejected(tmp_path: Path, options: dict[str, str]) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    model = folder / "model.onnx"
    x, y = value("x", FLOAT, ["N"]), value("y", FLOAT, ["N"])
    save(tmp_path / "model.onnx", [node("Identity", ["x"], ["y"])], [x], [y]).rename(model)

    with pytest.raises(InferError, match=r"^ONNX Runtime requires a UTF-8 path") as caught:
        load(model, "cpu", options)

    assert caught.value.code is Code.INVALID
