"""ONNX Runtime's OpenVINO provider for real, of its own package, which `.ci/peers` fetches.

It has onnxruntime's name and folder, so its cases (in_openvino.py) run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / ".venv" / "peers" / "openvino"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGE.exists(), reason="onnxruntime-openvino is not here: .ci/peers fetches it"),
]


def test_its_cases_hold() -> None:
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "in_openvino.py")],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300, check=False,
        cwd=HERE.parents[1],
    )  # fmt: skip

    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    assert "4 passed" in ended.stdout
