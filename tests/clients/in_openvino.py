"""Models that OpenVINO runs, served, beside the same ones without. test_openvino.py starts it in a process of its own.

By hand: pytest tests/clients/in_openvino.py, with a Python that has onnxruntime-openvino in onnxruntime's place.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.http as tritonhttp

from penstock.backends.onnx import load
from penstock.backends.onnx_providers import OPENVINO
from penstock.perf import models
from tests.backends.contract import batched, infer
from tests.live import Live, live_server

CONFIG = 'optimization { execution_accelerators { cpu_execution_accelerator : [ { name : "openvino" } ] } }'
SHAPES = {"mlp": (512,), "cnn": (3, 224, 224)}
CLIENTS = 25


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    builders = {"mlp": models.mlp, "cnn": models.cnn}
    models.make(folder, builders)
    models.make(folder, {f"plain_{name}": build for name, build in builders.items()})
    for name in builders:
        (folder / name / "config.pbtxt").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def live(root: Path) -> Iterator[Live]:
    with live_server(root) as server:
        yield server


def ask(live: Live, model: str, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    given = tritonhttp.InferInput("input", rows.shape, "FP32")
    given.set_data_from_numpy(rows)
    with tritonhttp.InferenceServerClient(live.address) as client:
        found: np.ndarray[Any, Any] = client.infer(model, [given]).as_numpy("output")
    return found


def test_it_is_the_provider_that_runs(root: Path) -> None:
    assert onnxruntime.get_available_providers()[0] == OPENVINO

    session: Any = load(root / "mlp" / "1" / "model.onnx", "cpu", {"openvino": "1"})._session

    assert session.get_providers()[0] == OPENVINO


@pytest.mark.parametrize(("model", "count", "most"), [("mlp", 100, 9), ("cnn", 10, 2)])
def test_requests_of_mixed_sizes_at_once_have_the_answers_that_they_have_without(
    live: Live, model: str, count: int, most: int
) -> None:
    random = np.random.default_rng(11)
    asked = [
        random.normal(size=(int(random.integers(1, most + 1)), *SHAPES[model])).astype(np.float32) for _ in range(count)
    ]

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(lambda rows: ask(live, model, rows), asked))
        wanted = list(pool.map(lambda rows: ask(live, f"plain_{model}", rows), asked))

    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())


def test_a_model_is_closed_and_loaded_again(root: Path) -> None:
    rows = np.ones((3, 512), np.float32)
    answers = []
    for _ in range(3):
        backend = load(root / "mlp" / "1" / "model.onnx", "cpu", {"openvino": "1", "intra_op_thread_count": "1"})
        answers.append(infer(backend.bind(batched(backend.graph), 4), [rows])[0])
        backend.close()

    np.testing.assert_array_equal(answers[0], answers[1])
    np.testing.assert_array_equal(answers[0], answers[2])
