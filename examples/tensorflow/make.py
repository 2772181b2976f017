"""Train a classifier of Fisher's 150 flowers with TensorFlow, and write it as a SavedModel into models/flowers/1.

Run `python examples/tensorflow/make.py`. It needs TensorFlow (`pip install 'penstock[tensorflow]'`) and the flowers of
examples/iris; the same seed gives the same network each time.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

HERE = Path(__file__).parent
FLOWERS = HERE.parent / "iris" / "iris.csv"
SAVED_MODEL = HERE / "models" / "flowers" / "1" / "model.savedmodel"
HIDDEN, CLASSES, STEPS, RATE, MOMENTUM = 16, 3, 500, 0.05, 0.9


class Flowers(tf.Module):  # type: ignore[misc]
    """A 4-16-3 network. Lengths in centimetres, in the order of the file's columns."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        self.first = tf.Variable(random.standard_normal((4, HIDDEN)) / 2, dtype=tf.float32)
        self.second = tf.Variable(random.standard_normal((HIDDEN, CLASSES)) / 4, dtype=tf.float32)
        self.bias = tf.Variable(tf.zeros(CLASSES))

    def logits(self, flowers: Any) -> Any:
        """Return a number for each class."""
        return tf.tanh(flowers @ self.first) @ self.second + self.bias

    @tf.function(input_signature=[tf.TensorSpec([None, 4], tf.float32, "flowers")])
    def __call__(self, flowers: Any) -> dict[str, Any]:
        """Return each flower's class and the probabilities of all classes.

        The first axis is free: requests share runs.
        """
        logits = self.logits(flowers)
        return {"label": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits)}


def train(model: Flowers, flowers: Any, classes: Any) -> None:
    """Fit the network by gradient descent with momentum on all flowers at once."""
    variables = model.trainable_variables
    speeds = [tf.zeros_like(variable) for variable in variables]
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, model.logits(flowers))
            loss = tf.reduce_mean(losses)
        slopes = tape.gradient(loss, variables)
        speeds = [MOMENTUM * speed - RATE * slope for speed, slope in zip(speeds, slopes, strict=True)]
        for variable, speed in zip(variables, speeds, strict=True):
            variable.assign_add(speed)


def main() -> None:
    """Train the network, write it, and print its accuracy."""
    table = np.loadtxt(FLOWERS, delimiter=",", skiprows=1, dtype=np.float32)
    flowers, classes = table[:, :4], table[:, 4].astype(np.int32)
    model = Flowers()
    train(model, flowers, classes)
    right = int(np.sum(model(flowers)["label"].numpy() == classes))
    tf.saved_model.save(model, str(SAVED_MODEL), signatures={"serving_default": model.__call__})
    print(f"{right} of {len(classes)} flowers right, written to {SAVED_MODEL}")


if __name__ == "__main__":
    main()
