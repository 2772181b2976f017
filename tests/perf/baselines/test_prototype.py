"""The prototype gives the answers that Penstock gives, over all that the benches ask it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from penstock.perf import grpc as over_grpc
from penstock.perf import models
from penstock.perf.bench import PROTOTYPE_MODES, TARGETS, Case, make_call
from penstock.perf.calls import HOST
from penstock.perf.generator.orders import INFER
from penstock.perf.server_process import prototype
from penstock.perf.wrk import Load, Rounds

grpc = pytest.importorskip("grpc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    models.make(path, {name: models.MODELS[name] for name in PROTOTYPE_MODES})
    return path


def expected(model: Path, row: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    output: np.ndarray = session.run(None, {"input": row})[0]
    return output


@pytest.mark.parametrize("name", PROTOTYPE_MODES)
def test_the_prototype_answers_the_requests_of_the_benchmarks(name: str, folder: Path) -> None:
    from tritonclient.grpc import service_pb2

    model = folder / name / "1" / "model.onnx"
    (case, *others) = [case for case in TARGETS if case.model == name and case.wire == "JSON"]
    assert all(each.shapes == case.shapes for each in others)
    row = np.random.default_rng(5).random(case.shapes[0], dtype=np.float32)

    with prototype(PROTOTYPE_MODES[name], model) as process:
        sent = make_call(case)
        answer = json.loads(process.request("POST", sent.path, sent.bodies[0], sent.headers))
        (output,) = answer["outputs"]
        assert (answer["model_name"], output["name"], output["datatype"]) == (name, "output", "FP32")
        np.testing.assert_allclose([output["data"]], expected(model, row.round(4)), rtol=1e-3, atol=1e-3)

        sent = make_call(Case(name, "binary", 1, case.shapes))
        body = process.request("POST", sent.path, sent.bodies[0], sent.headers)
        expected_output = expected(model, row)
        data = np.frombuffer(body[-expected_output.nbytes :], np.float32)
        np.testing.assert_allclose([data], expected_output, rtol=1e-3, atol=1e-3)

        message = over_grpc.message(over_grpc.Case(name, case.shapes[0], 1, 1))
        with grpc.insecure_channel(f"{HOST}:{process.port}") as channel:
            serialized = channel.unary_unary(INFER)(message, timeout=10)
        reply = service_pb2.ModelInferResponse.FromString(serialized)
        data = np.frombuffer(reply.raw_output_contents[0], np.float32)
        np.testing.assert_allclose([data], expected_output, rtol=1e-3, atol=1e-3)


def test_ratios_compare_results_of_the_same_round() -> None:
    def rounds(*cpu_us: float) -> Rounds:
        return Rounds([Load(1.0, 1.0, 1.0, us, 0, 0) for us in cpu_us])

    assert rounds(10, 40, 24).ratio_to(rounds(10, 20, 8), "cpu_us") == 2
