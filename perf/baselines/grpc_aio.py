"""grpc.aio with the same model. `python -m penstock.perf.baselines.grpc_aio MODEL PORT`.

What a Python server on Google's own library costs when it does the minimum: parse, run, answer.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnxruntime
import uvloop
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.perf.calls import HOST

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


class Service(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """One model with one FP32 input and one FP32 output, run on the event loop."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        self._output = self._session.get_outputs()[0].name

    async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802 - the service's name for it
        """Report that the server is ready."""
        return service_pb2.ServerReadyResponse(ready=True)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - likewise
        """Run one request."""
        tensor = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(tuple(request.inputs[0].shape))
        (result,) = self._session.run(None, {self._input: tensor})
        answer = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
        answer.outputs.add(name=self._output, datatype="FP32", shape=result.shape)
        answer.raw_output_contents.append(result.tobytes())
        return answer


async def serve(path: Path, port: int) -> None:
    """Serve until the process ends."""
    server = grpc.aio.server(options=UNLIMITED)
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Service(path), server)
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
