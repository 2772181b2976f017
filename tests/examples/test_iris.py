"""The committed iris model is as its training script describes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime

IRIS = Path(__file__).parents[2] / "examples" / "iris"
MODEL = IRIS / "iris" / "1" / "model.onnx"


def test_the_iris_model_classifies_at_least_95_percent_of_flowers_correctly() -> None:
    rows = np.loadtxt(IRIS / "iris.csv", delimiter=",", skiprows=1)
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])

    label, probabilities = session.run(None, {"input": rows[:, :4].astype(np.float32)})

    assert rows.shape == (150, 5)
    assert (label == rows[:, 4]).mean() >= 0.95
    assert (probabilities.argmax(axis=1) == label).all()


def test_the_iris_model_returns_the_class_id_first_as_its_hooks_expect() -> None:
    session = onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])

    assert [(node.name, node.type) for node in session.get_inputs()] == [("input", "tensor(float)")]
    assert [(node.name, node.type) for node in session.get_outputs()] == [
        ("label", "tensor(int64)"),
        ("probabilities", "tensor(float)"),
    ]


def test_the_iris_model_is_smaller_than_ten_kilobytes() -> None:
    assert MODEL.stat().st_size < 10_000
