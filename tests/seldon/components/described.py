"""Components with metadata."""

from seldon_core.user_model import SeldonComponent


class Describing:
    """A parameter chooses the result of init_metadata."""

    METADATA = {
        "versions-text": {"name": "m", "versions": "v1"},
        "not-a-dict": ["name"],
        "null": None,
        "extra-key": {"name": "m", "extra": 1},
        "seldon-kinds": {
            "name": "m",
            "versions": ["v1", "v2"],
            "inputs": [
                {"messagetype": "tensor", "schema": {"names": ["a", "b"], "shape": [-1, 2]}},
                {"messagetype": "ndarray", "schema": {"shape": [2]}},
                {"messagetype": "jsonData", "schema": {"type": "object", "any": [1]}},
                {"messagetype": "strData"},
                {"messagetype": "binData"},
            ],
            "outputs": [{"messagetype": "customData", "schema": {"a": {"b": 1}}}, {"messagetype": "mine"}],
            "custom": {"author": "me", "a": "\xe9"},
        },
        "v2-kinds": {
            "platform": "p",
            "inputs": [{"name": "a", "datatype": "FP32", "shape": [-1, 4]}, {"name": "b"}, {}],
            "outputs": [{"datatype": "BYTES"}],
        },
        "bad-datatype": {"inputs": [{"name": "a", "datatype": "FP8", "shape": [1]}]},
        "bad-shape": {"inputs": [{"name": "a", "datatype": "FP32", "shape": [1.5]}]},
        "float-shape": {"inputs": [{"name": "a", "datatype": "FP32", "shape": [2.0]}]},
        "bad-custom": {"custom": {"a": 1}},
        "text-schema": {"inputs": [{"messagetype": "strData", "schema": {}}]},
    }

    def __init__(self, say="null"):
        self.say = say

    def init_metadata(self):
        return self.METADATA[self.say]

    def metadata(self):
        return {"name": "never asked"}

    def predict(self, X, names):
        return X


class DescribedByNothing(SeldonComponent):
    pass
