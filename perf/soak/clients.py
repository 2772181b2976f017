"""Callers: clients that each send one kind of request repeatedly, and check every answer. Used by `command.py`."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime

from penstock.perf import models
from penstock.perf.calls import HOST
from penstock.perf.generator.orders import INFER

from .request_log import BROKEN, FAILED, REFUSED, RIGHT, TIMED_OUT, WRONG, RequestLog

TIMEOUT_S = 10.0
RETRY_PAUSE_S = 0.02
"""A caller's pause after a failed request, so that it does not hammer a server that is down."""
REQUEST_PAUSE_S = 0.002
ROWS = 16

HOOKS = """
def pre_inference(sample, signature, metadata):
    return [value * 2 for value in sample["values"]]


def post_inference(prediction, signature, metadata):
    return {"id": "", "probabilities": [float(value) for value in prediction[0][0]]}
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 3 + 1)]))
        return answers
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


def write_repository(root: Path) -> None:
    """Write the models: iris, the same with hooks in two workers, and a Python model."""
    models.make(root, {"iris": models.iris, "hooked": models.iris})
    (root / "hooked" / "hooks.py").write_text(HOOKS, "utf-8")
    (root / "hooked" / "penstock.toml").write_text(
        '[hooks]\nfile = "hooks.py"\nworkers = 2\ntimeout_s = 1.0\n', "utf-8"
    )
    (root / "python" / "1").mkdir(parents=True)
    (root / "python" / "1" / "model.py").write_text(MODEL, "utf-8")
    (root / "python" / "config.pbtxt").write_text(CONFIG, "utf-8")
    (root / "python" / "penstock.toml").write_text("[worker]\ntimeout_s = 1.0\n", "utf-8")


class ExpectedAnswers:
    """The rows to send, and the correct result of each model."""

    def __init__(self, root: Path) -> None:
        rng = np.random.default_rng(7)
        self.rows = rng.random((ROWS, 1, 4), dtype=np.float32)
        session = onnxruntime.InferenceSession(root / "iris" / "1" / "model.onnx")
        self.iris = [session.run(None, {"input": row})[0] for row in self.rows]
        self.hooked = [session.run(None, {"input": row * 2})[0] for row in self.rows]
        self.python = [row * 3 + 1 for row in self.rows]


class RefusedError(Exception):
    """A 503 answer, or UNAVAILABLE."""


class FailedError(Exception):
    """An answer with another error."""


Send = Callable[[str, int], bool]
"""Send one request, with an id, with one of the rows. Returns: whether its answer, with that id, is right."""


class Client:
    """One thread, one connection, one kind of request. Invariant: every request that it begins ends in the ledger."""

    def __init__(self, kind: str, number: int, request_log: RequestLog, connect: Callable[[], Connection]) -> None:
        self._kind = kind
        self._name = f"{kind}-{number}"
        self._request_log = request_log
        self._connect = connect
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current request."""
        self._stopped.set()

    def join(self) -> None:
        """Wait until it has stopped."""
        self._thread.join(2 * TIMEOUT_S)

    def _run(self) -> None:
        connection = self._connect()
        for count in itertools.count():
            if self._stopped.is_set():
                break
            name = f"{self._name}-{count}"
            self._request_log.begin(name, self._kind, time.monotonic())
            end, text = _send_one(connection.send, name, count % ROWS)
            self._request_log.end(name, end, time.monotonic(), text)
            if end not in {RIGHT, WRONG, REFUSED, FAILED}:
                connection.close()
                connection = self._connect()
            self._stopped.wait(REQUEST_PAUSE_S if end == RIGHT else RETRY_PAUSE_S)
        connection.close()


def _send_one(send: Send, name: str, row: int) -> tuple[str, str]:
    try:
        return (RIGHT, "") if send(name, row) else (WRONG, "")
    except RefusedError as error:
        return REFUSED, str(error)
    except FailedError as error:
        return FAILED, str(error)
    except TimeoutError as error:
        return TIMED_OUT, str(error)
    except (OSError, http.client.HTTPException) as error:
        return BROKEN, repr(error)


class Connection:
    """One connection, and how it sends."""

    def __init__(self, send: Send, close: Callable[[], None]) -> None:
        self.send = send
        self.close = close


def http_connection(port: int, make_send: Callable[[http.client.HTTPConnection], Send]) -> Connection:
    """Make an HTTP connection, opened with the first request."""
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    return Connection(make_send(connection), connection.close)


def _post(connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str]) -> Any:
    connection.request("POST", path, body, dict(headers))
    answer = connection.getresponse()
    content = answer.read()
    if answer.status == http.client.SERVICE_UNAVAILABLE:
        raise RefusedError(content.decode())
    if answer.status != http.client.OK:
        raise FailedError(f"{answer.status} {content.decode('utf-8', 'replace')}")
    return answer.headers, content


