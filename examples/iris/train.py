"""Train the iris classifier on Fisher's 150 flowers and write it as ONNX next to its hooks.

Run `python examples/iris/train.py`: the same seed gives the same network each time. It needs numpy and onnx
(`make dev`). iris.csv contains centimetres, and the class as 0 setosa, 1 versicolor, 2 virginica.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HERE = Path(__file__).parent
MODEL = HERE / "iris" / "1" / "model.onnx"
HIDDEN, CLASSES, STEPS, RATE = 16, 3, 2000, 0.05

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def softmax(logits: Array) -> Array:
    """Turn each row into probabilities."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares: Array = powers / powers.sum(axis=1, keepdims=True)
    return shares


def train(flowers: Array, classes: Array) -> list[Array]:
    """Fit a 4-16-3 network by gradient descent with momentum on all rows at once."""
    rng = np.random.default_rng(7)
    weights = [
        rng.normal(0, 0.5, (flowers.shape[1], HIDDEN)),
        np.zeros(HIDDEN),
        rng.normal(0, 0.5, (HIDDEN, CLASSES)),
        np.zeros(CLASSES),
    ]
    velocities = [np.zeros_like(weight) for weight in weights]
    wanted = np.eye(CLASSES)[classes.astype(int)]
    for _ in range(STEPS):
        hidden = np.maximum(flowers @ weights[0] + weights[1], 0)
        error = (softmax(hidden @ weights[2] + weights[3]) - wanted) / len(flowers)
        back = (error @ weights[2].T) * (hidden > 0)
        slopes = [flowers.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]
        for weight, velocity, slope in zip(weights, velocities, slopes, strict=True):
            velocity *= 0.9
            velocity -= RATE * (slope + 1e-3 * weight)
            weight += velocity
    return weights


def export(weights: list[Array]) -> onnx.ModelProto:
    """Build the graph: `input` [N,4] gives `label` [N], the most likely class, and `probabilities` [N,3]."""
    nodes = [
        helper.make_node("Gemm", ["input", "w1", "b1"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("Gemm", ["hidden", "w2", "b2"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "iris",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["N", 4])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", CLASSES]),
        ],
        [
            numpy_helper.from_array(weight.astype(np.float32), name)
            for name, weight in zip(("w1", "b1", "w2", "b2"), weights, strict=True)
        ],
    )
    opset = [helper.make_opsetid("", 13)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8, producer_name="penstock examples")
    onnx.checker.check_model(model, full_check=True)
    return model


def main() -> None:
    """Train the network, check it, and write it."""
    rows = np.loadtxt(HERE / "iris.csv", delimiter=",", skiprows=1)
    flowers, classes = rows[:, :4], rows[:, 4]
    mean, spread = flowers.mean(0), flowers.std(0)
    weights = train((flowers - mean) / spread, classes)
    # The first layer includes the scaling, so that the model takes centimetres.
    weights[0] /= spread[:, None]
    weights[1] -= mean @ weights[0]

    hidden = np.maximum(flowers @ weights[0] + weights[1], 0)
    accuracy = ((hidden @ weights[2] + weights[3]).argmax(axis=1) == classes).mean()
    if accuracy < 0.95:
        raise SystemExit(f"accuracy {accuracy:.3f} is under 0.95: not written")
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(export(weights), MODEL)
    print(f"accuracy {accuracy:.3f}, {MODEL.stat().st_size} bytes in {MODEL.relative_to(HERE.parent.parent)}")


if __name__ == "__main__":
    main()
