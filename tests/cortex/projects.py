"""Cortex projects written as their users wrote them, the models of the specification, and a bare client."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import yaml
from onnx import TensorProto

from tests.backends.onnx_models import FLOAT, INT64, STRING, Node, floats, ints, node, save, value

SAMPLE = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}
FLOWER = list(SAMPLE.values())
PROBABILITIES = [0.5949878692626953, 0.3870449960231781, 0.017967063933610916]
JSON = "content-type: application/json"
HTML_TYPE, JSON_TYPE = "text/html; charset=utf-8", "application/json"

_WEIGHTS = floats([[-1, 0.5, 1], [2, -0.5, -1], [-3, 0.3, 2], [-1, -0.5, 2]])
_BIAS = floats([5, 1, -6])
_NETWORK = [
    node("MatMul", ["input", "weights"], ["product"]),
    node("Add", ["product", "bias"], ["logits"]),
    node("Softmax", ["logits"], ["probabilities"], axis=1),
    node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
]
Axis = int | str | None


def local_probabilities(folder: Path) -> list[float]:
    """Give the probabilities of FLOWER as the installed runtime computes them; others may differ in the last bit.

    The specification's are those of ONNX Runtime 0.5.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(write_iris(folder / "told.onnx"), providers=["CPUExecutionProvider"])
    [row] = session.run(["probabilities"], {"input": floats([FLOWER])})[0].tolist()
    assert np.allclose(row, PROBABILITIES, atol=1e-6)
    inputs: list[float] = row
    return inputs


def write_iris(path: Path, rows: Axis = 1, *, swapped: bool = False, mapped: bool = False) -> Path:
    """Write model M: [rows,4] gives `label` [rows] and `probabilities` [rows,3].

    `swapped`: the outputs swapped; `mapped`: the probabilities as a sequence of maps, as scikit-learn's converter has.
    """
    nodes: list[Node] = [*_NETWORK]
    outputs = [value("label", INT64, [rows]), value("probabilities", FLOAT, [rows, 3])]
    if mapped:
        from onnx import helper

        nodes.append(node("ZipMap", ["probabilities"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2]))
        entry = helper.make_map_type_proto(INT64, helper.make_tensor_type_proto(FLOAT, []))
        outputs[1] = helper.make_value_info("maps", helper.make_sequence_type_proto(entry))
    if swapped:
        outputs.reverse()
    return save(path, nodes, [value("input", FLOAT, [rows, 4])], outputs, {"weights": _WEIGHTS, "bias": _BIAS})


def write_identities(path: Path, inputs: Mapping[str, tuple[int, list[Axis]]]) -> Path:
    """Write a model that gives each input back as `<name>_out`."""
    nodes = [node("Identity", [name], [f"{name}_out"]) for name in inputs]
    tensors = [[value(name + end, *arguments) for name, arguments in inputs.items()] for end in ("", "_out")]
    return save(path, nodes, tensors[0], tensors[1])


def write_not(path: Path) -> Path:
    """Write a model that negates two booleans."""
    code = TensorProto.BOOL
    return save(path, [node("Not", ["x"], ["y"])], [value("x", code, [2])], [value("y", code, [2])])


def write_picky(path: Path) -> Path:
    """Write a model [N,1] that fails for a value that is not an index of its table."""
    nodes = [node("Gather", ["table", "x"], ["y"])]
    return save(path, nodes, [value("x", INT64, ["N", 1])], [value("y", INT64, ["N", 1])], {"table": ints([7, 8, 9])})


TEXTS = STRING


@dataclass
class Project:
    """A project folder that is being written; each new API rewrites cortex.yaml."""

    folder: Path
    deployment: str = "iris"
    resources: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "models").mkdir(parents=True, exist_ok=True)
        self.resources.append({"kind": "deployment", "name": self.deployment})
        self.write()

    def model(self, name: str) -> Path:
        """Give the path of a model in the project."""
        return self.folder / "models" / name

    def file(self, path: str, text: str) -> None:
        """Write a file of the project."""
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(dedent(text), "utf-8")

    def api(
        self, name: str, model: Path | str, handler: str = "", *, kind: str = "onnx", old: bool = False, **more: Any
    ) -> None:
        """Add an API; its handler is given as source. `old`: in the format of 0.9. `more`: further keys.

        Those of `onnx:` or `tensorflow:` are given with an underscore before them.
        """
        options: dict[str, Any] = {"model": str(model)}
        if handler:
            # in the folder itself, so that messages name it as the specification does
            path = "handler.py" if not (self.folder / "handler.py").exists() else f"{name}.py"
            path = more.pop("path", path)
            self.file(path, handler)
            options["request_handler"] = path
        options |= {key[1:]: value for key, value in more.items() if key.startswith("_")}
        more = {key: value for key, value in more.items() if not key.startswith("_")}
        resource = {"kind": "api", "name": name} | (options if old else {kind: options}) | more
        self.resources.append(resource)
        self.write()

    def write(self) -> None:
        """Write cortex.yaml."""
        (self.folder / "cortex.yaml").write_text(yaml.safe_dump(self.resources, sort_keys=False), "utf-8")


@dataclass(frozen=True)
class Answer:
    """An answer as it came: the status line, the header fields in small letters, the bytes of the body."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def status(self) -> int:
        return int(self.line.split(" ")[1])

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == JSON_TYPE
        assert self.body.endswith(b"\n")
        return json.loads(self.body)

    @property
    def triple(self) -> tuple[int, bytes, str]:
        """The parts of an answer that a case of the specification states."""
        return self.status, self.body, self.headers["content-type"]


def ask(port: int, method: str, path: str, body: bytes = b"", *fields: str, check: bool = True) -> Answer:
    """Send a request over its own connection, without a client library, so that every byte of the answer is seen.

    `check`: check that every origin may read the answer, as for all answers of Cortex.
    """
    lines = [f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"content-length: {len(body)}", *fields]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    head, _, found = b"".join(parts).partition(b"\r\n\r\n")
    line, *fields_found = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): text for name, _, text in (each.partition(": ") for each in fields_found)}
    assert int(headers["content-length"]) == len(found) or method == "HEAD"
    assert not check or headers["access-control-allow-origin"] == headers["access-control-allow-headers"] == "*"
    return Answer(line, headers, found)


def post(port: int, path: str, value: Any, *fields: str) -> Answer:
    """Post a JSON value."""
    return ask(port, "POST", path, json.dumps(value).encode(), JSON, *fields)
