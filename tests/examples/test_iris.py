"""The committed iris model is what its training script says it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

IRIS = Path(__file__).parents[2] / "examples" / "iris"
MODEL = IRIS / "iris" / "1" / "model.onnx"


def test_tells_at_least_95_of_100_flowers_apart() -> None:
    rows = np.loadtxt(IRIS / "iris.csv", delimiter=",", skiprows=1)
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])

    label, probabilities = session.run(None, {"input": rows[:, :4].astype(np.float32)})

    assert rows.shape == (150, 5)
    assert (label == rows[:, 4]).mean() >= 0.95
    assert (probabilities.argmax(axis=1) == label).all()


def test_gives_the_class_id_first_as_its_hooks_expect() -> None:
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])

    assert [(node.name, node.type) for node in session.get_inputs()] == [("input", "tensor(float)")]
    assert [(node.name, node.type) for node in session.get_outputs()] == [
        ("label", "tensor(int64)"),
        ("probabilities", "tensor(float)"),
    ]


def test_is_under_ten_kilobytes() -> None:
    assert MODEL.stat().st_size < 10_000
