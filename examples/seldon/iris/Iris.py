"""Which iris it is, by the lengths and widths of its sepals and petals: a component of Seldon Core."""

import json
import logging
import os

import numpy as np
from seldon_core.user_model import SeldonComponent

logger = logging.getLogger(__name__)

NAMES = ["sepal_length", "sepal_width", "petal_length", "petal_width"]


class Iris(SeldonComponent):
    def __init__(self, sharpness=1.0):
        self.sharpness = sharpness
        self.layers = None

    def load(self):
        with open(os.path.join(os.path.dirname(__file__), "weights.json")) as file:
            weights = {name: np.array(rows) for name, rows in json.load(file).items()}
        self.layers = [(weights["w1"], weights["b1"]), (weights["w2"], weights["b2"])]
        logger.info("Loaded %d layers", len(self.layers))

    def predict(self, X, names, meta=None):
        (w1, b1), (w2, b2) = self.layers
        logits = np.maximum(X @ w1 + b1, 0) @ w2 + b2
        powers = np.exp(self.sharpness * (logits - logits.max(axis=1, keepdims=True)))
        return powers / powers.sum(axis=1, keepdims=True)

    def class_names(self):
        return ["setosa", "versicolor", "virginica"]

    def tags(self):
        return {"flowers": "Fisher 1936"}

    def metrics(self):
        return [{"type": "COUNTER", "key": "iris_calls", "value": 1}]

    def send_feedback(self, features, feature_names, reward, truth, routing=None):
        logger.info("Feedback: %s", reward)

    def health_status(self):
        return self.predict(np.array([[5.1, 3.5, 1.4, 0.2]]), NAMES)

    def init_metadata(self):
        return {
            "name": "iris",
            "versions": ["1"],
            "platform": "numpy",
            "inputs": [{"name": "flowers", "datatype": "FP64", "shape": [-1, 4]}],
            "outputs": [{"name": "shares", "datatype": "FP64", "shape": [-1, 3]}],
        }
