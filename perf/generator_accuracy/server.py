"""The stub server for all parts: starting it, and the requests for it."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Iterator

from penstock.perf.calls import HOST, Call, encode_grpc_message
from penstock.perf.generator.orders import INFER, GrpcCall, Target
from penstock.perf.payloads.repeated import Repeated
from penstock.perf.server_process import Process, running_server
from penstock.server.protobuf import service_pb2

MODEL = "bare"
PATH = f"/v2/models/{MODEL}/infer"
PROTOCOLS = ("HTTP", "gRPC")
_TENSOR = {"name": "input", "datatype": "FP32", "shape": [1, 4]}
_BODY = json.dumps({"inputs": [{**_TENSOR, "data": [0.1, 0.2, 0.3, 0.4]}]}).encode()

CALL = Call(PATH, (_BODY,), {"Content-Type": "application/json"})


def message() -> bytes:
    """Return the ModelInferRequest with its five-byte prefix."""
    request = service_pb2().ModelInferRequest(model_name=MODEL)
    request.inputs.add(**_TENSOR)
    request.raw_input_contents.append(bytes(16))
    content: bytes = request.SerializeToString()
    return encode_grpc_message(content)


def payloads(protocol: str) -> Repeated:
    """Return what our generator sends."""
    if protocol == "gRPC":
        return Repeated((message(),))
    return Repeated((CALL.request(),))


def target(server: Process, protocol: str) -> Target:
    """Return where our generator sends it."""
    return Target(HOST, server.port, grpc=GrpcCall(INFER) if protocol == "gRPC" else None)


@contextlib.contextmanager
def running_stub_server(*flags: object) -> Iterator[Process]:
    """Run one with flags until the block ends. It has received no request yet, since a virtual queue counts them."""
    with running_server([sys.executable, "-m", "penstock.perf.stub_server", *map(str, flags)], _listens) as server:
        yield server


def _listens(server: Process) -> None:
    socket.create_connection((HOST, server.port), timeout=1).close()
