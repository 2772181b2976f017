"""Python models as seen by clients: a live server, tritonclient, and model.py files in workers."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.live import Live, live_server
from tests.server.python_models.repositories import ADD_SUB, ADD_SUB_CONFIG, ONE, left_behind, write_model

pytestmark = pytest.mark.slow

ECHO = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x.size and x.flat[0] == 13:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("thirteen is refused")))
            elif x.size and x.flat[0] == 99:
                raise ValueError("ninety-nine")
            elif x.size and x.flat[0] == 66:
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x.astype(np.float64))]))
            elif x.size and x.flat[0] == 67:
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("z", x)]))
            elif x.size and x.flat[0] == 68:
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x[0])]))
            elif x.size and x.flat[0] == 69:
                os._exit(3)
            else:
                y = x * 2 if x.size == 0 or x.flat[0] != 70 else np.full_like(x, len(requests))
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        if x.size and x.flat[0] == 71:
            answers.append(answers[0])
        return answers
"""
REPEAT = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy().copy()
            threading.Thread(target=self.send, args=(request.get_response_sender(), x)).start()

    def send(self, sender, x):
        for value in x.ravel():
            if value < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("below nothing")))
            else:
                y = pb_utils.Tensor("y", np.array([value], np.float32))
                sender.send(pb_utils.InferenceResponse([y], parameters={"twice": int(value) * 2, "last": False}))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
REPEAT_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""
LATER = """
import threading
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request,)).start()
        return [None for _ in requests]

    def send(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        request.get_response_sender().send(
            pb_utils.InferenceResponse([pb_utils.Tensor("y", x + 1)]),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
"""
PROPERTIES = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        answers = []
        for request in requests:
            seen = {
                "id": request.request_id(), "parameters": json.loads(request.parameters()),
                "correlation": request.correlation_id(), "flags": request.flags(),
                "inputs": {each.name(): each.as_numpy().tolist() for each in request.inputs()},
                "outputs": sorted(request.requested_output_names()), "instance": self.args["model_instance_name"],
                "many": len(requests), "timeout": request.timeout(),
            }
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([[json.dumps(seen)]], object))]))
        return answers
"""
SEEN_CONFIG = """
backend: "python"
max_batch_size: 4
input [ { name: "x" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "y" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
SHORT = """
dynamic_batching {
  default_queue_policy { allow_timeout_override: true default_timeout_microseconds: 60000000 }
}
"""
SEQUENCE = """
sequence_batching {
  oldest {}
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } ] },
    { name: "CORRID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } ] }
  ]
}
"""
RAGGED = SEEN_CONFIG.replace("INT32 dims: [ 1 ]", "INT32 dims: [ -1 ] allow_ragged_batch: true").replace("4", "2")
FULL = "direct { max_queue_delay_microseconds: 20000000 minimum_slot_utilization: 1 }"
COMPLETES = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [2]})
        config.set_max_batch_size(4)
        config.set_dynamic_batching()
        return config

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy() + 1)])
            for request in requests
        ]
