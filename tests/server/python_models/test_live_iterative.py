"""Iterative sequences as seen by clients: a Python model reschedules a request until it is done."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.live import Live, live_server
from tests.server.python_models.repositories import left_behind, write_model

pytestmark = pytest.mark.slow
GUARD_S = 20.0

ITERATES = """
import json
import os
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    '''Of n above 0: n executions, the last of them with an answer; in a decoupled model each with one.

    -1: until it shares an execution; -2: for ever; -3: the second execution raises; -4: its process ends there.
    '''

    def initialize(self, args):
        self.decoupled = pb_utils.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self.left = {}

    def execute(self, requests):
        answers = [self.step(request, len(requests)) for request in requests]
        return None if self.decoupled else answers

    def step(self, request, many):
        number = request.correlation_id()
        start = request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START
        (wanted,) = request.inputs()[0].as_numpy().ravel()
        count = self.left[number] = 1 if start else self.left.get(number, 0) + 1
        if wanted == -3 and count == 2:
            raise ValueError("the second time")
        if wanted == -4 and count == 2:
            os._exit(3)
        done = many > 1 if wanted == -1 else count == wanted
        y = np.array([[count, many, request.flags()]], np.int32)
        answer = pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])
        if not done:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if not self.decoupled:
            return answer if done else None
        if done:
            request.get_response_sender().send(answer, flags=FINAL)
        elif wanted > 0 or count == 1:
            request.get_response_sender().send(answer)
"""
CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_INT32 dims: [ 3 ] } ]
sequence_batching { iterative_sequence: true STRATEGY {} }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
STRATEGIES = ("direct", "oldest")
WARM = """
model_warmup [ { name: "w" batch_size: 1
  inputs { key: "x" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } } ]
"""
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input [ { name: "a" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "b" data_type: TYPE_INT32 dims: [ 3 ] } ]
ensemble_scheduling { step [ { model_name: "oldest" model_version: -1
  input_map { key: "x" value: "a" } output_map { key: "y" value: "b" } } ] }
"""
CONTROLS = """
control_input [
  { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
  { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT32 } ] } ]
"""
REPORTS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    '''Tells the control START of its three executions, which it knows by CORRID.'''

    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            start, number = (
                int(pb_utils.get_input_tensor_by_name(request, name).as_numpy().item()) for name in ("START", "CORRID")
            )
            seen = self.seen.setdefault(number, [])
            seen.append(start)
            if len(seen) < 3:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            y = pb_utils.Tensor("y", np.array([seen], np.int32))
            answers.append(pb_utils.InferenceResponse([y]) if len(seen) == 3 else None)
        return answers
"""
PLAIN = CONFIG.replace("sequence_batching { iterative_sequence: true STRATEGY {} }", "")
CALLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        called = [
            pb_utils.InferenceRequest(
                model_name="direct", requested_output_names=["y"],
                inputs=[pb_utils.Tensor("x", request.inputs()[0].as_numpy())],
            ).exec() for request in requests
        ]
        return [pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(each, "y")]) for each in called]
"""


