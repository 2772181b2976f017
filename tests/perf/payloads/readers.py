"""Requests read back as the server reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools

from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.perf.payloads.tensors import InputTensor, Step
from penstock.perf.profiling.model import ModelDescription
from penstock.server.protobuf import service_pb2
from penstock.server.v2 import tensors as wire
from penstock.server.v2.call_parameters import Options
from penstock.server.v2.decode import decode
from penstock.server.v2.rpc import decode as rpc
from tests.fakes import FakeBackend, NoSink
from tests.perf.payloads.strategies import signature_of


@dataclass
class Http:
    """A request's head and body, as the parser of the server's fast lane tells them."""

    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete_count: int = 0

    def on_url(self, url: bytes) -> None:
        self.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        assert name.decode().lower() not in self.headers
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.complete_count += 1

    @property
    def json_bytes(self) -> int:
        return int(self.headers.get("inference-header-content-length", -1))


def http(request: bytes) -> Http:
    """Parse bytes that have to be one request, neither more nor less."""
    parsed = Http()
    parser = httptools.HttpRequestParser(parsed)
    parser.feed_data(request)
    assert (parsed.complete_count, parser.get_method()) == (1, b"POST")
    return parsed


def served(model: ModelDescription) -> Model:
    """Give the model as a server has it."""
    signature = signature_of(model)
    spec = ModelSpec("m", 1, Path("model"), signature=signature, policy=BatchPolicy(max_batch_rows=64))
    return Model(spec, [FakeBackend(signature, list)], lambda *_: None)


def over_http(model: ModelDescription, request: bytes) -> tuple[InferRequest, Options]:
    """Decode a request as the server does."""
    parsed = http(request)
    return decode(served(model), parsed.body, parsed.json_bytes, 100, NoSink())


def message(request: bytes) -> Any:
    """Parse what stands behind the five bytes, which have to tell its length."""
    assert request[0] == 0
    assert int.from_bytes(request[1:5], "big") == len(request) - 5
    return service_pb2().ModelInferRequest.FromString(request[5:])


def over_grpc(model: ModelDescription, request: bytes) -> tuple[InferRequest, Options]:
    """Decode a request as the server does."""
    return rpc.decode(served(model), message(request), NoSink(), None)


def sent_again(model: ModelDescription, request: InferRequest) -> Step:
    """Write a decoded request's inputs as they would be sent."""
    return tuple(
        InputTensor(tensor.name, tensor.datatype, array.shape, bytes(wire.to_binary(tensor.datatype, array)))
        for tensor, array in zip(model.inputs, request.inputs, strict=True)
        if array is not None
    )