"""
CALLER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            said = json.loads(request.parameters())
            x = pb_utils.get_input_tensor_by_name(request, "x")
            called = pb_utils.InferenceRequest(
                model_name=said["model"], requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x.as_numpy())]
            )
            if said.get("decoupled"):
                found = [each for each in called.exec(decoupled=True)]
            else:
                found = [called.exec()]
            errors = [each.error().message() for each in found if each.has_error()]
            if errors:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(errors[0])))
                continue
            values = [pb_utils.get_output_tensor_by_name(each, "y").as_numpy().ravel() for each in found
                      if each.output_tensors()]
            y = np.concatenate(values).reshape(1, -1)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
METRIC = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily(
            name="requests_seen", description="Seen", kind=pb_utils.MetricFamily.COUNTER
        )
        self.seen = self.family.Metric(labels={"model": "counting"})
        self.means = pb_utils.MetricFamily(name="mean_of_none", description="", kind=pb_utils.MetricFamily.GAUGE)
        self.times = pb_utils.MetricFamily(name="times", description="", kind=pb_utils.MetricFamily.HISTOGRAM)
        self.mean = self.means.Metric()
        self.time = self.times.Metric(buckets=[0.5, float("inf")])

    def execute(self, requests):
        self.seen.increment(len(requests))
        self.mean.set(float("nan"))
        self.time.observe(float("inf"))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    write_model(root, "add_sub", ADD_SUB, ADD_SUB_CONFIG)
    write_model(root, "echo", ECHO, ONE)
    write_model(root, "batching", ECHO, ONE + "dynamic_batching { max_queue_delay_microseconds: 200000 }")
    write_model(root, "repeat", REPEAT, REPEAT_CONFIG)
    write_model(root, "later", LATER, ONE)
    write_model(root, "seen", PROPERTIES, SEEN_CONFIG)
    write_model(root, "short", PROPERTIES, SEEN_CONFIG + SHORT)
    write_model(root, "sequence", PROPERTIES, SEEN_CONFIG + SEQUENCE)
    write_model(root, "direct", PROPERTIES, SEEN_CONFIG + SEQUENCE.replace("oldest {}", "direct {}"))
    write_model(root, "pinned", PROPERTIES, SEEN_CONFIG + SEQUENCE + "instance_group [ { count: 2 kind: KIND_CPU } ]")
    write_model(root, "ragged", PROPERTIES, RAGGED + SEQUENCE.replace("oldest {}", FULL))
    write_model(root, "completes", COMPLETES)
    write_model(root, "caller", CALLER, ONE)
    write_model(root, "counting", METRIC, ONE)
    before = left_behind()
    forwarded: dict[str, Any] = {"grpc_header_forward_pattern": "x-mine.*", "http_header_forward_pattern": "x-mine.*"}
    with live_server(root, **forwarded) as server:
        yield server
    assert left_behind() == before


def x(*values: float) -> list[Any]:
    tensor = triton_http.InferInput("x", [1, len(values)], "FP32")
    tensor.set_data_from_numpy(np.array([values], np.float32))
    return [tensor]


def grpc_x(values: list[float], shape: list[int]) -> list[Any]:
    tensor = triton_grpc.InferInput("x", shape, "FP32")
    tensor.set_data_from_numpy(np.array(values, np.float32).reshape(shape))
    return [tensor]


def properties_seen(http: Any, model: str, **terms: Any) -> dict[str, Any]:
    tensor = triton_http.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[5]], np.int32))
    found: dict[str, Any] = json.loads(http.infer(model, [tensor], **terms).as_numpy("y")[0, 0])
    return found


def stream(live: Live, model: str, values: list[float], **terms: Any) -> list[Any]:
    came: queue.Queue[Any] = queue.Queue()
    answers = []
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer(
            model, grpc_x(values, [len(values)]), enable_empty_final_response=True, request_id="r", **terms
        )
        while True:
            answer = came.get(timeout=10)
            if isinstance(answer, InferenceServerException):
                answers.append(answer.message())
                continue
            response = answer.get_response()
            if response.outputs:
                answers.append(float(answer.as_numpy("y")[0]))
            if response.parameters["triton_final_response"].bool_param:
                return answers


def test_a_model_answers_over_http(http: Any) -> None:
    inputs = [triton_http.InferInput(name, [4], "FP32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.arange(4, dtype=np.float32))

    result = http.infer("add_sub", inputs)

    assert result.as_numpy("OUTPUT0").tolist() == [0, 2, 4, 6]
    assert result.as_numpy("OUTPUT1").tolist() == [0, 0, 0, 0]


def test_a_model_answers_over_grpc(live: Live) -> None:
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        result = client.infer("echo", grpc_x([1, 2], [1, 2]))

    assert result.as_numpy("y").tolist() == [[2, 4]]


def test_only_requested_outputs_are_returned(http: Any) -> None:
    inputs = [triton_http.InferInput(name, [4], "FP32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.arange(4, dtype=np.float32))

    result = http.infer("add_sub", inputs, outputs=[triton_http.InferRequestedOutput("OUTPUT1")])

    assert [output["name"] for output in result.get_response()["outputs"]] == ["OUTPUT1"]


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (13, "thirteen is refused"),
        (99, "ninety-nine"),
        (71, "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2"),
    ],
)
def test_an_error_is_reported_and_the_next_request_is_served(http: Any, first: float, text: str) -> None:
    with pytest.raises(InferenceServerException, match=r"(?s).*") as caught:
        http.infer("echo", x(first, 1))

    assert text in caught.value.message()
    assert http.infer("echo", x(3)).as_numpy("y").tolist() == [[6]]


def test_requests_share_an_execute_with_dynamic_batching(live: Live) -> None:
    with triton_http.InferenceServerClient(live.address, concurrency=4) as client:
        under_way = [client.async_infer("batching", x(70)) for _ in range(4)]
        sizes = [each.get_result().as_numpy("y")[0, 0] for each in under_way]

    assert max(sizes) > 1


def test_requests_run_alone_without_a_scheduler(live: Live) -> None:
    with triton_http.InferenceServerClient(live.address, concurrency=4) as client:
        under_way = [client.async_infer("echo", x(70)) for _ in range(8)]
        sizes = {each.get_result().as_numpy("y")[0, 0] for each in under_way}

    assert sizes == {1}


def test_a_model_sees_the_properties_of_a_request(http: Any) -> None:
    found = properties_seen(http, "seen", request_id="abc", parameters={"mine": 3})

    assert (found["id"], found["parameters"]["mine"]) == ("abc", 3)
    assert found["outputs"] == ["y"]
    assert found["inputs"] == {"x": [[5]]}
    assert found["instance"] == "seen_0_0"


@pytest.mark.parametrize("model", ["seen", "short"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("timeout_us", [None, 50_000_000, 11_000_000_000])
def test_a_model_sees_the_timeout_of_a_request(
    live: Live, http: Any, model: str, protocol: str, timeout_us: int | None
) -> None:
    if protocol == "http":
        found = properties_seen(http, model, timeout=timeout_us)
    else:
        tensor = triton_grpc.InferInput("x", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.array([[5]], np.int32))
        with triton_grpc.InferenceServerClient(live.grpc_address) as client:
            found = json.loads(client.infer(model, [tensor], timeout=timeout_us).as_numpy("y")[0, 0])

    assert found["timeout"] == (timeout_us or 0)


def test_a_model_sees_parameters_over_grpc(live: Live) -> None:
    tensor = triton_grpc.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[5]], np.int32))
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        result = client.infer("seen", [tensor], parameters={"mine": "b"}, headers={"x-mine": "c"})
        found = json.loads(result.as_numpy("y")[0, 0])

    assert (found["parameters"]["mine"], found["parameters"]["x-mine"]) == ("b", "c")


def test_a_model_sees_forwarded_headers_as_parameters(http: Any) -> None:
    assert properties_seen(http, "seen", headers={"x-mine": "c"})["parameters"]["x-mine"] == "c"


@pytest.mark.parametrize("model", ["sequence", "direct"])
def test_a_model_sees_the_sequence_controls(http: Any, model: str) -> None:
    properties_seen(http, model, sequence_id=5, sequence_start=True)
    first = properties_seen(http, model, sequence_id=7, sequence_start=True)
    last = properties_seen(http, model, sequence_id=7, sequence_end=True)
    properties_seen(http, model, sequence_id=5, sequence_end=True)

    assert (first["correlation"], first["flags"], last["flags"]) == (7, 1, 2)
    assert first["inputs"]["START"] == [[1]]
    assert last["inputs"]["START"] == [[0]]
    assert last["inputs"]["CORRID"] == [[7]]


def test_a_sequence_stays_with_one_instance(http: Any) -> None:
    def of(number: int) -> set[str]:
        options = [{"sequence_start": True}, *[{}] * 8, {"sequence_end": True}]
        return {properties_seen(http, "pinned", sequence_id=number, **each)["instance"] for each in options}

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(of, range(1, 9)))

    assert all(len(instances) == 1 for instances in found)
    assert len(set.union(*found)) == 2


def test_sequences_of_different_lengths_share_a_batch_if_allowed(live: Live) -> None:
    def infer(number: int) -> dict[str, Any]:
        tensor = triton_http.InferInput("x", [1, number], "INT32")
        tensor.set_data_from_numpy(np.full((1, number), number, np.int32))
        with triton_http.InferenceServerClient(live.address) as client:
            result = client.infer("ragged", [tensor], sequence_id=number, sequence_start=True, sequence_end=True)
        return json.loads(result.as_numpy("y")[0, 0])  # type: ignore[no-any-return]

    with ThreadPoolExecutor(2) as pool:
        one, three = pool.map(infer, (1, 3))

    assert (one["many"], one["inputs"]["x"], one["inputs"]["CORRID"]) == (2, [[1]], [[1]])
    assert (three["many"], three["inputs"]["x"], three["inputs"]["CORRID"]) == (2, [[3, 3, 3]], [[3]])


def test_a_model_without_a_configuration_file_completes_its_own(http: Any) -> None:
    config = http.get_model_config("completes")

    assert (config["backend"], config["max_batch_size"]) == ("python", 4)
    assert config["input"][0]["dims"] == [2]
    assert "dynamic_batching" in config
    assert config["default_model_filename"] == "model.py"
    assert http.get_model_metadata("completes")["platform"] == "python"
    assert http.infer("completes", x(1, 2)).as_numpy("y").tolist() == [[2, 3]]


def test_a_model_can_answer_after_execute_has_returned(http: Any) -> None:
    assert http.infer("later", x(1)).as_numpy("y").tolist() == [[2]]


def test_a_stream_has_all_answers_and_the_final_mark(live: Live) -> None:
    assert stream(live, "repeat", [1, 2, 3]) == [1, 2, 3]


def test_an_error_can_be_one_of_several_streamed_answers(live: Live) -> None:
    assert stream(live, "repeat", [1, -1, 2]) == [1, "below nothing", 2]


def test_a_streamed_answer_has_the_parameters_of_its_response(live: Live) -> None:
    came: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer("repeat", grpc_x([3], [1]))
        parameters = came.get(timeout=10).get_response().parameters

    assert (parameters["twice"].int64_param, parameters["last"].bool_param) == (6, False)
    assert parameters["last"].WhichOneof("parameter_choice") == "bool_param"


def test_a_stream_can_end_without_answers(live: Live) -> None:
    assert stream(live, "repeat", []) == []


def test_generate_stream_sends_an_event_for_each_answer(live: Live) -> None:
    with httpx.stream("POST", f"{live.url}/v2/models/repeat/generate_stream", json={"x": [1, 2]}) as answer:
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]

    assert [event["y"] for event in events] == [1, 2]


def test_generate_accepts_a_decoupled_model_that_gives_one_answer(live: Live) -> None:
    url = f"{live.url}/v2/models/repeat/generate"

    assert httpx.post(url, json={"x": [4]}).json()["y"] == 4
    assert "exactly 1 response" in httpx.post(url, json={"x": [4, 5]}).json()["error"]


def test_infer_rejects_a_decoupled_model(live: Live) -> None:
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}

    answer = httpx.post(f"{live.url}/v2/models/repeat/infer", json=body)

    assert "decoupled" in answer.json()["error"]


def test_each_answer_of_a_stream_is_counted_in_the_statistics(live: Live, http: Any) -> None:
    stream(live, "repeat", [1, 2])

    (counted,) = http.get_inference_statistics("repeat")["model_stats"]
    assert counted["response_stats"]["0"]["success"]["count"] >= 1
    assert counted["response_stats"]["1"]["success"]["count"] >= 1


@pytest.mark.parametrize(("model", "decoupled"), [("echo", False), ("completes", False), ("later", False)])
def test_a_model_calls_another_model(http: Any, model: str, decoupled: bool) -> None:
    values = {"echo": [2, 4], "completes": [2, 3], "later": [2, 3]}

    result = http.infer("caller", x(1, 2), parameters={"model": model, "decoupled": decoupled})

    assert result.as_numpy("y").tolist() == [values[model]]


def test_the_error_of_a_called_model_reaches_the_client(http: Any) -> None:
    with pytest.raises(InferenceServerException, match="thirteen is refused"):
        http.infer("caller", x(13), parameters={"model": "echo"})
    with pytest.raises(InferenceServerException, match="Model 'nobody' is not ready"):
        http.infer("caller", x(13), parameters={"model": "nobody"})
    with pytest.raises(InferenceServerException, match="decoupled=True"):
        http.infer("caller", x(13), parameters={"model": "repeat"})


def test_custom_metrics_are_on_the_metrics_page(live: Live, http: Any) -> None:
    http.infer("counting", x(1))

    page = httpx.get(f"http://127.0.0.1:{live.metrics_port}/metrics").text

    assert "# TYPE requests_seen counter" in page
    assert 'requests_seen{model="counting"} 1' in page
    assert "mean_of_none NaN" in page
    assert [line for line in page.splitlines() if line.startswith("times")] == [
        'times_bucket{le="0.5"} 0', 'times_bucket{le="+Inf"} 1', "times_sum +Inf", "times_count 1",
    ]  # fmt: skip


def test_inferences_and_executions_are_counted_in_the_statistics(http: Any) -> None:
    def count() -> tuple[int, int]:
        (counted,) = http.get_inference_statistics("add_sub")["model_stats"]
        return counted["inference_count"], counted["execution_count"]

    before = count()
    test_a_model_answers_over_http(http)

    assert count() == (before[0] + 1, before[1] + 1)


def test_a_worker_that_exits_fails_its_request_and_the_next_is_served(live: Live, http: Any) -> None:
    with pytest.raises(InferenceServerException) as caught:
        http.infer("echo", x(69))

    assert caught.value.status() == "503"
    assert http.infer("echo", x(3)).as_numpy("y").tolist() == [[6]]
    assert http.is_model_ready("echo")


def test_requests_wait_while_a_worker_is_replaced(live: Live) -> None:
    with triton_http.InferenceServerClient(live.address, concurrency=4) as client:
        ends = client.async_infer("echo", x(69))
        waiting = [client.async_infer("echo", x(3)) for _ in range(3)]

        with pytest.raises(InferenceServerException):
            ends.get_result()
        assert [each.get_result().as_numpy("y")[0, 0] for each in waiting] == [6, 6, 6]


def test_concurrent_requests_are_all_answered_correctly(live: Live) -> None:
    failures: list[str] = []

    def ask(first: int) -> None:
        with triton_http.InferenceServerClient(live.address) as client:
            values = range(first, first + 20)
            found = {value: client.infer("batching", x(value)).as_numpy("y").tolist() for value in values}
        failures.extend(str(value) for value in values if found[value] != [[2 * value]])

    threads = [threading.Thread(target=ask, args=(100 + 20 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == []


def test_a_model_whose_initialize_raises_does_not_load(tmp_path: Path) -> None:
    code = "class TritonPythonModel:\n    def initialize(self, args):\n        raise ValueError('no weights')\n"
    write_model(tmp_path, "broken", code, ONE)
    write_model(tmp_path, "echo", ECHO, ONE)
    before = left_behind()

    with live_server(tmp_path) as server:
        rows = server.call(server.server.control.index())

    reasons = {row["name"]: row.get("reason", "") for row in rows}
    assert "no weights" in reasons["broken"]
    assert reasons["echo"] == ""
    assert left_behind() == before