def json_sender(model: str, names: tuple[str, str], rows: Any, expected: list[Any]) -> Callable[[Any], Send]:
    """Send JSON."""

    def make_send(connection: http.client.HTTPConnection) -> Send:
        def send(name: str, row: int) -> bool:
            tensor = {"name": names[0], "datatype": "FP32", "shape": [1, 4], "data": rows[row].ravel().tolist()}
            body = json.dumps({"id": name, "inputs": [tensor]}).encode()
            _, content = _post(connection, f"/v2/models/{model}/infer", body, {})
            answer = json.loads(content)
            output = answer["outputs"][0]
            return bool(answer["id"] == name and np.allclose(output["data"], expected[row].ravel(), atol=1e-5))

        return send

    return make_send


def binary_sender(rows: Any, expected: list[Any]) -> Callable[[Any], Send]:
    """Send binary tensors to iris, and receive them."""

    def make_send(connection: http.client.HTTPConnection) -> Send:
        def send(name: str, row: int) -> bool:
            tensor = {"name": "input", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
            head = {"id": name, "inputs": [tensor], "parameters": {"binary_data_output": True}}
            head_bytes = json.dumps(head).encode()
            length = {"Inference-Header-Content-Length": str(len(head_bytes))}
            headers, content = _post(connection, "/v2/models/iris/infer", head_bytes + rows[row].tobytes(), length)
            cut = int(headers["Inference-Header-Content-Length"])
            output = np.frombuffer(content[cut:], np.float32)
            return bool(
                json.loads(content[:cut])["id"] == name and np.allclose(output, expected[row].ravel(), atol=1e-5)
            )

        return send

    return make_send


def hooked_sender(rows: Any, expected: list[Any]) -> Callable[[Any], Send]:
    """Request a prediction through hooks."""

    def make_send(connection: http.client.HTTPConnection) -> Send:
        def send(name: str, row: int) -> bool:
            body = json.dumps({"values": rows[row].ravel().tolist()}).encode()
            _, content = _post(connection, "/v2/models/hooked/predict", body, {})
            return bool(np.allclose(json.loads(content)["probabilities"], expected[row].ravel(), atol=1e-5))

        return send

    return make_send


def grpc_connection(port: int, rows: Any, expected: list[Any]) -> Connection:
    """Make a channel, and call iris over it."""
    from tritonclient.grpc import service_pb2

    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200),
               ("grpc.initial_reconnect_backoff_ms", 50), ("grpc.enable_retries", 0)]  # fmt: skip
    channel = grpc.insecure_channel(f"{HOST}:{port}", options)
    infer = channel.unary_unary(
        INFER, service_pb2.ModelInferRequest.SerializeToString, service_pb2.ModelInferResponse.FromString
    )

    def send(name: str, row: int) -> bool:
        request = service_pb2.ModelInferRequest(model_name="iris", id=name)
        request.inputs.add(name="input", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(rows[row].tobytes())
        try:
            answer = infer(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            code, text = error.code(), str(error.details())
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError(text) from error
            # grpcio has one code for a server that rejects and for a broken connection
            raise (RefusedError if code == grpc.StatusCode.UNAVAILABLE else FailedError)(f"{code} {text}") from error
        output = np.frombuffer(answer.raw_output_contents[0], np.float32)
        return bool(answer.id == name and np.allclose(output, expected[row].ravel(), atol=1e-5))

    return Connection(send, channel.close)


def make_clients(
    http_port: int, grpc_port: int, answers: ExpectedAnswers, request_log: RequestLog, per_kind: int
) -> list[Client]:
    """Make the load: a number of callers of each kind."""
    rows, names = answers.rows, ("input", "output")
    kinds: dict[str, Callable[[], Connection]] = {
        "json": lambda: http_connection(http_port, json_sender("iris", names, rows, answers.iris)),
        "binary": lambda: http_connection(http_port, binary_sender(rows, answers.iris)),
        "grpc": lambda: grpc_connection(grpc_port, rows, answers.iris),
        "hooked": lambda: http_connection(http_port, hooked_sender(rows, answers.hooked)),
        "python": lambda: http_connection(http_port, json_sender("python", ("x", "y"), rows, answers.python)),
    }
    return [Client(kind, number, request_log, connect) for kind, connect in kinds.items() for number in range(per_kind)]


@contextlib.contextmanager
def running_clients(clients: list[Client]) -> Any:
    """Let them call for the duration of the block."""
    for caller in clients:
        caller.start()
    try:
        yield clients
    finally:
        for caller in clients:
            caller.stop()
        for caller in clients:
            caller.join()