def repository(root: Path) -> Path:
    for strategy in STRATEGIES:
        config = CONFIG.replace("STRATEGY", strategy)
        with_controls = config.replace("iterative_sequence", f"{CONTROLS} iterative_sequence")
        write_model(root, f"{strategy}_told", REPORTS, with_controls)
        write_model(root, strategy, ITERATES, config)
        write_model(root, f"{strategy}_several", ITERATES, config + DECOUPLED)
        write_model(root, f"{strategy}_of_two", ITERATES, config + "instance_group [ { count: 2 kind: KIND_CPU } ]")
    one = CONFIG.replace("STRATEGY", "direct").replace("max_batch_size: 4", "max_batch_size: 1")
    write_model(root, "one", ITERATES, one + DECOUPLED)
    write_model(root, "plain", ITERATES, PLAIN)
    without_rows = CONFIG.replace("max_batch_size: 4", "").replace("STRATEGY {}", "")
    write_model(
        root,
        "whole",
        ITERATES.replace("[[count, many, request.flags()]]", "[count, many, request.flags()]"),
        without_rows,
    )
    write_model(root, "calls", CALLS, PLAIN)
    write_model(root, "warm", ITERATES, CONFIG.replace("STRATEGY", "direct") + WARM)
    (root / "ensemble" / "1").mkdir(parents=True)
    (root / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    return root


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    before = left_behind()
    with live_server(repository(tmp_path_factory.mktemp("models"))) as server:
        yield server
    assert left_behind() == before


def x(kind: Any, value: int) -> list[Any]:
    tensor = kind.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return [tensor]


def infer(http: Any, model: str, value: int, **terms: Any) -> list[int]:
    found: list[int] = http.infer(model, x(triton_http, value), **terms).as_numpy("y")[0].tolist()
    return found


def values_of(result: Any) -> list[int]:
    if isinstance(result, InferenceServerException):
        raise result
    found: list[int] = result.as_numpy("y")[0].tolist()
    return found


@contextmanager
def streaming(live: Live) -> Iterator[tuple[Any, queue.Queue[Any]]]:
    came: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        yield client, came


def counts(http: Any, model: str) -> dict[str, Any]:
    (found,) = http.get_inference_statistics(model)["model_stats"]
    return dict(found)


@pytest.mark.parametrize("strategy", STRATEGIES)
class TestAnswers:
    def test_one_answer_after_several_executions(self, http: Any, strategy: str) -> None:
        assert infer(http, strategy, 3) == [3, 1, 0]
        assert infer(http, strategy, 1) == [1, 1, 1]

    def test_one_answer_over_grpc(self, live: Live, strategy: str) -> None:
        with triton_grpc.InferenceServerClient(live.grpc_address) as client:
            assert values_of(client.infer(strategy, x(triton_grpc, 3))) == [3, 1, 0]

    def test_an_answer_in_each_execution(self, live: Live, strategy: str) -> None:
        with streaming(live) as (client, came):
            client.async_stream_infer(f"{strategy}_several", x(triton_grpc, 3))
            answers = [values_of(came.get(timeout=GUARD_S)) for _ in range(3)]

        assert answers == [[1, 1, 1], [2, 1, 0], [3, 1, 0]]

    def test_an_event_for_each_execution(self, live: Live, strategy: str) -> None:
        url = f"{live.url}/v2/models/{strategy}_several/generate_stream"
        with httpx.stream("POST", url, json={"x": 3}, timeout=GUARD_S) as response:
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]

        assert [event["y"] for event in events] == [[1, 1, 1], [2, 1, 0], [3, 1, 0]]

    def test_a_sequence_named_by_a_client_reaches_the_model(self, http: Any, strategy: str) -> None:
        assert infer(http, strategy, 2, sequence_id=7, sequence_start=True, sequence_end=True) == [2, 1, 0]
        with pytest.raises(InferenceServerException, match="must specify the START flag on the first request"):
            infer(http, strategy, 2, sequence_id=7)

    def test_the_start_control_is_set_only_in_the_first_execution(self, http: Any, strategy: str) -> None:
        under_way = [http.async_infer(f"{strategy}_told", x(triton_http, 1)) for _ in range(6)]

        assert [values_of(each.get_result()) for each in under_way] == [[1, 0, 0]] * 6

    def test_rescheduled_and_new_requests_share_an_execution(self, live: Live, strategy: str) -> None:
        """The first runs alone until the second has come, and both end in the first execution that they share."""
        with streaming(live) as (client, came), streaming(live) as (other, then):
            client.async_stream_infer(f"{strategy}_several", x(triton_grpc, -1))
            assert values_of(came.get(timeout=GUARD_S)) == [1, 1, 1]
            other.async_stream_infer(f"{strategy}_several", x(triton_grpc, -1))
            count, many, flags = values_of(came.get(timeout=GUARD_S))
            new = values_of(then.get(timeout=GUARD_S))

        assert (count > 1, many, flags) == (True, 2, 0)
        assert new == [1, 2, 1]

    def test_concurrent_requests_have_separate_state(self, http: Any, strategy: str) -> None:
        model = f"{strategy}_of_two"
        under_way = [http.async_infer(model, x(triton_http, value)) for value in range(1, 25)]

        assert [values_of(each.get_result())[0] for each in under_way] == list(range(1, 25))

    def test_each_execution_counts_as_an_inference(self, http: Any, strategy: str) -> None:
        before = counts(http, strategy)
        infer(http, strategy, 5)
        after = counts(http, strategy)

        grown = {name: after[name] - before[name] for name in ("inference_count", "execution_count")}
        stats = {
            name: after["inference_stats"][name]["count"] - before["inference_stats"][name]["count"]
            for name in ("success", "queue", "compute_infer", "fail")
        }
        assert grown == {"inference_count": 5, "execution_count": 5}
        assert stats == {"success": 5, "queue": 5, "compute_infer": 5, "fail": 0}

    def test_an_exception_in_a_later_execution_ends_the_request(self, http: Any, strategy: str) -> None:
        with pytest.raises(InferenceServerException, match="the second time"):
            infer(http, strategy, -3)

        assert infer(http, strategy, 2) == [2, 1, 0]

    def test_a_worker_that_exits_between_executions_fails_the_request(self, http: Any, strategy: str) -> None:
        with pytest.raises(InferenceServerException):
            infer(http, strategy, -4)

        assert infer(http, strategy, 2) == [2, 1, 0]


