"""Sequence models for the client tests: an accumulator with implicit state, and one that returns its controls."""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto

from tests.backends.onnx_models import FLOAT, floats, ints, node
from tests.clients.models import INT32, Axes, Tensors, write

UINT64, TEXT = TensorProto.UINT64, TensorProto.STRING

CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] }
  ]
"""
CORRID = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 2 ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 4 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: %s } ] }
  ]
"""
STATE = """
  state [ { input_name: "STATE" output_name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] %s } ]
"""


def config(rows: int, inside: str, more: str = "") -> str:
    """Write a configuration of `x` and `y` with this `sequence_batching`."""
    return f"""
max_batch_size: {rows}
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 1 ] }} ]
{more}
sequence_batching {{ {inside} }}
"""


def write_accumulator(root: Path, name: str, text: str, rows: str = "N") -> None:
    """Write y = x + state * (1 - START), whose state is y. With `rows` "" the model has no batch axis."""
    axes: Axes = [rows, 1] if rows else [1]
    nodes = [
        node("Sub", ["one", "START"], ["goes_on"]), node("Mul", ["STATE", "goes_on"], ["before"]),
        node("Add", ["x", "before"], ["y"]), node("Identity", ["y"], ["STATE_OUT"]),
    ]  # fmt: skip
    inputs = dict.fromkeys(("x", "START", "STATE"), (FLOAT, axes))
    write(root, name, nodes, (inputs, {"y": (FLOAT, axes), "STATE_OUT": (FLOAT, axes)}),
          {"one": floats([1])}, config=text)  # fmt: skip


def write_teller(root: Path, name: str, text: str, *, string: bool = False) -> None:
    """Write a model that returns `x` as `y`, START + END + READY as `flags`, and CORRID as `id`."""
    code = TEXT if string else UINT64
    nodes = [
        node("Identity", ["x"], ["y"]), node("Add", ["START", "END"], ["either"]),
        node("Add", ["either", "READY"], ["flags"]), node("Identity", ["CORRID"], ["id"]),
    ]  # fmt: skip
    axes: Axes = ["N", 1]
    inputs = {"x": (FLOAT, axes), **dict.fromkeys(("START", "END", "READY"), (INT32, axes)), "CORRID": (code, axes)}
    write(root, name, nodes, (inputs, {"y": (FLOAT, axes), "flags": (INT32, axes), "id": (code, axes)}),
          config=text)  # fmt: skip


def write_growing(root: Path, name: str, text: str) -> None:
    """Write a model whose state grows by one x per request: y is its size."""
    nodes = [
        node("Concat", ["STATE", "x"], ["STATE_OUT"], axis=1),
        node("ReduceSum", ["STATE_OUT", "axis"], ["y"], keepdims=1),
    ]
    one: Axes = ["N", 1]
    write(root, name, nodes, ({"x": (FLOAT, one), "STATE": (FLOAT, ["N", "K"])},
                              {"y": (FLOAT, one), "STATE_OUT": (FLOAT, ["N", "L"])}),
          {"axis": ints([1])}, config=text)  # fmt: skip


def write_truths(root: Path, name: str, kind: str) -> None:
    """Write a model that returns `x` as `y`, its boolean controls, and an id of this datatype."""
    flags = {"START": "start", "END": "end", "READY": "ready"}
    code: int = getattr(TensorProto, kind)
    axes: Axes = ["N", 1]
    truths = [
        f'{{ name: "{each}" control [ {{ kind: CONTROL_SEQUENCE_{each} bool_false_true: [ false, true ] }} ] }}'
        for each in flags
    ]
    corrid = f'{{ name: "CORRID" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{kind} }} ] }}'
    shown = [f'{{ name: "{each}" data_type: TYPE_BOOL dims: [ 1 ] }}' for each in flags.values()]
    more = f'output [ {", ".join(shown)}, {{ name: "id" data_type: TYPE_{kind} dims: [ 1 ] }} ]'
    inputs: Tensors = {"x": (FLOAT, axes), **dict.fromkeys(flags, (TensorProto.BOOL, axes)), "CORRID": (code, axes)}
    outputs: Tensors = {
        "y": (FLOAT, axes), **dict.fromkeys(flags.values(), (TensorProto.BOOL, axes)), "id": (code, axes),
    }  # fmt: skip
    nodes = [node("Identity", [each], [gives]) for each, gives in zip(inputs, outputs, strict=True)]
    write(
        root,
        name,
        nodes,
        (inputs, outputs),
        config=config(4, f"control_input [ {', '.join((*truths, corrid))} ]", more),
    )
