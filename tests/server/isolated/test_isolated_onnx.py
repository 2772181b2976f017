"""ONNX models with `runtime.isolated` in a real server."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto

from penstock.backends.errors import Code, InferError
from penstock.backends.loading import LOADERS
from penstock.server.isolated.loader import with_isolated
from tests.backends.onnx_models import FLOAT, contract_model, node, save, value
from tests.live import Live, live_server
from tests.server.isolated.stage import PATIENCE_S, nothing_left, own_python

pytestmark = pytest.mark.slow
ISOLATED = "[batching]\nmax_batch_size = 0\n[runtime]\nisolated = true\n"


def fragile(root: Path) -> None:
    """Write a model with an operator that crashes its process when the rows are empty."""
    folder = root / "fragile"
    (folder / "1").mkdir(parents=True)
    unique = node("Unique", ["x"], ["y"], axis=0)
    tensors = value("x", FLOAT, ["N", "M"]), value("y", FLOAT, ["K", "M"])
    save(folder / "1" / "model.onnx", [unique], tensors[:1], tensors[1:])
    (folder / "penstock.toml").write_text(ISOLATED)


def ask(live: Live, model: str, shape: list[int], data: list[float]) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=PATIENCE_S)
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": data}
    connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
    answer = connection.getresponse()
    document = json.loads(answer.read())
    connection.close()
    return answer.status, document["error"] if "error" in document else document["outputs"][0]["data"]


@pytest.mark.skipif(bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="looks at what the engine's process leaves")
def test_a_request_that_crashes_the_models_process_fails_and_others_are_served(tmp_path: Path) -> None:
    fragile(tmp_path)
    (tmp_path / "other" / "1").mkdir(parents=True)
    contract_model("rows", tmp_path / "other" / "1" / "model.onnx")
    with nothing_left(), live_server(tmp_path, loaders=LOADERS) as live:
        assert ask(live, "fragile", [2, 1], [3.0, 3.0]) == (200, [3.0])

        status, why = ask(live, "fragile", [4, 0], [])

        assert (status, why) == (503, "model 'fragile' ended: signal 6 (SIGABRT)")
        assert ask(live, "other", [1, 4], [1.0, 2.0, 3.0, 4.0])[0] == 200
        assert ask(live, "fragile", [2, 1], [5.0, 5.0]) == (200, [5.0])


def test_an_isolated_models_shared_scale_is_known(tmp_path: Path) -> None:
    outputs = ["y", "scale", "zero"]
    path = save(
        tmp_path / "model.onnx", [node("DynamicQuantizeLinear", ["x"], outputs)], [value("x", FLOAT, ["N", 3])],
        [value("y", TensorProto.UINT8, ["N", 3])],
    )  # fmt: skip

    backend: Any = with_isolated(LOADERS, own_python)["onnxruntime"](path, "cpu", {"isolated": "1"})
    try:
        assert backend.shared_scale == "DynamicQuantizeLinear"
    finally:
        backend.close()


def test_an_isolated_model_on_a_gpu_is_rejected(tmp_path: Path) -> None:
    load = with_isolated(LOADERS, own_python)["onnxruntime"]

    with pytest.raises(InferError, match="requires a model on the CPU, but this one would run on cuda:0") as caught:
        load(contract_model("rows", tmp_path / "model.onnx"), "cuda:0", {"isolated": "1"})

    assert caught.value.code is Code.UNSUPPORTED
