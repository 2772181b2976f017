"""The memory of a rejected request is freed at once, over any protocol, without the garbage collector.

The collector runs rarely in a server (`collect_and_freeze`), and a body may have many megabytes.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.server.grpc.connection import GrpcConnection
from tests.backends.onnx_models import FLOAT, INT64, floats, node
from tests.clients import models
from tests.cortex.projects import Project, post, write_iris
from tests.live import Live, live_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("live", "project", "no_collector")]

OURS = str(Path(__file__).parents[2])
AXES = ["N", "M"]
HOOKS = """
from penstock.backends.errors import Code, InferError

def pre_inference(sample, signature, metadata):
    if float(sample["x"][0]) == 1:
        raise InferError(Code.INVALID, "not this one")
    return sample

def post_inference(prediction, signature, metadata):
    raise ValueError("none at all")
"""
HANDLER = """
def pre_inference(sample, signature, metadata):
    return {signature[0].name: ["no number"]}
"""
SEVERAL = """
def post_inference(prediction, signature, metadata):
    raise ValueError("none at all")
    yield
"""
PYTHON = """
class TritonPythonModel:
    def execute(self, requests):
        raise ValueError("none at all")
"""
PYTHON_CONFIG = """
backend: "python"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root: Path = tmp_path_factory.mktemp("repository")
    sides: tuple[models.Tensors, models.Tensors] = {"x": (FLOAT, AXES)}, {"y": (FLOAT, AXES)}
    gather = [node("Gather", ["table", "i"], ["y"], axis=0)]
    models.write(root, "gather", gather, ({"i": (INT64, ["N", 1])}, {"y": (FLOAT, ["N", 1])}), {"table": floats([1])})
    decoupled = "model_transaction_policy { decoupled: true }\n"
    for name, hooks, config in (("hooked", HOOKS, ""), ("several", SEVERAL, decoupled), ("plain", "", "")):
        models.write(root, name, [node("Identity", ["x"], ["y"])], sides, config=config)
        if hooks:
            (root / name / "hooks.py").write_text(hooks)
            (root / name / "penstock.toml").write_text('[hooks]\nfile = "hooks.py"\n')
    (root / "python" / "1").mkdir(parents=True)
    (root / "python" / "1" / "model.py").write_text(PYTHON)
    (root / "python" / "config.pbtxt").write_text(PYTHON_CONFIG)
    with live_server(root) as server:
        yield server


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    new_project = Project(tmp_path_factory.mktemp("project") / "iris")
    write_iris(new_project.model("iris.onnx"), None)
    new_project.api("classifier", "models/iris.onnx", HANDLER)
    with live_server(new_project.folder, dialect="cortex") as server:
        yield server


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def leaked(live: Live) -> list[str]:
    """Names of the server's functions whose frames only the collector would free after a request."""
    live.call(turns())
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [
            each.f_code.co_name
            for each in gc.garbage
            if isinstance(each, types.FrameType) and "/tests/" not in each.f_code.co_filename
            and each.f_code.co_filename.startswith(OURS)
        ]  # fmt: skip
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def tensor(model: str) -> tuple[str, str, list[int], list[Any]]:
    if model == "gather":
        return "i", "INT64", [1, 1], [99]
    return "x", "FP32", [1] if model == "python" else [1, 1], [2.0]


REFUSED: dict[str, tuple[str, Any]] = {
    "a shape that is not the data's": ("plain", [7]),
    "a failed run": ("gather", None),
    "pre_inference": ("hooked", [1.0]),
    "post_inference": ("hooked", None),
    "a Python model": ("python", None),
}


@pytest.mark.parametrize("how", ["infer", "predict", "generate", "generate_stream"])
@pytest.mark.parametrize("by", REFUSED)
def test_a_rejected_http_request_is_freed_without_the_garbage_collector(live: Live, how: str, by: str) -> None:
    model, bad_values = REFUSED[by]
    name, datatype, shape, values = tensor(model)
    values = values if bad_values is None else ["a"] if bad_values == [7] else bad_values
    inputs: dict[str, Any] = {name: values}
    if how == "predict":
        inputs = {name: values[0] if by == "pre_inference" else values}
    elif how == "infer":
        inputs = {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": values}]}
    answer = httpx.post(f"{live.url}/v2/models/{model}/{how}", content=json.dumps(inputs))

    assert answer.status_code >= 400
    assert leaked(live) == []


def test_a_rejected_event_stream_request_is_freed_without_the_garbage_collector(live: Live) -> None:
    answer = httpx.post(f"{live.url}/v2/models/several/generate_stream", json={"x": [1.0]})

    assert "failed" in answer.text
    assert leaked(live) == []


def test_a_request_rejected_by_a_cortex_handler_is_freed_without_the_garbage_collector(project: Live) -> None:
    assert post(project.http_port, "/iris/classifier", {"a": 1}).status == 406
    assert leaked(project) == []


Ask = Callable[[Any, Any], str]


def unary(stub: Any, message: Any) -> str:
    try:
        stub.ModelInfer(message, timeout=20)
    except grpc.RpcError as error:
        return str(error.details())
    return ""


def streamed(stub: Any, message: Any) -> str:
    return str(next(iter(list(stub.ModelStreamInfer(iter([message]), timeout=20)))).error_message)


@pytest.mark.parametrize("ask", [unary, streamed])
@pytest.mark.parametrize("by", REFUSED)
def test_a_rejected_grpc_request_is_freed_without_the_garbage_collector(live: Live, ask: Ask, by: str) -> None:
    model, bad_values = REFUSED[by]
    name, datatype, shape, values = tensor(model)
    message = service_pb2.ModelInferRequest(model_name=model)
    infer_input = message.inputs.add(name=name, datatype=datatype, shape=[7] if bad_values == [7] else shape)
    values = bad_values if bad_values is not None else values
    (infer_input.contents.int64_contents if datatype == "INT64" else infer_input.contents.fp32_contents).extend(values)
    with grpc.insecure_channel(live.grpc_address) as channel:
        assert ask(service_pb2_grpc.GRPCInferenceServiceStub(channel), message)

    assert leaked(live) == []


def test_an_ended_grpc_connection_is_freed_without_the_garbage_collector(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.grpc_port)) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 40)
        while connection.recv(4096):
            pass
    live.call(turns())

    assert [each for each in gc.get_objects() if isinstance(each, GrpcConnection)] == []
