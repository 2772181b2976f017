"""Responses of model.py reach clients unchanged, and processes that it starts work."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.live import Live, live_server
from tests.server.python_models.repositories import left_behind, write_model

pytestmark = pytest.mark.slow
GUARD_S = 20.0
OWN = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(json.loads(request.parameters()), request.inputs()[0].as_numpy()) for request in requests]

    def one(self, said, x):
        y, z = pb_utils.Tensor("y", x), pb_utils.Tensor("z", x + 1)
        do = said.get("do")
        if do == "say":
            return pb_utils.InferenceResponse([y, z], parameters={"text": "a", "number": 3, "yes": True})
        if do == "unknown":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("who knows", pb_utils.TritonError.UNKNOWN))
        if do == "double":
            z = pb_utils.Tensor("z", x.astype(np.float64))
        if do == "flat":
            z = pb_utils.Tensor("z", x[0])
        return pb_utils.InferenceResponse([y] if do == "lack" else [y, z])
"""
MANY = """
import json
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, x = request.get_response_sender(), request.inputs()[0].as_numpy()
            wide = json.loads(request.parameters()).get("do") == "wide"
            y = pb_utils.Tensor("y", x.astype("float64") if wide else x)
            for _ in range(2):
                sender.send(pb_utils.InferenceResponse([y, pb_utils.Tensor("z", x[0])]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        said = json.loads(request.parameters())
        x = pb_utils.get_input_tensor_by_name(request, "x")
        if said["do"] == "wide":
            x = pb_utils.Tensor("x", x.as_numpy().astype(np.float64))
        asked = pb_utils.InferenceRequest(
            model_name="own", requested_output_names=["y", "z"], inputs=[x], parameters={"do": said["do"]}
        )
        answer = asked.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        names = [each.name() for each in answer.output_tensors()]
        found = {"names": names, "parameters": json.loads(answer.parameters())}
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("y", x.as_numpy()), pb_utils.Tensor("z", np.array([[json.dumps(found)]], object))]
        )
"""
STARTS = """
import multiprocessing
import os
import sys
import numpy as np
import triton_python_backend_utils as pb_utils


def twice(value):
    return float(pb_utils.Tensor("t", np.array([value * 2], np.float32)).as_numpy()[0])


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            kind = request.request_id()
            if kind.startswith("exit"):
                child = os.fork()
                if not child:
                    sys.exit(3)
                y = np.full_like(x, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            elif kind == "return":
                child = os.fork()
                if not child:
                    return []
                os.waitpid(child, 0)
                y = x * 2
            else:
                with multiprocessing.get_context(kind).Pool(1) as pool:
                    y = np.array([pool.map(twice, x[0].tolist())], np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return answers
"""
BRAIN = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = request.inputs()[0]
            sender = request.get_response_sender()
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", x.to_dlpack())]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
BRAIN_CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request.inputs()[0]) for request in requests]

    def one(self, x):
        asked = pb_utils.InferenceRequest(model_name="brain", requested_output_names=["y"], inputs=[x])
        found = [each.output_tensors()[0] for each in asked.exec(decoupled=True) if each.output_tensors()]
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([found[0].triton_dtype()], np.int32))])
"""
BRAIN_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_BF16 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_BF16 dims: [ -1 ] } ]
"""
NO_INPUT = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        first = os.environ["PATH"].split(":")[0]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([first], object))]) for _ in requests]
"""
NO_INPUT_CONFIG = """
backend: "python"
output [ { name: "y" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
PACKED = (
    NO_INPUT_CONFIG
    + """
parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/env.tar.gz" } }
"""
)
TWO = """
backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "z" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
ENSEMBLE = (
    TWO.replace('backend: "python"', 'platform: "ensemble"').replace("dims: [ -1 ]", "dims: [ 2 ]")
    + """
ensemble_scheduling { step [
  { model_name: "own" model_version: -1 input_map { key: "x" value: "x" }
    output_map { key: "y" value: "y" } output_map { key: "z" value: "z" } }
] }
"""
)

BEHIND = (
    TWO.replace('backend: "python"', 'platform: "ensemble"')
    + """
ensemble_scheduling { step [
  { model_name: "own" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "z" value: "between" } },
  { model_name: "own" model_version: -1 input_map { key: "x" value: "between" }
    output_map { key: "y" value: "y" } output_map { key: "z" value: "z" } }
] }
"""
)

STREAMED = (
    TWO.replace('backend: "python"', 'platform: "ensemble"')
    + """
ensemble_scheduling { step [
  { model_name: "many" model_version: -1 input_map { key: "x" value: "x" }
    output_map { key: "y" value: "between" } output_map { key: "z" value: "y" } },
  { model_name: "own" model_version: -1 input_map { key: "x" value: "between" } output_map { key: "z" value: "z" } }
] }
"""
)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models of ü")
    write_model(root, "own", OWN, TWO)
    write_model(root, "kept", OWN, TWO + "response_cache { enable: true }")
    write_model(root, "caller", CALLER, TWO.replace('"z" data_type: TYPE_FP32', '"z" data_type: TYPE_STRING'))
    write_model(root, "starts", STARTS, TWO)
    write_model(root, "brain", BRAIN, BRAIN_CONFIG + "model_transaction_policy { decoupled: true }")
    write_model(
        root,
        "brain_caller",
        BRAIN_CALLER,
        BRAIN_CONFIG.replace('"y" data_type: TYPE_BF16', '"y" data_type: TYPE_INT32'),
    )
    write_model(root, "no_input", NO_INPUT, NO_INPUT_CONFIG, f'[worker]\ninterpreter = "{sys.executable}"\n')
    (root / "whole" / "1").mkdir(parents=True)
    (root / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    write_model(root, "many", MANY, TWO + "model_transaction_policy { decoupled: true }")
    (root / "streamed" / "1").mkdir(parents=True)
    (root / "streamed" / "config.pbtxt").write_text(STREAMED)
    (root / "behind" / "1").mkdir(parents=True)
    (root / "behind" / "config.pbtxt").write_text(BEHIND)
    before = left_behind()
    with live_server(root, cache_config=("local,size=1000000",)) as server:
        yield server
    assert left_behind() == before


@pytest.fixture
def http(live: Live) -> Iterator[Any]:
    with triton_http.InferenceServerClient(live.address, network_timeout=GUARD_S) as client:
        yield client


def x(kind: Any = triton_http) -> list[Any]:
    tensor = kind.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([[1, 2]], np.float32))
    return [tensor]


def by_grpc(live: Live, model: str, **terms: Any) -> Any:
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        return client.infer(model, x(triton_grpc), client_timeout=GUARD_S, **terms)


def names(result: Any) -> list[str]:
    return [output["name"] for output in result.get_response()["outputs"]]


PARAMETERS = {"text": "a", "number": 3, "yes": True}


@pytest.mark.parametrize("binary", [True, False])
def test_response_parameters_are_returned_over_http(http: Any, binary: bool) -> None:
    outputs = [triton_http.InferRequestedOutput(name, binary_data=binary) for name in ("y", "z")]

    result = http.infer("own", x(), outputs=outputs, request_id="r", parameters={"do": "say"})

    assert result.get_response()["parameters"] == PARAMETERS
    assert result.get_response()["id"] == "r"
    assert result.as_numpy("z").tolist() == [[2, 3]]
    assert "parameters" not in http.infer("own", x(), outputs=outputs).get_response()


def test_response_parameters_are_returned_over_grpc(live: Live) -> None:
    result = by_grpc(live, "own", parameters={"do": "say"})

    parameters = result.get_response().parameters
    assert (parameters["text"].string_param, parameters["number"].int64_param, parameters["yes"].bool_param) == (
        "a",
        3,
        True,
    )
    assert result.as_numpy("y").tolist() == [[1, 2]]


def test_response_parameters_are_returned_on_a_stream(live: Live) -> None:
    came: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer("own", x(triton_grpc), parameters={"do": "say"})
        parameters = came.get(timeout=GUARD_S).get_response().parameters

    assert (parameters["number"].int64_param, parameters["triton_final_response"].bool_param) == (3, True)


def test_response_parameters_are_members_of_a_generate_answer(live: Live) -> None:
    body = {"x": [1, 2], "do": "say"}
    expected = {"model_name": "own", "model_version": "1", "y": [1, 2], "z": [2, 3], **PARAMETERS}

    response = httpx.post(f"{live.url}/v2/models/own/generate", json=body, timeout=GUARD_S)
    events = httpx.post(f"{live.url}/v2/models/own/generate_stream", json=body, timeout=GUARD_S)

    assert response.json() == expected
    assert list(response.json()) == sorted(expected)
    assert json.loads(events.text.removeprefix("data: ")) == expected


def test_response_parameters_reach_the_calling_model(http: Any) -> None:
    found = http.infer("caller", x(), parameters={"do": "say"}).as_numpy("z")[0, 0].decode()

    assert '"parameters": {"text": "a", "number": 3, "yes": true}' in found


def test_an_output_missing_from_the_response_is_omitted(live: Live, http: Any) -> None:
    options = {"parameters": {"do": "lack"}}

    assert names(http.infer("own", x(), **options)) == ["y"]
    assert [each.name for each in by_grpc(live, "own", **options).get_response().outputs] == ["y"]
    assert '"names": ["y"]' in http.infer("caller", x(), **options).as_numpy("z")[0, 0].decode()
    assert httpx.post(f"{live.url}/v2/models/own/generate", json={"x": [1, 2], "do": "lack"}).json()["y"] == [1, 2]
    assert names(http.infer("own", x(), outputs=[triton_http.InferRequestedOutput("z")], **options)) == []


def test_an_output_is_returned_with_its_actual_datatype_and_shape(live: Live, http: Any) -> None:
    result = http.infer("own", x(), parameters={"do": "double"})
    flat = by_grpc(live, "own", parameters={"do": "flat"})

    assert [output["datatype"] for output in result.get_response()["outputs"]] == ["FP32", "FP64"]
    assert result.as_numpy("z").tolist() == [[1, 2]]
    assert flat.as_numpy("z").tolist() == [1, 2]
    assert by_grpc(live, "own", parameters={"do": "double"}).as_numpy("z").dtype == np.float64


def test_an_ensemble_returns_outputs_that_differ_from_the_configuration(live: Live, http: Any) -> None:
    double = http.infer("whole", x(), parameters={"do": "double"})

    assert names(http.infer("whole", x(), parameters={"do": "lack"})) == ["y"]
    assert [each.name for each in by_grpc(live, "whole", parameters={"do": "lack"}).get_response().outputs] == ["y"]
    assert [output["datatype"] for output in double.get_response()["outputs"]] == ["FP32", "FP64"]
    assert by_grpc(live, "whole", parameters={"do": "double"}).as_numpy("z").dtype == np.float64
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
    request_body = {"inputs": [tensor], "parameters": {"do": "double"}}
    uncoded = {"accept-encoding": "identity"}
    body = httpx.post(f"{live.url}/v2/models/whole/infer", json=request_body, headers=uncoded, timeout=GUARD_S).json()
    assert [output["datatype"] for output in body["outputs"]] == ["FP32", "FP64"]
    assert by_grpc(live, "whole", parameters={"do": "flat"}).as_numpy("z").tolist() == [1, 2]


def streamed(live: Live, do: str) -> list[Any]:
    came: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer("streamed", x(triton_grpc), parameters={"do": do})
        client.stop_stream()
    return list(came.queue)


def test_a_streamed_ensemble_returns_outputs_that_differ_from_the_configuration(live: Live) -> None:
    answers = streamed(live, "flat")

    assert [answer.as_numpy("y").tolist() for answer in answers] == [[1, 2]] * 2
    assert [answer.as_numpy("z").tolist() for answer in answers] == [[1, 2]] * 2
    (error,) = streamed(live, "wide")
    assert "model 'many': unexpected datatype TYPE_FP64" in error.message()


@pytest.mark.parametrize(
    ("ensemble", "do", "text"),
    [
        ("behind", "double", "in ensemble 'behind', model 'own': unexpected datatype TYPE_FP64"),
        ("behind", "flat", "unexpected shape for input 'x' for model 'own'"),
    ],
)
def test_an_output_that_the_next_step_cannot_accept_is_an_error(http: Any, ensemble: str, do: str, text: str) -> None:
    with pytest.raises(InferenceServerException, match=text):
        http.infer(ensemble, x(), parameters={"do": do})
    assert http.infer("whole", x()).as_numpy("z").tolist() == [[2, 3]]


def test_an_incomplete_answer_is_not_cached(http: Any) -> None:
    assert names(http.infer("kept", x(), parameters={"do": "lack"})) == ["y"]
    assert names(http.infer("kept", x())) == ["y", "z"]


def test_an_unknown_error_has_the_status_unknown(live: Live, http: Any) -> None:
    with pytest.raises(InferenceServerException, match="who knows") as caught:
        http.infer("own", x(), parameters={"do": "unknown"})
    with pytest.raises(InferenceServerException, match="who knows") as rpc:
        by_grpc(live, "own", parameters={"do": "unknown"})

    assert (caught.value.status(), rpc.value.status()) == ("400", "StatusCode.UNKNOWN")


def test_a_call_with_a_wrong_datatype_is_an_error(live: Live) -> None:
    with pytest.raises(InferenceServerException) as caught:
        by_grpc(live, "caller", parameters={"do": "wide"})

    assert caught.value.message() == "inference input 'x' data-type is 'FP64', but model 'own' expects 'FP32'"


@pytest.mark.parametrize("kind", ["fork", "spawn", "forkserver"])
def test_a_model_can_use_multiprocessing(http: Any, kind: str) -> None:
    assert http.infer("starts", x(), request_id=kind).as_numpy("y").tolist() == [[2, 4]]


@pytest.mark.parametrize(("kind", "value"), [("exit", [[3, 3]]), ("return", [[2, 4]])])
def test_a_forked_child_that_returns_from_execute_exits_without_answering(http: Any, kind: str, value: Any) -> None:
    answers = [http.infer("starts", x(), request_id=kind).as_numpy("y").tolist() for _ in range(2)]

    assert answers == [value, value]


def test_a_file_beside_the_model_does_not_shadow_the_standard_library(tmp_path: Path) -> None:
    code = NO_INPUT.replace("import os\n", "import os\nimport statistics\nfrom .statistics import LAST\n")
    code = code.replace("first = ", 'first = f"{statistics.mean([1, 3])} {LAST}"  # ')
    folder = write_model(tmp_path, "beside", code, NO_INPUT_CONFIG)
    (folder / "1" / "statistics.py").write_text("LAST = 'mine'\n")

    with live_server(tmp_path) as live, triton_http.InferenceServerClient(live.address) as client:
        assert client.infer("beside", []).as_numpy("y")[0] == b"2 mine"


def brain(kind: Any) -> list[Any]:
    tensor = kind.InferInput("x", [2], "BF16")
    tensor.set_data_from_numpy(np.array([1.5, -2], ml_dtypes.bfloat16))
    return [tensor]


def test_a_bf16_output_keeps_its_datatype_on_a_stream_and_in_a_call(live: Live, http: Any) -> None:
    came: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer("brain", brain(triton_grpc))
        result = came.get(timeout=GUARD_S)

    assert result.get_response().outputs[0].datatype == "BF16"
    assert result.as_numpy("y").tolist() == [1.5, -2]
    assert http.infer("brain_caller", brain(triton_http)).as_numpy("y").tolist() == [14]


@pytest.mark.parametrize("again", range(2))
def test_a_model_without_inputs_is_served_over_http(http: Any, again: int) -> None:
    assert http.infer("no_input", []).as_numpy("y")[0].decode() == str(Path(sys.executable).parent), again


def test_a_model_runs_in_its_packed_environment(tmp_path: Path) -> None:
    environment, store = tmp_path / "made", tmp_path / "kept"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    lonely = tmp_path / "lonely"  # numpy, and nothing else that happens to be installed beside it
    lonely.mkdir()
    for each in Path(np.__file__).parents[1].glob("numpy*"):
        (lonely / each.name).symlink_to(each)
    (packages / "numpy.pth").write_text(str(lonely))
    folder = write_model(tmp_path / "models", "packed", NO_INPUT, PACKED)
    with tarfile.open(folder / "env.tar.gz", "w:gz") as archive:
        archive.add(environment, ".")

    serving = live_server(tmp_path / "models", environments=str(store), offline=True)
    with serving as live, triton_http.InferenceServerClient(live.address) as client:
        found = Path(client.infer("packed", []).as_numpy("y")[0].decode())

    assert (found.name, found.parents[1]) == ("bin", store)
