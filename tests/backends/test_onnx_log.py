"""ONNX Runtime's log lines go to the server's log, not to stderr."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest

from penstock.backends.onnx import create_session
from penstock.backends.onnx_providers import CPU
from tests.backends.onnx_models import FLOAT, ints, node, save, value


@pytest.mark.skipif(
    not hasattr(onnxruntime, "set_default_logger_callback"), reason="ONNX Runtime before 1.32 has only stderr"
)
def test_warnings_of_onnx_runtime_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    unused = {"unused": ints([1])}
    shape = value("x", FLOAT, ["N", 4]), value("y", FLOAT, ["N", 4])
    path = save(tmp_path / "m.onnx", [node("Relu", ["x"], ["y"])], shape[:1], shape[1:], unused)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2  # warnings
    create_session(str(path), options, [(CPU, {})])

    (record,) = (each for each in caplog.records if each.name == "penstock.onnxruntime")
    assert (record.levelname, "Removing initializer 'unused'" in record.getMessage()) == ("WARNING", True)
    assert capfd.readouterr().err == ""
