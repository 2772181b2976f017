"""Writes the SavedModels of savedmodels.py. Run as `python -m tests.savedmodel_builders FOLDER NAME...`.

Each function writes one; its name is the SavedModel's, and its docstring says what the model does.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.backends.contract import MODELS, TABLE

v1 = tf.compat.v1
PREDICT = "tensorflow/serving/predict"
TYPES = {
    "BOOL": tf.bool,
    "UINT8": tf.uint8,
    "UINT16": tf.uint16,
    "UINT32": tf.uint32,
    "UINT64": tf.uint64,
    "INT8": tf.int8,
    "INT16": tf.int16,
    "INT32": tf.int32,
    "INT64": tf.int64,
    "FP16": tf.float16,
    "FP32": tf.float32,
    "FP64": tf.float64,
    "BF16": tf.bfloat16,
    "BYTES": tf.string,
}
IRIS_WEIGHTS = np.array([[-1, 0.5, 1], [2, -0.5, -1], [-3, 0.3, 2], [-1, -0.5, 2]], np.float32)
IRIS_BIAS = np.array([5, 1, -6], np.float32)
Ends = Mapping[str, Any]


def signature(inputs: Ends, outputs: Ends, defaults: Ends | None = None) -> Any:
    """Make a SignatureDef from tensors by name."""
    tensor_info = v1.saved_model.build_tensor_info
    return v1.saved_model.build_signature_def(
        {name: tensor_info(tensor) for name, tensor in inputs.items()},
        {name: tensor_info(tensor) for name, tensor in outputs.items()},
        PREDICT,
        *([{name: tf.constant(value) for name, value in defaults.items()}] if defaults else []),
    )


def save(
    path: Path,
    make: Callable[[], Mapping[str, Any]],
    *,
    tags: Sequence[str] = ("serve",),
    init_op: Callable[[], Any] | None = None,
) -> None:
    """Save a graph as TensorFlow 1 does. `make` draws it and returns its signatures by key."""
    with tf.Graph().as_default(), v1.Session() as session:
        signatures = make()
        session.run(v1.global_variables_initializer())
        session.run(v1.tables_initializer())
        builder = v1.saved_model.Builder(str(path))
        builder.add_meta_graph_and_variables(
            session,
            list(tags),
            signature_def_map=signatures,
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save()


def placeholders(name: str) -> dict[str, Any]:
    """Draw the inputs of a model of the contract."""
    return {
        spec.name: v1.placeholder(TYPES[spec.datatype], [None if dim < 0 else dim for dim in spec.shape], spec.name)
        for spec in MODELS[name].inputs
    }


def contract_rows(path: Path) -> None:
    def make() -> Any:
        ends = placeholders("rows")
        return {"serving_default": signature(ends, {"doubled": ends["x"] * 2, "total": tf.reduce_sum(ends["x"], 1)})}

    save(path, make)


def contract_free(path: Path) -> None:
    def make() -> Any:
        ends = placeholders("free")
        return {"serving_default": signature(ends, {"y": ends["x"] + 1})}

    save(path, make)


def contract_scalar(path: Path) -> None:
    def make() -> Any:
        ends = placeholders("scalar")
        y = ends["a"] * ends["b"]
        return {"serving_default": signature(ends, {"y": y, "y_total": tf.reduce_sum(y)})}

    save(path, make)


def contract_strings(path: Path) -> None:
    def make() -> Any:
        ends = placeholders("strings")
        return {"serving_default": signature(ends, {"y": tf.identity(ends["x"])})}

    save(path, make)


def contract_optional(path: Path) -> None:
    def make() -> Any:
        ends = placeholders("optional")
        y = ends["x"] + ends["offset"]
        return {"serving_default": signature(ends, {"y": y}, {"offset": np.full(2, 10, np.float32)})}

    save(path, make)


def contract_turns(path: Path) -> None:
    def make() -> Any:
        ends = placeholders("turns")
        most = tf.reduce_max(ends["turns"])
        _, y = tf.while_loop(
            lambda turn, _: turn < most, lambda turn, x: (turn + 1, x * 1.0), [tf.constant(0, tf.int64), ends["x"]]
        )
        y.set_shape([None])
        return {"serving_default": signature(ends, {"y": y})}

    save(path, make)


def contract_picky(path: Path) -> None:
    def make() -> Any:
        ends = placeholders("picky")
        return {"serving_default": signature(ends, {"y": tf.gather(tf.constant(TABLE), ends["x"])})}

    save(path, make)


def _iris() -> tuple[dict[str, Any], dict[str, Any]]:
    names = ("sepal_length", "sepal_width", "petal_length", "petal_width")
    inputs = {name: v1.placeholder(tf.float64, [None], name) for name in names}
    rows = tf.reshape(tf.stack([tf.cast(each, tf.float32) for each in inputs.values()], axis=-1), [-1, 4])
    weights = v1.get_variable("weights", initializer=IRIS_WEIGHTS)
    bias = v1.get_variable("bias", initializer=IRIS_BIAS)
    logits = tf.matmul(rows, weights) + bias
    ids = tf.argmax(logits, 1)
    outputs = {
        "class_ids": ids,
        "classes": tf.as_string(ids),
        "isbig": tf.greater(rows[:, 0], 5.0),
        "logits": logits,
        "probabilities": tf.nn.softmax(logits),
    }
    return inputs, outputs


def iris(path: Path) -> None:
    """Model of case C25 of the specification of Cortex: `predict` alone. It takes scalars as well."""
    save(path, lambda: {"predict": signature(*_iris())})


def iris_keys(path: Path) -> None:
    """Iris with three signatures: `predict` has all outputs, the others have some."""

    def make() -> Any:
        inputs, outputs = _iris()
        return {
            "predict": signature(inputs, outputs),
            "serving_default": signature(inputs, {"probabilities": outputs["probabilities"]}),
            "classification": signature(inputs, {"classes": outputs["classes"], "scores": outputs["probabilities"]}),
        }

    save(path, make)


def left_right(path: Path) -> None:
    """x FP32 [-1,2]; `left` gives y = x + 1 and `right` y = x + 2; no other key."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        return {"right": signature({"x": x}, {"y": x + 2}), "left": signature({"x": x}, {"y": x + 1})}

    save(path, make)


