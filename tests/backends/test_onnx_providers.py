from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends import onnx_providers
from penstock.backends.backend import device_number
from penstock.backends.cuda_budget import Budget
from penstock.backends.errors import Code, InferError
from penstock.backends.onnx_cuda import RealDependencies
from penstock.backends.onnx_file import row_shapes, weight_bytes
from penstock.backends.onnx_providers import (
    CUDA,
    TENSORRT,
    check_cudnn,
    cuda_options,
    start_failure,
    wants_tensorrt,
)
from penstock.backends.onnx_tensorrt import engine_key, profiles, tensorrt_options
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.onnx_models import FLOAT, contract_model, floats, node, save, value


def refused(call: Any, *args: Any, **named: Any) -> InferError:
    with pytest.raises(InferError) as caught:
        call(*args, **named)
    return caught.value


class TestCuda:
    def test_a_model_may_override_the_defaults_of_the_cuda_provider(self) -> None:
        options = cuda_options(2, {}, 77, graphs=False)

        assert options == {
            "cudnn_conv_algo_search": "HEURISTIC",
            "cudnn_conv_use_max_workspace": "1",
            "do_copy_in_default_stream": "1",
            "arena_extend_strategy": "kNextPowerOfTwo",
            "device_id": "2",
            "user_compute_stream": "77",
            "enable_cuda_graph": "0",
        }
        model_options = {
            "cuda.cudnn_conv_algo_search": "EXHAUSTIVE",
            "cuda.gpu_mem_limit": "5",
            "tensorrt.x": "1",
            "other": "2",
        }
        options = cuda_options(0, model_options, 0, graphs=True, budget_bytes=9)
        assert options["cudnn_conv_algo_search"] == "EXHAUSTIVE"
        assert options["gpu_mem_limit"] == "5"
        assert options["enable_cuda_graph"] == "1"
        assert not {"x", "other"} & set(options)

    def test_the_arena_grows_by_the_requested_size_only_with_configured_rows(self) -> None:
        assert cuda_options(0, {"penstock.rows": "1,2"}, 0, graphs=False)["arena_extend_strategy"] == "kSameAsRequested"

    @pytest.mark.parametrize(
        "name", ["device_id", "user_compute_stream", "has_user_compute_stream", "do_copy_in_default_stream"]
    )
    def test_cuda_options_that_penstock_sets_are_rejected(self, name: str) -> None:
        error = refused(cuda_options, 0, {f"cuda.{name}": "0"}, 0, graphs=False)

        assert error.code is Code.INVALID
        assert name in error.message

    def test_a_provider_missing_from_the_build_is_reported_with_the_version(self) -> None:
        error = refused(onnx_providers.check_provider, "NoExecutionProvider")

        assert error.code is Code.UNSUPPORTED
        assert error.message.startswith(
            f"the installed onnxruntime {onnxruntime.__version__} has no NoExecutionProvider"
        )

    @pytest.mark.skipif(CUDA in onnxruntime.get_available_providers(), reason="CUDA is here")
    def test_a_missing_cuda_build_is_reported_with_the_install_command(self) -> None:
        assert refused(RealDependencies(CUDA).runtime).message.endswith(": pip install 'penstock[gpu]'")

    def test_a_cuda_provider_that_does_not_load_has_the_error_of_the_loader(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(onnx_providers._LIBRARIES, CUDA, "libnothing.so")

        assert start_failure(CUDA).startswith("libnothing.so: cannot open shared object file")
        assert "pip install 'penstock[gpu]'" in start_failure(CUDA)

    def test_missing_cudnn_is_rejected_unless_enable_cudnn_is_0(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnx_providers, "_CUDNN", ("libnothing.so.9", "libnothing.so"))
        error = refused(check_cudnn, {})

        assert error.code is Code.UNSUPPORTED
        assert error.message.startswith("libnothing.so.9: cannot open shared object file")
        assert "'cuda.enable_cudnn' to 0" in error.message
        check_cudnn({"enable_cudnn": "0"})
        monkeypatch.setattr(onnx_providers, "_CUDNN", ("libnothing.so.9", "libc.so.6"))
        check_cudnn({})

    def test_two_installed_builds_of_onnx_runtime_are_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.0")

        assert "onnxruntime and onnxruntime-gpu are both installed" in start_failure(CUDA)


@pytest.mark.parametrize(("device", "number"), [("cpu", None), ("cuda:0", 0), ("cuda:12", 12)])
def test_a_device_is_the_cpu_or_has_a_number(device: str, number: int | None) -> None:
    assert device_number(device) == number


@given(st.text(max_size=8).filter(lambda text: text != "cpu" and not text.startswith("cuda:")))
def test_any_other_text_is_rejected_as_a_device(text: str) -> None:
    assert refused(device_number, text).code is Code.INVALID


class TestTensorrt:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return contract_model("rows", tmp_path / "model.onnx")

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def test_the_folders_of_the_engine_cache_are_created(self, path: Path, tmp_path: Path) -> None:
        folder = tmp_path / "a" / "b"
        options = tensorrt_options(path, 0, {"tensorrt.trt_engine_cache_path": str(folder)}, 77, FakeRuntime())
        assert folder.is_dir()
        assert Path(options["trt_timing_cache_path"]).is_dir()
        error = refused(tensorrt_options, path, 0, {"penstock.engine_cache": str(path)}, 77, FakeRuntime())
        assert error.code is Code.INVALID
        assert "engines cannot be stored in" in error.message

    def test_tensorrt_is_enabled_by_the_accelerator_or_by_any_of_its_options(self) -> None:
        assert wants_tensorrt({"penstock.tensorrt": "1"})
        assert wants_tensorrt({"tensorrt.trt_fp16_enable": "1"})
        assert not wants_tensorrt({"cuda.use_tf32": "1", "penstock.tensorrt": "0"})

    def test_engines_are_cached_and_built_for_the_buckets(self, path: Path, tmp_path: Path) -> None:
        options = {
            "tensorrt.trt_fp16_enable": "1",
            "penstock.engine_cache": str(tmp_path / "engines"),
            "penstock.rows": "1,4,8",
        }
        provider_options = tensorrt_options(path, 1, options, 77, FakeRuntime())
        folder = str(tmp_path / "engines" / engine_key(path, 1, FakeRuntime()))

        assert provider_options == {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": folder,
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": folder,
            "trt_profile_min_shapes": "x:1x4",
            "trt_profile_opt_shapes": "x:8x4",
            "trt_profile_max_shapes": "x:8x4",
            "trt_fp16_enable": "1",
            "device_id": "1",
            "user_compute_stream": "77",
        }
        assert refused(tensorrt_options, path, 1, {"tensorrt.device_id": "0"}, 0, FakeRuntime()).code is Code.INVALID

    def test_an_engine_is_keyed_by_gpu_versions_and_model(self, path: Path, tmp_path: Path) -> None:
        key = engine_key(path, 0, FakeRuntime())
        assert key.startswith(f"Fake_GPU-sm9.0-onnxruntime{onnxruntime.__version__}-tensorrt")
        assert key == engine_key(path, 0, FakeRuntime())

        save(path, [node("Relu", ["x"], ["y"])], [value("x", FLOAT, ["N"])], [value("y", FLOAT, ["N"])])
        assert key != engine_key(path, 0, FakeRuntime())
        assert refused(engine_key, tmp_path / "none", 0, FakeRuntime()).code is Code.NOT_FOUND

    @pytest.mark.parametrize("axes", [["N", "M"], [2, "M"]])
    def test_a_model_with_free_axes_other_than_rows_has_no_profile(self, path: Path, axes: list[int | str]) -> None:
        save(path, [node("Relu", ["x"], ["y"])], [value("x", FLOAT, axes)], [value("y", FLOAT, axes)])

        assert profiles(path, "1,2") == {}

    def test_a_profile_leaves_out_inputs_without_rows(self, path: Path) -> None:
        save(
            path,
            [node("Add", ["x", "b"], ["y"]), node("Add", ["y", "w"], ["z"])],
            [value("x", FLOAT, ["N", 3]), value("b", FLOAT, [3]), value("w", FLOAT, [3])],
            [value("z", FLOAT, ["N", 3])],
            {"w": floats([1, 2, 3])},
        )

        assert row_shapes(path) == {"x": (3,)}
        assert profiles(path, "") == {}
        path.write_bytes(b"no model")
        assert row_shapes(path) is None

    def test_missing_tensorrt_is_reported_with_the_install_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(onnx_providers._LIBRARIES, TENSORRT, "libnothing.so")

        assert "pip install tensorrt" in start_failure(TENSORRT)


class TestBudgets:
    def test_budgets_are_read_from_the_options(self) -> None:
        options = {"penstock.gpu_memory_bytes": "1000", "penstock.gpu_limit": "0:0.8,2:0.5"}

        assert Budget.from_options(2, options) == Budget(2, 1000, 0.5)
        assert Budget.from_options(1, options) == Budget(1, 1000, 1.0)
        assert Budget.from_options(0, {}) == Budget(0)

    @given(st.text(min_size=1, max_size=6))
    def test_any_budget_option_is_read_or_rejected(self, text: str) -> None:
        for name in ("penstock.gpu_memory_bytes", "penstock.gpu_limit"):
            with contextlib.suppress(InferError):
                assert Budget.from_options(0, {name: text}).budget_bytes >= 0

    def test_a_load_above_its_memory_budget_is_rejected_with_the_sizes(self) -> None:
        runtime = FakeRuntime(memory=100 << 20)
        runtime.take(40 << 20, 0)

        assert Budget(0).check_before(runtime, 10) == 60 << 20
        error = refused(Budget(0, 61 << 20).check_before, runtime, 10)
        assert error.message.startswith(
            "not enough memory on cuda:0: its memory budget is 61 MiB, but only 60 MiB of 100 MiB are "
            "free; unload another "
        )
        assert error.code is Code.OVERLOADED
        assert "its weights take 61 MiB" in refused(Budget(0).check_before, runtime, 61 << 20).message
        error = refused(Budget(0, limit=0.3).check_before, runtime, 10)
        assert "40 MiB of 100 MiB are in use, and the limit for loading is 30%" in error.message
        assert "does not fit in its memory budget" in refused(Budget(0, 5).check_before, runtime, 6).message

    def test_a_model_that_exceeds_its_budget_after_loading_is_rejected(self) -> None:
        Budget(0, 100).check_after(100)
        Budget(0).check_after(1 << 40)

        assert refused(Budget(0, 100).check_after, 101).retry_after_ns == -1

    def test_external_weights_beside_the_model_are_counted(self, tmp_path: Path) -> None:
        path = contract_model("rows", tmp_path / "model.onnx")
        alone = path.stat().st_size
        assert weight_bytes(path) == alone
        (tmp_path / "labels.txt").write_text("a\nb\n")
        assert weight_bytes(path) == alone

        onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
        assert weight_bytes(path) == path.stat().st_size + (tmp_path / "weights.bin").stat().st_size
        assert weight_bytes(tmp_path / "none" / "model.onnx") == 0
