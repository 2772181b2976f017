"""Write the SavedModel of the Cortex examples: the network of examples/iris as TensorFlow 1 exported its estimators.

Run `python examples/cortex/make_tensorflow.py`; it needs tensorflow and onnx. Four inputs, one for each length, of
float64 and any number of flowers; `class_ids`, `classes` and `probabilities` come out. Weights are variables.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

HERE = Path(__file__).parent
TRAINED = HERE.parent / "iris" / "iris" / "1" / "model.onnx"
FOLDER = HERE / "s3" / "penstock-examples" / "iris" / "tensorflow" / "1"
LENGTHS = ("sepal_length", "sepal_width", "petal_length", "petal_width")


def main() -> None:
    """Draw the graph with the trained weights, and write it."""
    import tensorflow as tf

    v1 = tf.compat.v1
    trained = {each.name: numpy_helper.to_array(each) for each in onnx.load(TRAINED).graph.initializer}
    shutil.rmtree(FOLDER, ignore_errors=True)
    with tf.Graph().as_default(), v1.Session() as session:
        weights = {name: v1.get_variable(name, initializer=values) for name, values in trained.items()}
        inputs = {name: v1.placeholder(tf.float64, [None], name) for name in LENGTHS}
        flowers = tf.cast(tf.stack(list(inputs.values()), axis=1), tf.float32)
        hidden = tf.nn.relu(flowers @ weights["w1"] + weights["b1"])
        logits = hidden @ weights["w2"] + weights["b2"]
        class_ids = tf.argmax(logits, axis=1)
        outputs: dict[str, Any] = {
            "class_ids": tf.expand_dims(class_ids, 1),
            "classes": tf.strings.as_string(tf.expand_dims(class_ids, 1)),
            "probabilities": tf.nn.softmax(logits),
        }
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.Builder(str(FOLDER))
        tell = v1.saved_model.build_tensor_info
        signature = v1.saved_model.build_signature_def(
            {name: tell(tensor) for name, tensor in inputs.items()},
            {name: tell(tensor) for name, tensor in outputs.items()},
            "tensorflow/serving/predict",
        )
        builder.add_meta_graph_and_variables(session, ["serve"], signature_def_map={"predict": signature})
        builder.save()
    print(f"{sum(path.stat().st_size for path in FOLDER.rglob('*') if path.is_file())} bytes in {FOLDER.parent.name}")


if __name__ == "__main__":
    main()
