"""KServe: the Python model server of its SDK."""

from __future__ import annotations

from .peer import Peer
from .wires import V2_BINARY, V2_GRPC, V2_JSON

_PROGRAM = """
import os

import onnxruntime
from kserve import Model, ModelServer
from kserve.utils.utils import get_predict_response


class Onnx(Model):
    def load(self):
        self.session = onnxruntime.InferenceSession(os.environ["MODEL_FILE"], providers=["CPUExecutionProvider"])
        self.ready = True
        return True

    def predict(self, payload, headers=None):
        rows = self.session.run(None, {"input": payload.inputs[0].as_numpy()})[0]
        return get_predict_response(payload, rows, self.name)


if __name__ == "__main__":
    model = Onnx(os.environ["MODEL_NAME"])
    model.load()
    ModelServer().start([model])
"""

PEER = Peer(
    name="kserve",
    package="kserve",
    requirements=("kserve==0.21.0",),
    files={"server.py": _PROGRAM},
    command=(
        "{python}", "server.py", "--http_port", "{http}", "--grpc_port", "{grpc}",
        "--workers", "1", "--enable_latency_logging", "false", "--configure_logging", "false",
    ),
    ready="/v2/models/{model}/ready",
    wires=(V2_JSON, V2_BINARY, V2_GRPC),
    configuration="1 worker, request logs off. No batching: its Python server has none (its batcher is a sidecar).",
)  # fmt: skip
