"""Where TensorRT engines are stored, also without a home folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.onnx_tensorrt import ENGINE_CACHE_OPTION, tensorrt_options
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.onnx_models import contract_model

PATHS = ("trt_engine_cache_path", "trt_timing_cache_path")


def paths(tmp_path: Path, **folders: str) -> set[str]:
    runtime: Any = FakeRuntime()
    options = {name.replace("__", "."): value for name, value in folders.items()}
    provider_options = tensorrt_options(contract_model("rows", tmp_path / "model.onnx"), 0, options, 1, runtime)
    return {str(Path(provider_options[name]).relative_to(tmp_path).parts[0]) for name in PATHS}


def test_engines_are_stored_in_the_users_cache_folder_or_a_configured_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert paths(tmp_path) == {"cache"}
    assert paths(tmp_path, **{ENGINE_CACHE_OPTION: str(tmp_path / "engines")}) == {"engines"}
    assert paths(tmp_path, tensorrt__trt_engine_cache_path=str(tmp_path / "said")) == {"said", "cache"}


def test_a_missing_home_folder_is_an_error_unless_engine_folders_are_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    folders = {f"tensorrt__{name}": str(tmp_path / "said") for name in PATHS}

    assert paths(tmp_path, **folders) == {"said"}
    with pytest.raises(InferError, match="TensorRT engines cannot be stored: the user has no home folder; ") as caught:
        paths(tmp_path)
    assert caught.value.code is Code.INVALID
