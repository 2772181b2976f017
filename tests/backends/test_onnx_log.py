"""ONNX Runtime's own lines are in our log, not between its lines on stderr."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from penstock.backends.errors import InferError
from penstock.backends.onnx import load
from tests.backends.onnx_models import FLOAT, ints, node, save, value


@pytest.mark.skipif(
    not hasattr(onnxruntime, "set_default_logger_callback"), reason="ONNX Runtime before 1.32 has only stderr"
)
def test_what_onnx_runtime_says_of_a_model_that_it_cannot_begin_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pads = {"pads": ints([0, 0, 0, 0]).astype(np.int64)}
    shape = value("x", FLOAT, ["N", 4]), value("y", FLOAT, ["N", 4])
    path = save(tmp_path / "m.onnx", [node("Pad", ["x", "pads"], ["y"], mode="none")], shape[:1], shape[1:], pads)
    with pytest.raises(InferError, match="Invalid 'mode' attribute value"):
        load(path, "cpu", {})

    (record,) = (each for each in caplog.records if each.name == "penstock.onnxruntime")
    assert (record.levelname, "Invalid 'mode' attribute value" in record.getMessage()) == ("ERROR", True)
    assert capfd.readouterr().err == ""
