"""A Python model that calls models of every kind (BLS): the answers it receives, and how the calls are counted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.clients import ensembles, models
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.live import Live, live_server
from tests.server.python_models.repositories import ONE, write_model

pytestmark = pytest.mark.slow

# makes the calls that its parameters describe, and returns the answers
CALLER = """
import json
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        said = json.loads(request.parameters())
        tensor = pb.Tensor(said.pop("takes", "x"), request.inputs()[0].as_numpy())
        decoupled, times = said.pop("decoupled", False), said.pop("times", 1)
        told = []
        for _ in range(times):
            asked = pb.InferenceRequest(
                inputs=[tensor], requested_output_names=said.get("gives", "y").split(),
                **{name: value for name, value in said.items() if name != "gives"},
            )
            found = asked.exec(decoupled=decoupled)
            told += [self.tell(each) for each in (found if decoupled else [found])]
        return pb.InferenceResponse([pb.Tensor("y", np.array([[json.dumps(told)]], np.object_))])

    def tell(self, answer):
        if answer.has_error():
            return answer.error().message()
        return [float(tensor.as_numpy().flat[0]) for tensor in answer.output_tensors()]
"""
COUNTS = """
import numpy as np
import triton_python_backend_utils as pb


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x, sender = request.inputs()[0].as_numpy(), request.get_response_sender()
            for number in range(int(x.flat[0])):
                sender.send(pb.InferenceResponse([pb.Tensor("y", x + number)]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HOOKS = """
def post_inference(prediction, signature, metadata):
    return {"y": prediction[0], "double": prediction[0] * 2}
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = ensembles.write_all(tmp_path_factory.mktemp("models"))
    write_model(root, "caller", CALLER, ONE.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_STRING'))
    write_model(root, "several", COUNTS, ONE + "model_transaction_policy { decoupled: true }")
    write_accumulator(root, "sum", config(4, "oldest { max_candidate_sequences: 4 }" + CONTROLS + STATE % ""))
    models.write_identity(root, "cached", "max_batch_size: 4 response_cache { enable: true }")
    models.write_identity(root, "hooked", "")
    (root / "hooked" / "hooks.py").write_text(HOOKS)
    (root / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
    group = "instance_group { rate_limiter { resources { name: 'R' count: 1 } } }"
    models.write_identity(root, "limited", f"max_batch_size: 4 {group}")
    with live_server(root, cache_config=("local,size=100000",), rate_limit="execution_count") as server:
        yield server


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> Any:
    return request.param


class Ask:
    """Has the model make calls, and reads the counts of the called models."""

    def __init__(self, live: Live, triton: Any) -> None:
        self._live = live
        self._triton = triton

    def __call__(self, model: str, value: float, width: int = 1, **parameters: Any) -> list[Any]:
        """Return the content of each answer: its values, or an error's text."""
        grpc = self._triton is tritonclient.grpc
        array = np.full((1, width), value, np.float32)
        tensor = self._triton.InferInput("x", [1, width], "FP32").set_data_from_numpy(array)
        with self._triton.InferenceServerClient(self._live.grpc_address if grpc else self._live.address) as client:
            answer = client.infer("caller", [tensor], parameters={"model_name": model, **parameters})
        answer_values: list[Any] = json.loads(answer.as_numpy("y").item())
        return answer_values

    def counts(self, model: str) -> tuple[int, int]:
        """Return a model's inferences and executions."""
        with tritonclient.http.InferenceServerClient(self._live.address) as client:
            (entry,) = client.get_inference_statistics(model)["model_stats"]
        return entry["inference_count"], entry["execution_count"]


@pytest.fixture
def ask(live: Live, triton: Any) -> Ask:
    return Ask(live, triton)


def test_each_bls_call_counts_as_an_inference_and_an_execution_of_the_called_model(ask: Ask) -> None:
    before = ask.counts("limited"), ask.counts("caller")
    assert ask("limited", 4, times=3) == [[4]] * 3

    assert ask.counts("limited") == (before[0][0] + 3, before[0][1] + 3)
    assert ask.counts("caller") == (before[1][0] + 1, before[1][1] + 1)


def test_repeated_bls_calls_of_a_cached_model_run_once(ask: Ask, triton: Any) -> None:
    before = ask.counts("cached")
    assert (
        ask("cached", 5 if triton is tritonclient.grpc else 6, times=3)
        == [[5 if triton is tritonclient.grpc else 6]] * 3
    )

    assert ask.counts("cached") == (before[0] + 1, before[1] + 1)


def test_bls_calls_of_a_sequence_share_its_state_and_must_begin_with_start(ask: Ask) -> None:
    start, end = 1, 2
    assert [ask("sum", value, correlation_id=9, flags=flags) for value, flags in ((3, start), (4, 0), (5, end))] == [
        [[3]], [[7]], [[12]],
    ]  # fmt: skip
    assert "must specify the START flag on the first request of the sequence" in ask("sum", 1, correlation_id=9)[0]
    assert "must specify a non-zero or non-empty correlation ID" in ask("sum", 1)[0]


def test_a_bls_call_can_run_a_nested_ensemble(ask: Ask) -> None:
    before = [ask.counts(model) for model in ("outer", "chain", "double")]
    assert ask("outer", 1, 4, takes="in", gives="out") == [[7]]
    after = [ask.counts(model) for model in ("outer", "chain", "double")]

    assert [now[0] - was[0] for now, was in zip(after, before, strict=True)] == [1, 2, 2]
    assert ask("outer", 1, 4, takes="in", gives="y") == ["unexpected inference output 'y' for model 'outer'"]


@pytest.mark.skipif(bool(os.environ.get("PENSTOCK_TEST_FRONTS")), reason="hooks run in front ends, not beside models")
@pytest.mark.parametrize("decoupled", [False, True])
def test_a_bls_call_can_request_outputs_added_by_hooks_and_unknown_outputs_are_rejected(
    ask: Ask, decoupled: bool
) -> None:
    for names, values in (("double", [6]), ("y double", [3, 6]), ("y", [3]), ("", [3, 6])):
        assert ask("hooked", 3, gives=names, decoupled=decoupled) == [values]
    for names in ("triple", "y triple"):
        text = "unexpected inference output 'triple' for model 'hooked'"
        assert ask("hooked", 3, gives=names, decoupled=decoupled) == [text]


@pytest.mark.parametrize("many", [0, 1, 3])
def test_a_decoupled_bls_call_returns_any_number_of_answers_and_a_final_empty_one(ask: Ask, many: int) -> None:
    assert ask("several", many, decoupled=True) == [[many + number] for number in range(many)] + [[]]


def test_a_decoupled_model_must_be_called_with_decoupled_true(ask: Ask) -> None:
    (text,) = ask("several", 1)

    assert "Please use 'decoupled=True'" in text
    assert ask("limited", 2, decoupled=True) == [[2]]


def test_a_bls_call_of_an_unknown_model_or_version_reports_it_as_not_ready(ask: Ask) -> None:
    text = "Failed for execute the inference request. Model '{}' is not ready."

    assert ask("nobody", 1) == [text.format("nobody")]
    assert ask("limited", 1, model_version=9) == [text.format("limited")]
