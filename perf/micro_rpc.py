"""CPU time of a gRPC inference by stage, without sockets: `python -m penstock.perf.micro_rpc [MODEL.onnx]`."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from penstock.backends.loading import LOADERS
from penstock.batching.engine import Engine
from penstock.batching.spec import BatchPolicy, ModelSpec
from penstock.server.hooks.runner import Hooks
from penstock.server.protobuf import service_pb2
from penstock.server.v2.rpc.encode import RpcEncoder, encode_id_and_mark
from penstock.server.v2.rpc.inference import RpcInference

from .micro import fastest_us, print_cost


def message(name: str, request_id: str = "") -> bytes:
    """Make a ModelInferRequest with one row of 4 numbers."""
    request: Any = service_pb2().ModelInferRequest(model_name="iris", id=request_id)
    request.inputs.add(name=name, datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(np.zeros(4, np.float32).tobytes())
    return bytes(request.SerializeToString())


async def main(path: Path) -> None:
    """Print the table."""
    engine = Engine(asyncio.get_running_loop(), LOADERS)
    model = await engine.load(ModelSpec("iris", 1, path, policy=BatchPolicy(executor="loop")))
    inference = RpcInference(engine, lambda model: Hooks(engine, model))
    encoder = RpcEncoder(model.name, model.version, model.signature)
    output = [np.array([[0.1, 0.2, 0.7]], np.float32)]
    for label, request_id in (("", ""), (", with an id", "1234")):
        sent = message(model.signature.inputs[0].name, request_id)
        decode = partial(inference.decode, sent, sink=None)  # type: ignore[arg-type]
        decode()
        print_cost(f"decode a message{label}", fastest_us(decode))
        print_cost(f"decode a message{label}, remembered", fastest_us(partial(inference.find, sent, sink=None)))  # type: ignore[arg-type]
        answer = partial(
            lambda request_id: encoder.encode_plain((0,), output, encode_id_and_mark(request_id)), request_id
        )
        print_cost(f"encode an answer{label}", fastest_us(answer))
    await engine.stop(1.0)


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "perf/.models/iris/1/model.onnx")))
