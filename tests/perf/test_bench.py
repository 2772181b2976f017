"""The benchmark asks what it says it asks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from penstock.perf import models
from penstock.perf.bench import ALONE, CASES, HALF, MIXED, Bench, Case, make_call


def test_a_json_call_has_the_tensor_in_its_body() -> None:
    sent = make_call(Case("iris", "JSON", 1, ((1, 4),)))
    (tensor,) = json.loads(sent.bodies[0])["inputs"]

    assert sent.path == "/v2/models/iris/infer"
    assert (tensor["name"], tensor["datatype"], tensor["shape"], len(tensor["data"])) == ("input", "FP32", [1, 4], 4)


def test_a_binary_call_has_the_tensor_after_its_header() -> None:
    sent = make_call(Case("mlp", "binary", 1, ((1, 512),)))
    length = int(sent.headers["Inference-Header-Content-Length"])
    (tensor,) = json.loads(sent.bodies[0][:length])["inputs"]

    assert tensor["parameters"] == {"binary_data_size": 2048}
    assert np.frombuffer(sent.bodies[0][length:], np.float32).shape == (512,)


def test_alternating_bodies_share_their_headers() -> None:
    with pytest.raises(ValueError, match="heads must be as long"):
        make_call(Case("ragged", "binary", 1, ((1, 4), (1, 400))))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.connections}")
def test_every_case_has_a_call(case: Case) -> None:
    assert len(make_call(case).bodies) == len(case.shapes)


def test_two_shapes_are_compared_with_one_shape_of_all_clients_and_of_half_of_them(tmp_path: Path) -> None:
    bench = Bench([HALF, ALONE, MIXED], {}, tmp_path)
    for case, rows in ((HALF, 32.0), (ALONE, 64.0), (MIXED, 30.0)):
        bench.results[case].rows_per_batch.append(rows)

    assert [line for line in bench.verdicts() if "rows/batch" in line] == [
        "ragged two shapes at 64: of the rows/batch of one shape with 64 0.469, at least 0.8: DOES NOT HOLD",
        "ragged two shapes at 64: of the rows/batch of one shape with 32 0.938, at least 0.8: holds",
    ]


@pytest.mark.parametrize(
    ("name", "row", "output_shape"), [("iris", (4,), (3,)), ("ragged", (5,), (5,)), ("ragged", (9,), (9,))]
)
def test_a_model_accepts_any_number_of_rows(name: str, row: tuple[int, ...], output_shape: tuple[int, ...]) -> None:
    graph = models.MODELS[name]().SerializeToString()
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])

    for rows in (1, 3):
        (output,) = session.run(None, {"input": np.ones((rows, *row), np.float32)})

        assert output.shape == (rows, *output_shape)


def test_models_are_the_same_each_time() -> None:
    assert models.iris() == models.iris()