def test_a_disconnected_client_frees_its_sequence_slot(live: Live, http: Any) -> None:
    with streaming(live) as (client, came):
        client.async_stream_infer("one", x(triton_grpc, -2))
        values_of(came.get(timeout=GUARD_S))
        client.stop_stream(cancel_requests=True)

    with streaming(live) as (client, came):
        client.async_stream_infer("one", x(triton_grpc, 1))
        assert values_of(came.get(timeout=GUARD_S)) == [1, 1, 1]


def test_the_timeout_applies_until_the_first_execution(live: Live, http: Any) -> None:
    with streaming(live) as (client, came), streaming(live) as (other, then):
        client.async_stream_infer("one", x(triton_grpc, -2), timeout=500_000)
        values_of(came.get(timeout=GUARD_S))
        other.async_stream_infer("one", x(triton_grpc, 1), timeout=600_000)  # ends when the first's is over
        with pytest.raises(InferenceServerException, match="timeout of the corresponding sequence has been expired"):
            values_of(then.get(timeout=GUARD_S))
        assert came.empty()
        client.stop_stream(cancel_requests=True)


def test_a_model_can_call_an_iterative_model(http: Any) -> None:
    assert infer(http, "calls", 3) == [3, 1, 0]


def test_an_iterative_model_can_be_a_step_of_an_ensemble(http: Any) -> None:
    tensors = x(triton_http, 3)
    tensors[0]._name = "a"

    assert http.infer("ensemble", tensors).as_numpy("b").tolist() == [[3, 1, 0]]


def test_a_warm_up_sample_runs_once(http: Any) -> None:
    assert infer(http, "warm", 2) == [2, 1, 0]


def test_a_model_without_rows_runs_one_request_at_a_time(http: Any) -> None:
    tensor = triton_http.InferInput("x", [1], "INT32")
    tensor.set_data_from_numpy(np.array([3], np.int32))
    under_way = [http.async_infer("whole", [tensor]) for _ in range(4)]

    assert [each.get_result().as_numpy("y").tolist() for each in under_way] == [[3, 1, 0]] * 4


def test_a_request_with_several_rows_is_rejected(http: Any) -> None:
    tensor = triton_http.InferInput("x", [2, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[1], [1]], np.int32))

    with pytest.raises(InferenceServerException, match="must specify batch-size 1"):
        http.infer("direct", [tensor])


def test_rescheduling_without_iterative_sequence_is_an_error(http: Any) -> None:
    with pytest.raises(InferenceServerException, match="released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE"):
        infer(http, "plain", -2)


def test_the_configuration_reports_iterative_sequence(http: Any) -> None:
    assert http.get_model_config("oldest")["sequence_batching"]["iterative_sequence"] is True