def special_keys(path: Path) -> None:
    """Like left_right, y = x + 3: its only key is `zebra`, but for the one that TensorFlow has for initialisation."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        return {"zebra": signature({"x": x}, {"y": x + 3})}

    save(path, make)


def keras(path: Path) -> None:
    """Keras model exported: x FP32 [-1,4] -> output_0 FP32 [-1,3]; the iris network with a softmax."""
    dense = tf.keras.layers.Dense(3, activation="softmax", name="scores")
    model = tf.keras.Sequential([tf.keras.layers.Input((4,), name="x"), dense])
    dense.set_weights([IRIS_WEIGHTS, IRIS_BIAS])
    model.export(str(path), verbose=False)


def keras_saved(path: Path) -> None:
    """The same, saved by TensorFlow in place of Keras: inputs FP32 [-1,4] -> output_0 FP32 [-1,3]."""
    dense = tf.keras.layers.Dense(3, activation="softmax", name="scores")
    model = tf.keras.Sequential([tf.keras.layers.Input((4,), name="x"), dense])
    dense.set_weights([IRIS_WEIGHTS, IRIS_BIAS])
    tf.saved_model.save(model, str(path))


class _Module(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.scale = tf.Variable([1.0, 10.0])

    @tf.function(  # type: ignore[untyped-decorator]
        input_signature=[tf.TensorSpec([None, 2], tf.float32, "x"), tf.TensorSpec([None], tf.float32, "offset")]
    )
    def __call__(self, x: Any, offset: Any) -> dict[str, Any]:
        scaled = x * self.scale
        return {"scaled": scaled, "moved": tf.reduce_sum(scaled, 1) + offset}


def module(path: Path) -> None:
    """tf.Module: x FP32 [-1,2], offset FP32 [-1]; scaled = x * (1, 10), moved = the row's sum + offset."""
    new_module = _Module()
    tf.saved_model.save(new_module, str(path), signatures={"serving_default": new_module.__call__})


