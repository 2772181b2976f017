"""Libraries of custom operators, registered with every session before it is created."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import onnx
import pytest
from onnx import helper

from penstock.backends.errors import Code, InferError
from penstock.backends.loading import load_onnx
from tests.backends.cudart_stub import needs_compiler
from tests.backends.fake_cuda import FakeRuntime
from tests.backends.fake_session import fake_cuda_loader
from tests.backends.onnx_models import STRING, contract_model, node, value

SOURCE = "int registrations; void *RegisterCustomOps(void *options, const void *api) { registrations++; return 0; }"
"""A library that adds no operator and counts its registrations; a null status is success."""
LIBC = next(line.split()[-1] for line in Path("/proc/self/maps").read_text("utf-8").splitlines() if "/libc.so" in line)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return contract_model("rows", tmp_path / "model.onnx")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "with space" / "libcounting.so"
    path.parent.mkdir()
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCE, text=True, check=True, timeout=60)
    return path


@needs_compiler
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_libraries_are_registered_with_sessions_on_cpu_and_gpu(path: Path, library: Path, device: str) -> None:
    count = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "registrations")
    load = fake_cuda_loader(FakeRuntime())
    load(path, device, {}).close()
    assert count.value == 0
    load(path, device, {"custom_op_library.1": str(library)}).close()

    assert count.value == 1


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (LIBC, "Failed to get symbol RegisterCustomOps with error: "),
        ("/nowhere/at all/libx.so", "Failed to load library libx.so with error: libx.so: cannot open"),
    ],
)
def test_a_library_that_cannot_be_registered_is_reported_without_its_path(path: Path, library: str, why: str) -> None:
    with pytest.raises(InferError) as caught:
        load_onnx(path, "cpu", {"custom_op_library.1": library})
    error, name = caught.value, Path(library).name

    assert error.code is Code.INVALID
    assert error.message.startswith(
        f"option 'custom_op_library': '{name}' could not be registered: onnx runtime error 1: {why}"
    )
    assert "/" not in error.message


def test_an_unknown_operator_is_reported_with_the_key_for_its_library(tmp_path: Path) -> None:
    nodes = [node("StringLower", ["x"], ["y"], domain="ai.onnx.contrib")]
    graph = helper.make_graph(nodes, "g", [value("x", STRING, ["N"])], [value("y", STRING, ["N"])])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.contrib", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")

    with pytest.raises(InferError) as caught:
        load_onnx(tmp_path / "model.onnx", "cpu", {})

    assert caught.value.message.endswith(
        "ai.onnx.contrib:StringLower(-1) is not a registered function/op; if it is a custom operator, "
        "set runtime.custom_op_libraries in penstock.toml to the library that defines it"
    )
