from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.loading import HARMLESS_LINES, LOADERS
from tests.backends.contract import MODELS
from tests.backends.onnx_models import contract_model


def python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.slow
def test_importing_the_loaders_imports_no_runtime() -> None:
    program = "import sys, penstock.backends.loading; print([m for m in ('onnxruntime', 'numpy') if m in sys.modules])"

    assert python(program) == "['numpy']"


@pytest.mark.slow
@pytest.mark.parametrize(("device", "extra"), [("cpu", "cpu"), ("cuda:0", "gpu")])
def test_a_load_without_onnx_runtime_has_the_install_command(device: str, extra: str) -> None:
    program = f"""
import sys
from pathlib import Path
sys.modules["onnxruntime"] = None
from pathlib import Path
from penstock.backends.errors import InferError
from penstock.backends.loading import LOADERS
try:
    LOADERS["onnxruntime"](Path("model.onnx"), {device!r}, {{}})
except InferError as error:
    print(error.code.name, error.message)
"""

    assert python(program).startswith(
        f"UNSUPPORTED ONNX Runtime is not installed: pip install 'penstock[{extra}]' (or "
    )


def test_the_onnx_loader_returns_a_backend(tmp_path: Path) -> None:
    backend = LOADERS["onnxruntime"](contract_model("rows", tmp_path / "model.onnx"), "cpu", {})

    assert backend.graph == MODELS["rows"]


def test_loading_a_missing_file_raises_an_infer_error(tmp_path: Path) -> None:
    with pytest.raises(InferError) as caught:
        LOADERS["onnxruntime"](tmp_path / "model.onnx", "cpu", {})
    assert caught.value.code is Code.NOT_FOUND


@pytest.mark.parametrize(
    ("line", "noise"),
    [
        ("WARNING: All log messages before absl::InitializeLog() is called are written to STDERR", True),
        (
            "I0000 00:00:1795377466.496685   22499 port.cc:153] oneDNN custom operations are on. Slightly.",
            True,
        ),
        ("E0000 00:00:1795379460.931690    4087 util.cc:131] oneDNN supports DT_HALF only on platforms", False),
        ("signature 'serving_default': output 'r' is a composite tensor, which Penstock does not support", False),
    ],
)
def test_only_lines_that_tensorflow_writes_at_every_load_are_harmless(line: str, noise: bool) -> None:
    assert any(words in line for words in HARMLESS_LINES) is noise