def compiled(path: Path) -> None:
    """A function that XLA compiles: x FP32 [-1,4] -> y FP32 [-1,4], doubled."""
    made = tf.Module()
    made.double = tf.function(lambda x: {"y": x * 2}, jit_compile=True)
    double = made.double.get_concrete_function(tf.TensorSpec([None, 4], tf.float32, "x"))
    tf.saved_model.save(made, str(path), signatures=double)


def _network(path: Path, widths: Sequence[int]) -> None:
    random = np.random.default_rng(7)

    def make() -> Any:
        x = y = v1.placeholder(tf.float32, [None, widths[0]], "x")
        for layer, (before, after) in enumerate(pairwise(widths)):
            drawn = (random.standard_normal((before, after)) / np.sqrt(before)).astype(np.float32)
            weights = v1.get_variable(f"weights_{layer}", initializer=drawn)
            y = tf.matmul(tf.nn.relu(y) if layer else y, weights)
        return {"serving_default": signature({"x": x}, {"y": y})}

    save(path, make)


def mlp(path: Path) -> None:
    """x FP32 [-1,64] -> y FP32 [-1,10], through 256."""
    _network(path, (64, 256, 10))


def references(path: Path) -> None:
    """x FP32 [-1,2] -> y = x + (1, 2), a variable of the kind that TensorFlow 1 had: a reference."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        offset = v1.get_variable("offset", initializer=np.array([1, 2], np.float32), use_resource=False)
        return {"serving_default": signature({"x": x}, {"y": x + offset, "offset": offset})}

    save(path, make)


def wide(path: Path) -> None:
    """x FP32 [-1,512] -> y FP32 [-1,512], twice through 2048."""
    _network(path, (512, 2048, 2048, 512))


def _image(path: Path, rows: int | None) -> None:
    random = np.random.default_rng(7)

    def make() -> Any:
        image = v1.placeholder(tf.float32, [rows, 28, 28, 1], "image")
        kernel = v1.get_variable("kernel", initializer=random.standard_normal((3, 3, 1, 8)).astype(np.float32))
        dense = v1.get_variable("dense", initializer=random.standard_normal((8, 10)).astype(np.float32) / 3)
        found = tf.nn.relu(tf.nn.conv2d(image, kernel, 2, "SAME"))
        scores = tf.nn.softmax(tf.matmul(tf.reduce_mean(found, [1, 2]), dense))
        return {"serving_default": signature({"image": image}, {"scores": scores, "digit": tf.argmax(scores, 1)})}

    save(path, make)


def image(path: Path) -> None:
    """image FP32 [-1,28,28,1] -> scores FP32 [-1,10], digit INT64 [-1]."""
    _image(path, None)


def image_fixed(path: Path) -> None:
    """The same for exactly one image."""
    _image(path, 1)


class _Fixed(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weights = tf.Variable(np.arange(12, dtype=np.float32).reshape(4, 3))

    @tf.function(input_signature=[tf.TensorSpec([1, 4], tf.float32, "x")])  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> dict[str, Any]:
        return {"y": tf.nn.relu(tf.matmul(x, self.weights))}


def module_fixed(path: Path) -> None:
    """tf.Module: x FP32 [1,4] -> y FP32 [1,3], through a function of TensorFlow 2."""
    new_module = _Fixed()
    tf.saved_model.save(new_module, str(path), signatures={"serving_default": new_module.__call__})


def flattens_one(path: Path) -> None:
    """x FP32 [1,2,3] -> y FP32 [1,6], reshaped to exactly that."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [1, 2, 3], "x")
        return {"serving_default": signature({"x": x}, {"y": tf.reshape(x, [1, 6])})}

    save(path, make)


