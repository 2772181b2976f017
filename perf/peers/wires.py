"""Wires: how a peer is called with one row, and how its answer is parsed. Wires of the same `kind` are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import orjson

from penstock.perf.calls import encode_grpc_message, encode_post
from penstock.perf.generator.orders import INFER, GrpcCall
from penstock.server.protobuf import service_pb2

Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
JSON, BINARY, GRPC = "json", "binary", "grpc"
KINDS = (JSON, BINARY, GRPC)
_V2_PATH = "/v2/models/{model}/infer"
_HEAD_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One request: over HTTP its path, headers and body; over gRPC only the message."""

    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Wire:
    """A way to call a server. `says`: its name in the table.

    `ask` is passed a model's name and a row with a leading dimension of one. `read` is passed an answer's headers, in
    lower case, and its body, and returns the numbers in order; it may raise anything, since an answer may be anything.
    """

    kind: str
    says: str
    ask: Callable[[str, Array], WireRequest]
    read: Callable[[Mapping[str, str], bytes], Array]

    @property
    def call(self) -> GrpcCall | None:
        return GrpcCall(INFER) if self.kind == GRPC else None

    def payload(self, model: str, row: Array) -> bytes:
        """Encode what the generator sends: a whole HTTP request, or a message with its five-byte prefix."""
        request = self.ask(model, row)
        if self.kind == GRPC:
            return encode_grpc_message(request.body)
        return encode_post(request.path, request.headers, request.body)


def _v2_json(model: str, row: Array) -> WireRequest:
    tensor = {"name": "input", "shape": row.shape, "datatype": "FP32", "data": row.ravel()}
    body = orjson.dumps({"inputs": [tensor]}, option=orjson.OPT_SERIALIZE_NUMPY)
    return WireRequest(_V2_PATH.format(model=model), {"Content-Type": "application/json"}, body)


def _of_v2_json(headers: Mapping[str, str], body: bytes) -> Array:
    return np.asarray(orjson.loads(body)["outputs"][0]["data"], np.float32).ravel()


def _v2_binary(model: str, row: Array) -> WireRequest:
    size = {"binary_data_size": row.nbytes}
    tensor = {"name": "input", "shape": row.shape, "datatype": "FP32", "parameters": size}
    head = orjson.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}})
    headers = {"Content-Type": "application/octet-stream", _HEAD_LENGTH: str(len(head))}
    return WireRequest(_V2_PATH.format(model=model), headers, head + row.tobytes())


def _of_v2_binary(headers: Mapping[str, str], body: bytes) -> Array:
    return np.frombuffer(body[int(headers[_HEAD_LENGTH.lower()]) :], np.float32)


def _v2_grpc(model: str, row: Array) -> WireRequest:
    message = service_pb2().ModelInferRequest(model_name=model)
    message.inputs.add(name="input", datatype="FP32", shape=row.shape)
    message.raw_input_contents.append(row.tobytes())
    return WireRequest(INFER, {}, message.SerializeToString())


def _of_v2_grpc(headers: Mapping[str, str], body: bytes) -> Array:
    message = service_pb2().ModelInferResponse.FromString(body)
    if message.raw_output_contents:
        return np.frombuffer(message.raw_output_contents[0], np.float32)
    return np.array(message.outputs[0].contents.fp32_contents, np.float32)


V2_JSON = Wire(JSON, "v2 JSON", _v2_json, _of_v2_json)
V2_BINARY = Wire(BINARY, "v2 binary", _v2_binary, _of_v2_binary)
V2_GRPC = Wire(GRPC, "v2 gRPC", _v2_grpc, _of_v2_grpc)


def own_json(path: str, key: str, *, batched: bool = False) -> Wire:
    """Make the wire of a server with its own JSON format: the numbers of a row, nested, under `key`.

    `batched`: with the leading dimension of one. The answer is the row's, or an object with only it.
    """

    def ask(model: str, row: Array) -> WireRequest:
        body = orjson.dumps({key: row if batched else row[0]}, option=orjson.OPT_SERIALIZE_NUMPY)
        return WireRequest(path, {"Content-Type": "application/json"}, body)

    def read(headers: Mapping[str, str], body: bytes) -> Array:
        document = orjson.loads(body)
        return np.asarray(next(iter(document.values())) if isinstance(document, dict) else document, np.float32).ravel()

    return Wire(JSON, "own JSON", ask, read)


def raw_bytes(path: str) -> Wire:
    """Make the wire of a server that takes and returns the raw bytes of a row."""

    def ask(model: str, row: Array) -> WireRequest:
        return WireRequest(path, {"Content-Type": "application/octet-stream"}, row.tobytes())

    return Wire(BINARY, "raw bytes", ask, lambda headers, body: np.frombuffer(body, np.float32))
