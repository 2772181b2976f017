"""The repository of TensorFlow models that test_tensorflow.py serves: SavedModels, and one ONNX model beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil

from tests.clients.ensembles import step, write_plus
from tests.savedmodels import install

PLATFORM = 'platform: "tensorflow_savedmodel"\n'
SIGNATURE = 'parameters { key: "TF_SIGNATURE_DEF" value { string_value: "%s" } }\n'
HANDLER = """
LABELS = ["setosa", "versicolor", "virginica"]
SEEN = []

def pre_inference(sample, signature, metadata):
    SEEN[:] = [[node.name, node.type, node.shape] for node in signature]
    return {node.name: [sample[node.name]] for node in signature}

def post_inference(prediction, signature, metadata):
    names = [node.name for node in signature]
    return {"label": LABELS[prediction[names.index("class_ids")][0]], "inputs": SEEN, "outputs": names}
"""
TENSORS = """
max_batch_size: 8
input { name: "in" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "out" data_type: TYPE_FP32 dims: [ 2 ] }
"""
MLP = """
platform: "tensorflow_savedmodel"
max_batch_size: 16
input [ { name: "x" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 10 ] } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 3000 }
instance_group [ { count: 2 kind: KIND_CPU } ]
model_warmup {
  name: "any" batch_size: 4 inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 64 ] random_data: true } }
}
"""
ACCUMULATOR = """
platform: "tensorflow_savedmodel"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
sequence_batching {
  direct { }
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } }
  state { input_name: "state_in" output_name: "state_out" data_type: TYPE_FP32 dims: [ 1 ] }
}
"""
REMEMBERS = """
platform: "tensorflow_savedmodel"
max_batch_size: 2
input { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }, { name: "id" data_type: TYPE_INT64 dims: [ 1 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
sequence_batching {
  direct { }
  max_sequence_idle_microseconds: 60000000
  control_input [
    { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } },
    { name: "ready" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0, 1 ] } },
    { name: "corrid" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 } }
  ]
}
"""
RAGGED = """
platform: "tensorflow_savedmodel"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true }
output { name: "y" data_type: TYPE_FP32 dims: [ 1 ] }
batch_input { kind: BATCH_ELEMENT_COUNT target_name: "counts" data_type: TYPE_FP32 source_input: "x" }
"""
BROKEN = ("wrong_key", "no_variables", "corrupt", "empty")


def write(root: Path, savedmodels: Path) -> Path:
    """Write the repository."""

    def put(name: str, savedmodel: str, config: str = "", version: int = 1, *, triton: bool = True) -> None:
        install(savedmodels / savedmodel, root / name / str(version), triton=triton)
        if config:
            (root / name / "config.pbtxt").write_text(config)

    put("types", "types")
    put("upper", "upper", PLATFORM + 'output { name: "upper" data_type: TYPE_STRING dims: [ 1 ] reshape { } }')
    put("mlp", "mlp", MLP)
    put("versions", "left_right", "version_policy { all { } }")
    put("versions", "special_keys", version=2)
    put("right", "left_right", PLATFORM + SIGNATURE % "right")
    put("unranked", "unranked", PLATFORM + TENSORS.replace('"in"', '"x"').replace('"out"', '"y"'))
    put("accumulator", "accumulator", ACCUMULATOR)
    put("remembers", "remembers", REMEMBERS)
    put("in_part", "mlp", PLATFORM + 'max_batch_size: 5 input { name: "x" data_type: TYPE_FP32 } output { name: "y" }')
    put("ragged", "ragged", RAGGED)
    put("flowers", "iris", version=1700000000, triton=False)
    (root / "flowers" / "handler.py").write_text(HANDLER)
    (root / "flowers" / "penstock.toml").write_text('[hooks]\nfile = "handler.py"\n[runtime]\nsignature = "predict"\n')
    put("wrong_key", "iris", PLATFORM + SIGNATURE % "nope")
    put("no_variables", "no_variables")
    put("corrupt", "corrupt")
    put("empty", "empty_folder", PLATFORM)
    write_plus(root, "plus", 10, width=2)
    steps = [step("right", [("x", "in")], [("y", "mid")]), step("plus", [("x", "mid")], [("y", "end")])]
    steps.append(step("versions", [("x", "end")], [("y", "out")], version=1))
    (root / "chain" / "1").mkdir(parents=True)
    text = f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ step [ {", ".join(steps)} ] }}'
    (root / "chain" / "config.pbtxt").write_text(text)
    return root


def workers() -> dict[int, Any]:
    """Find the worker processes of this one that have TensorFlow loaded, by pid."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            named = Path(f"/proc/{child.pid}/comm").read_text() == "worker\n"  # the forking process has it, too
            if named and has_tensorflow(child.pid):
                found[child.pid] = child
        except OSError:
            continue
    return found


def has_tensorflow(pid: int | None = None) -> bool:
    """Tell whether TensorFlow's library is loaded in a process, by default this one."""
    maps = Path("/proc") / str(pid or os.getpid()) / "maps"
    return "libtensorflow" in maps.read_text("utf-8", "replace")