def sums_rows(path: Path) -> None:
    """x FP32 [1,2] -> y FP32 [1,2]: of many rows, each has the sum of all."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [1, 2], "x")
        return {"serving_default": signature({"x": x}, {"y": tf.zeros_like(x) + tf.reduce_sum(x, 0)})}

    save(path, make)


def upper(path: Path) -> None:
    """text BYTES [-1] -> upper BYTES [-1], length INT32 [-1]."""

    def make() -> Any:
        text = v1.placeholder(tf.string, [None], "text")
        return {
            "serving_default": signature(
                {"text": text}, {"upper": tf.strings.upper(text), "length": tf.strings.length(text)}
            )
        }

    save(path, make)


def lookup(path: Path) -> None:
    """word BYTES [-1] -> id INT64 [-1]: the line of the word in an asset (red, green, blue), else -1."""
    words = path.parent / "words.txt"
    words.write_text("red\ngreen\nblue\n")

    def make() -> Any:
        word = v1.placeholder(tf.string, [None], "word")
        asset = tf.constant(str(words), name="words")
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, asset)
        rule = tf.lookup.TextFileInitializer(
            asset, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        table = tf.lookup.StaticHashTable(rule, -1)
        return {"serving_default": signature({"word": word}, {"id": table.lookup(word)})}

    save(path, make)
    words.unlink()


def types(path: Path) -> None:
    """Each type as it came: input `<datatype>` [-1,3] -> output `<datatype>_out`."""

    def make() -> Any:
        inputs = {name: v1.placeholder(kind, [None, 3], name) for name, kind in TYPES.items()}
        return {"serving_default": signature(inputs, {f"{name}_out": tf.identity(x) for name, x in inputs.items()})}

    save(path, make)


def asserts(path: Path) -> None:
    """x FP32 [-1,2] -> y = sqrt(x); says "x is negative" where any is below 0."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        with tf.control_dependencies([v1.debugging.Assert(tf.reduce_all(x >= 0), ["x is negative", x])]):
            return {"serving_default": signature({"x": x}, {"y": tf.sqrt(x)})}

    save(path, make)


def scalar_output(path: Path) -> None:
    """x FP32 [-1,2] -> total FP32 [], label BYTES []: no rows."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        total = tf.reduce_sum(x)
        return {"serving_default": signature({"x": x}, {"total": total, "label": tf.as_string(total)})}

    save(path, make)


def mixed(path: Path) -> None:
    """number FP32 [-1,2], id INT64 [-1], name BYTES [-1] -> text BYTES [-1] "<name>:<id>", sum FP64 [-1]."""

    def make() -> Any:
        number = v1.placeholder(tf.float32, [None, 2], "number")
        one = v1.placeholder(tf.int64, [None], "id")
        name = v1.placeholder(tf.string, [None], "name")
        text = tf.strings.join([name, tf.as_string(one)], ":")
        total = tf.cast(tf.reduce_sum(number, 1), tf.float64)
        return {"serving_default": signature({"number": number, "id": one, "name": name}, {"text": text, "sum": total})}

    save(path, make)


def order(path: Path) -> None:
    """x FP32 [-1] -> `z_first` = x + 1 and `a_second` = x + 2, drawn in that order."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None], "x")
        first = x + 1
        return {"serving_default": signature({"x": x}, {"a_second": x + 2, "z_first": first})}

    save(path, make)


def aliases(path: Path) -> None:
    """x FP32 [-1] -> `same` and `again`, both x + 1, and `given`, x itself."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None], "x")
        y = x + 1
        return {"serving_default": signature({"x": x}, {"same": y, "again": y, "given": x})}

    save(path, make)


def unranked(path: Path) -> None:
    """x FP32 of any rank -> y = x * 2."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, None, "x")
        return {"serving_default": signature({"x": x}, {"y": x * 2})}

    save(path, make)


def complex_input(path: Path) -> None:
    """x of complex numbers."""

    def make() -> Any:
        x = v1.placeholder(tf.complex64, [None], "x")
        return {"serving_default": signature({"x": x}, {"y": tf.abs(x)})}

    save(path, make)


def complex_output(path: Path) -> None:
    """x FP32 [-1] -> `y` = x + 1, and `odd` of complex numbers."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None], "x")
        return {"serving_default": signature({"x": x}, {"y": x + 1, "odd": tf.complex(x, x)})}

    save(path, make)


def sparse_input(path: Path) -> None:
    """x a sparse tensor."""

    def make() -> Any:
        x = v1.sparse_placeholder(tf.float32, [None, 2], "x")
        return {"serving_default": signature({"x": x}, {"y": tf.sparse.reduce_sum(x, 1)})}

    save(path, make)


def sparse_output(path: Path) -> None:
    """x FP32 [-1,2] -> `y` = x, `thin` a sparse tensor."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        return {"serving_default": signature({"x": x}, {"y": x + 0, "thin": tf.sparse.from_dense(x)})}

    save(path, make)


