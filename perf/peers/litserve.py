"""LitServe: FastAPI in front of a worker process."""

from __future__ import annotations

from .peer import Peer
from .wires import own_json

_PROGRAM = """
import os

import litserve
import numpy as np
import onnxruntime


class Api(litserve.LitAPI):
    def setup(self, device):
        self.session = onnxruntime.InferenceSession(os.environ["MODEL_FILE"], providers=["CPUExecutionProvider"])

    def decode_request(self, request):
        return np.array(request["input"], np.float32)

    def batch(self, rows):
        return np.stack(rows)

    def predict(self, rows):
        return self.session.run(None, {"input": rows})[0]

    def unbatch(self, rows):
        return list(rows)

    def encode_response(self, row):
        return {"output": row.tolist()}


if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.0)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1, timeout=60)
    server.run(
        host="127.0.0.1", port=int(os.environ["HTTP_PORT"]), num_api_servers=1, log_level="warning",
        generate_client_file=False,
    )
"""

PEER = Peer(
    name="litserve",
    package="litserve",
    requirements=("litserve==0.2.19",),
    files={"server.py": _PROGRAM},
    command=("{python}", "server.py"),
    ready="/health",
    wires=(own_json("/predict", "input"),),
    configuration="1 API server, 1 worker, max_batch_size 32, batch_timeout 0 (its default: what is queued).",
)
