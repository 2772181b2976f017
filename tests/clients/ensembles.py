"""The ensembles that the client tests serve: configurations beside ONNX models made in code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.backends.onnx_models import FLOAT, INT64, STRING, floats, node
from tests.clients.models import write

WIDTH = 4

Pairs = Sequence[tuple[str, str]]


def step(model: str, inputs: Pairs, outputs: Pairs, version: int = -1) -> str:
    """Write a step; pairs are the model's name and the ensemble's."""
    maps = [("input_map", inputs), ("output_map", outputs)]
    lines = [f'{name} {{ key: "{key}" value: "{value}" }}' for name, pairs in maps for key, value in pairs]
    return f'{{ model_name: "{model}" model_version: {version} {" ".join(lines)} }}'


def config(
    name: str, inputs: Sequence[str], outputs: Sequence[str], steps: Sequence[str], *, rows: int = 8,
    datatype: str = "TYPE_FP32", input_type: str = "TYPE_FP32",
) -> str:  # fmt: skip
    """Write an ensemble's config.pbtxt."""
    lines = [f'name: "{name}"', 'platform: "ensemble"', f"max_batch_size: {rows}"]
    for side, names, kind in (("input", inputs, input_type), ("output", outputs, datatype)):
        lines += [f'{side} {{ name: "{each}" data_type: {kind} dims: [ {WIDTH} ] }}' for each in names]
    return "\n".join([*lines, f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}", ""])


def write_ensemble(root: Path, name: str, text: str, *versions: int) -> None:
    """Write an ensemble's folder, replacing an existing one."""
    for version in versions or (1,):
        (root / name / str(version)).mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(text)


def _axes(code: int, width: int = WIDTH) -> tuple[int, Sequence[int | str]]:
    return code, ["N", width]


def write_plus(root: Path, name: str, number: float, *, version: int = 1, width: int = WIDTH) -> None:
    """Write a model that adds a number, on a thread."""
    described = _axes(FLOAT, width)
    write(root, name, [node("Add", ["x", "number"], ["y"])], ({"x": described}, {"y": described}),
          {"number": floats([number])}, version=version)  # fmt: skip


CHAIN = config(
    "chain", ["in"], ["out"],
    [step("double", [("x", "in")], [("y", "mid")]), step("plus", [("x", "mid")], [("y", "out")])],
)  # fmt: skip
DIAMOND = config(
    "diamond", ["in"], ["sum", "difference"],
    [
        step("both", [("a", "left"), ("b", "right")], [("sum", "sum"), ("difference", "difference")]),
        step("double", [("x", "in")], [("y", "left")]), step("plus", [("x", "in")], [("y", "right")]),
    ],
)  # fmt: skip
PINNED = config("pinned", ["in"], ["out"], [step("plus", [("x", "in")], [("y", "out")], 1)])
OUTER = config(
    "outer", ["in"], ["out"],
    [step("chain", [("in", "in")], [("out", "mid")]), step("chain", [("in", "mid")], [("out", "out")])],
)  # fmt: skip
WORDS = config(
    "words", ["in"], ["out"],
    [step("number", [("x", "in")], [("y", "mid")]), step("text", [("x", "mid")], [("y", "out")])],
    datatype="TYPE_STRING", input_type="TYPE_STRING",
)  # fmt: skip
LOOKUP = config(
    "lookup", ["in"], ["out"],
    [step("picky", [("x", "in")], [("y", "mid")]), step("plus", [("x", "mid")], [("y", "out")])],
    input_type="TYPE_INT64",
)  # fmt: skip


def write_models(root: Path) -> Path:
    """Write the models of the steps."""
    row = _axes(FLOAT)
    write(root, "double", [node("Add", ["x", "x"], ["y"])], ({"x": row}, {"y": row}))
    write_plus(root, "plus", 1)
    write(root, "both", [node("Add", ["a", "b"], ["sum"]), node("Sub", ["a", "b"], ["difference"])],
          ({"a": row, "b": row}, {"sum": row, "difference": row}))  # fmt: skip
    words, numbers = _axes(STRING), _axes(INT64)
    write(root, "number", [node("Cast", ["x"], ["y"], to=INT64)], ({"x": words}, {"y": numbers}))
    write(root, "text", [node("Cast", ["x"], ["y"], to=STRING)], ({"x": numbers}, {"y": words}))
    write(root, "picky", [node("Gather", ["table", "x"], ["y"])], ({"x": numbers}, {"y": row}),
          {"table": floats([10, 20, 30])})  # fmt: skip
    return root


def write_all(root: Path) -> Path:
    """Write the models and the ensembles."""
    write_models(root)
    every = {"chain": CHAIN, "diamond": DIAMOND, "outer": OUTER, "words": WORDS, "lookup": LOOKUP}
    for name, text in every.items():
        write_ensemble(root, name, text)
    return root