def tags(path: Path) -> None:
    """Has no graph for "serve": its tag is "canary". y = x + 1."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None], "x")
        return {"serving_default": signature({"x": x}, {"y": x + 1})}

    save(path, make, tags=("canary",))


def hungry(path: Path) -> None:
    """count INT64 [-1] -> total FP32 [-1]: makes as many numbers as `count` says, all at once."""

    def make() -> Any:
        count = v1.placeholder(tf.int64, [None], "count")
        total = tf.reduce_sum(tf.random.uniform(tf.reshape(tf.reduce_max(count), [1])))
        return {"serving_default": signature({"count": count}, {"total": tf.zeros_like(count, tf.float32) + total})}

    save(path, make)


class _Counter(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.count = tf.Variable(0, dtype=tf.int64)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "x")])  # type: ignore[untyped-decorator]
    def __call__(self, x: Any) -> dict[str, Any]:
        return {"count": tf.zeros_like(x) + self.count.assign_add(1)}


def counter(path: Path) -> None:
    """x INT64 [-1] -> count INT64 [-1]: how many runs there have been since the model was loaded."""
    new_module = _Counter()
    tf.saved_model.save(new_module, str(path), signatures={"serving_default": new_module.__call__})


def accumulator(path: Path) -> None:
    """x, start, state_in FP32 [-1,1] -> y and state_out FP32 [-1,1]: the sum of x since start was above 0."""

    def make() -> Any:
        x, start, state = (v1.placeholder(tf.float32, [None, 1], name) for name in ("x", "start", "state_in"))
        y = tf.where(start > 0, x, state + x)
        return {"serving_default": signature({"x": x, "start": start, "state_in": state}, {"y": y, "state_out": y + 0})}

    save(path, make)


class _Remembers(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.sums = tf.Variable(tf.zeros([2, 1]))

    @tf.function(  # type: ignore[untyped-decorator]
        input_signature=[tf.TensorSpec([None, 1], tf.float32, name) for name in ("x", "start", "ready")]
        + [tf.TensorSpec([None, 1], tf.int64, "corrid")]
    )
    def __call__(self, x: Any, start: Any, ready: Any, corrid: Any) -> dict[str, Any]:
        rows = tf.shape(x)[0]
        before = self.sums[:rows]
        y = tf.where(ready > 0, tf.where(start > 0, x, before + x), before)
        self.sums.scatter_update(tf.IndexedSlices(y, tf.range(rows)))
        return {"y": y, "id": tf.identity(corrid)}


def remembers(path: Path) -> None:
    """x, start, ready FP32 [-1,1], corrid INT64 [-1,1] -> y FP32 and id INT64 [-1,1]: sums by row, in a variable."""
    new_module = _Remembers()
    tf.saved_model.save(new_module, str(path), signatures={"serving_default": new_module.__call__})


def ragged(path: Path) -> None:
    """x FP32 [-1], counts FP32 [-1] -> y FP32 [-1,1]: the sum of the first `counts[0]` of x, of the next, and so on."""

    def make() -> Any:
        x = v1.placeholder(tf.float32, [None], "x")
        counts = v1.placeholder(tf.float32, [None], "counts")
        owners = tf.repeat(tf.range(tf.size(counts)), tf.cast(counts, tf.int32))
        y = tf.reshape(tf.math.segment_sum(x, owners), [-1, 1])
        return {"serving_default": signature({"x": x, "counts": counts}, {"y": y})}

    save(path, make)


def no_variables(path: Path) -> None:
    """Iris, its `variables` folder gone."""
    iris(path)
    shutil.rmtree(path / "variables")


def corrupt(path: Path) -> None:
    """Iris, its graph cut off in the middle."""
    iris(path)
    graph = path / "saved_model.pb"
    graph.write_bytes(graph.read_bytes()[: graph.stat().st_size // 2])


def empty_folder(path: Path) -> None:
    """Nothing."""
    path.mkdir()


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for name in sys.argv[2:]:
        globals()[name](root / name)
