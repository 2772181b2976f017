"""MLServer: Seldon's v2 server in Python."""

from __future__ import annotations

from .peer import Peer
from .wires import V2_GRPC, V2_JSON

_PROGRAM = """
import os

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse


class Onnx(MLModel):
    async def load(self):
        self.session = onnxruntime.InferenceSession(os.environ["MODEL_FILE"], providers=["CPUExecutionProvider"])
        return True

    async def predict(self, payload):
        rows = self.session.run(None, {"input": NumpyCodec.decode_input(payload.inputs[0])})[0]
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("output", rows)])
"""

PEER = Peer(
    name="mlserver",
    package="mlserver",
    requirements=("mlserver==1.7.1",),
    files={"model.py": _PROGRAM, "settings.json": '{"metrics_endpoint": null}'},
    command=("{bin}/mlserver", "start", "."),
    environ={
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": "{http}",
        "MLSERVER_GRPC_PORT": "{grpc}",
        "MLSERVER_PARALLEL_WORKERS": "0",
        "MLSERVER_DEBUG": "false",
        "MLSERVER_MODEL_NAME": "{model}",
        "MLSERVER_MODEL_IMPLEMENTATION": "model.Onnx",
        "MLSERVER_MODEL_MAX_BATCH_SIZE": "32",
        "MLSERVER_MODEL_MAX_BATCH_TIME": "0.005",
    },
    ready="/v2/models/{model}/ready",
    wires=(V2_JSON, V2_GRPC),
    configuration="parallel_workers 0 (the model in the server's process), max_batch_size 32, max_batch_time 5 ms "
    "(with 1 ms one at once is answered sooner, and 32 at once cost more), metrics off. It has "
    "no binary tensors over HTTP.",
)
