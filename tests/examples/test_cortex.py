"""The Cortex projects under examples/ are served unchanged; two handlers are those of Cortex's documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.cortex.projects import FLOWER, SAMPLE, ask, post
from tests.live import live_server

EXAMPLES = Path(__file__).parents[2] / "examples" / "cortex"
MODELS = EXAMPLES / "s3" / "penstock-examples" / "iris"
# As received: the first had lost its line breaks.
OF_TEN = (
    'import numpy as nplabels = ["iris-setosa", "iris-versicolor", "iris-virginica"]'
    "def pre_inference(sample, signature, "
    'metadata):# Convert the request payload to a flattened listreturn {signature[0].name: [sample["sepal_length"],'
    'sample["sepal_width"],sample["petal_length"],sample["petal_width"],]}def post_inference(prediction, signature, '
    "metadata):# Respond with a string labelpredicted_class_id = prediction[0][0]return labels[predicted_class_id]"
)
OF_NINE = """
import numpy as np
labels = ["iris-setosa", "iris-versicolor", "iris-virginica"]
def pre_inference(sample, metadata):
# Convert a dictionary of features to a flattened in list in the order expected by the model
return {
metadata[0].name : [
sample["sepal_length"],
sample["sepal_width"],
sample["petal_length"],
sample["petal_width"],
]
}
def post_inference(prediction, metadata):
# Update the model prediction to include the index and the label of the predicted class
probabilites = prediction[0][0]
predicted_class_id = int(np.argmax(probabilites))
return {
"class_label": labels[predicted_class_id],
"class_index": predicted_class_id,
"probabilities": probabilites,
}
"""


@pytest.mark.parametrize(("folder", "seed"), [("onnx-0.10", OF_TEN), ("onnx-0.9", OF_NINE)])
def test_the_example_handlers_equal_those_of_cortexs_documentation(folder: str, seed: str) -> None:
    source = (EXAMPLES / folder / "handler.py").read_text("utf-8")

    assert "".join(source.split()) == "".join(seed.split())


def test_the_models_are_the_trained_network_with_either_output_first() -> None:
    for name, first in (("label-first", "label"), ("probabilities-first", "probabilities")):
        session = onnxruntime.InferenceSession(MODELS / f"{name}.onnx", providers=["CPUExecutionProvider"])
        assert session.get_outputs()[0].name == first
        label, probabilities = session.run(["label", "probabilities"], {"input": np.array([FLOWER], np.float32)})
        assert label == probabilities.argmax() == 0


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["onnx-0.10", "tensorflow-0.10"])
def test_a_cortex_0_10_project_answers_with_the_flowers_name(folder: str) -> None:
    answer = served(folder)

    assert answer == "iris-setosa"


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["onnx-0.9", "tensorflow-0.9"])
def test_a_cortex_0_9_project_answers_with_label_index_and_probabilities(folder: str) -> None:
    answer = served(folder)

    assert (answer["class_label"], answer["class_index"]) == ("iris-setosa", 0)
    assert len(answer["probabilities"]) == 3
    assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-5)
    assert answer.get("inputs", sorted(SAMPLE)) == sorted(SAMPLE)


def served(folder: str) -> Any:
    """Serve a project and classify a flower. Returns: its answer."""
    with live_server(EXAMPLES / folder, dialect="cortex", s3_root=str(EXAMPLES / "s3")) as live:
        assert ask(live.http_port, "GET", "/iris/classifier/signature").status == 200
        answer = post(live.http_port, "/iris/classifier", SAMPLE)
    assert answer.status == 200, answer.body
    return answer.json
