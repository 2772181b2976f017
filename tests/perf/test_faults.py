"""The bench of faults: its models raise for its bad requests, and for no others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.onnx import load
from penstock.perf.faults import BAD_ONE_IN, MODELS, bodies, build
from tests.backends.contract import batched, infer


def rows(bad: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.array([json.loads(body)["inputs"][0]["data"] for body in bodies(bad)], np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_one_request_in_a_hundred_makes_the_model_raise(name: str, tmp_path: Path) -> None:
    onnx.save(build(name), tmp_path / "model.onnx")
    backend = load(tmp_path / "model.onnx", "cpu", {})
    binding = backend.bind(batched(backend.graph), BAD_ONE_IN)

    assert len(infer(binding, [rows(bad=False)])[0]) == BAD_ONE_IN
    assert len(infer(binding, [rows(bad=True)[:-1]])[0]) == BAD_ONE_IN - 1
    with pytest.raises(InferError, match="idx=1000") as caught:
        infer(binding, [rows(bad=True)[-1:]])
    assert caught.value.code is Code.INVALID
