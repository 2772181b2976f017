"""The TensorFlow Backend. It is never imported here: its tests (in_tensorflow.py) run in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.loading import ISOLATED, LOADERS
from tests.savedmodels import BUILT

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300
RUN = """
import sys
import pytest
from penstock.backends.loading import import_tensorflow

import_tensorflow()  # as a worker does
sys.exit(pytest.main(sys.argv[1:]) or "tensorflow.keras" in sys.modules or "tensorflow._api" in sys.modules)
"""


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_the_tensorflow_tests_pass_in_a_separate_process(savedmodels: Path) -> None:
    cases = "tests/backends/in_tensorflow.py"
    quiet = ("-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default")

    ended = python("-c", RUN, *quiet, cases, **{BUILT: str(savedmodels)})

    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]


@pytest.mark.slow
def test_importing_the_loaders_does_not_import_tensorflow() -> None:
    ended = python("-c", "import sys, penstock.backends.loading; print('tensorflow' in sys.modules)")

    assert ended.stdout.strip() == "False"


def test_tensorflow_is_loaded_only_in_isolated_processes() -> None:
    assert set(LOADERS) == {"onnxruntime"}
    assert set(ISOLATED) == {"tensorflow"}


def test_a_load_without_tensorflow_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ["tensorflow", *(name for name in sys.modules if name.startswith("tensorflow."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "penstock.backends.tensorflow", raising=False)

    with pytest.raises(InferError) as caught:
        ISOLATED["tensorflow"](Path("model.savedmodel"), "cpu", {})

    assert caught.value.code is Code.UNSUPPORTED
    assert caught.value.message == "TensorFlow is not installed: pip install 'penstock[tensorflow]'"
