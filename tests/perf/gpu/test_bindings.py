"""What is asked of ONNX Runtime's CUDA Bindings, on the fake device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.perf.gpu import bindings
from penstock.perf.gpu.context import GPU, CheckContext
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import FakeGround, fake_cuda_loader


def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ground: Any) -> dict[str, bool | None]:
    monkeypatch.setattr(bindings, "load_onnx", fake_cuda_loader(ground))
    monkeypatch.setattr(bindings, "KINDS", ("mlp",))
    return {row.what: row.held for row in bindings.report(CheckContext(GPU, tmp_path, quick=True))}


def test_all_assumptions_hold_on_a_correct_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    held_by_name = rows(monkeypatch, tmp_path, FakeRuntime())

    assert len(held_by_name) == 7
    assert {what for what, held in held_by_name.items() if held is False} == set()


def test_tensors_left_on_the_host_fail_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ground = FakeGround(FakeRuntime(), on_host=("input",), cpu_nodes=("Gemm",))
    held_by_name = rows(monkeypatch, tmp_path, ground)

    assert (held_by_name["mlp_fp16: nodes on the CPU"], held_by_name["mlp_fp16: tensors on the host"]) == (False, False)
