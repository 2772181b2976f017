"""Model folders with a model.py, written by tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import tritonclient.http as triton_http

ADD_SUB = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            outputs = [pb_utils.Tensor("OUTPUT0", a + b), pb_utils.Tensor("OUTPUT1", a - b)]
            answers.append(pb_utils.InferenceResponse(output_tensors=outputs))
        return answers
"""
ADD_SUB_CONFIG = """
backend: "python"
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
output [
  { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] },
  { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] }
]
"""
ONE = """
backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
"""A model with one input and one output, whose requests have rows."""


def write_model(root: Path, name: str, code: str, config: str = "", toml: str = "") -> Path:
    """Write a Python model with one version. Returns: its folder."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(dedent(code))
    if config:
        (folder / "config.pbtxt").write_text(config)
    if toml:
        (folder / "penstock.toml").write_text(toml)
    return folder


def infer_value(client: Any, model: str, value: float, **terms: Any) -> float:
    """Send one value to a model that has the tensors of ONE. Returns: its answer."""
    x = triton_http.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.array([[value]], np.float32))
    return float(client.infer(model, [x], **terms).as_numpy("y")[0, 0])


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    """Wait for an effect in another process or in the server."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def left_behind() -> set[int]:
    """List the worker processes that this process has started and that still run."""
    found = set()
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            try:
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                words = (place / "cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            if b"workers/child.py" in words and parent == os.getpid():
                found.add(int(place.name))
    return found
