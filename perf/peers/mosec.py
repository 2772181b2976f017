"""Mosec: a Rust front end and a Python worker."""

from __future__ import annotations

from .peer import Peer
from .wires import own_json, raw_bytes

_PROGRAM = '''
import math
import os

import numpy as np
import onnxruntime
from mosec import Server, Worker


class Model(Worker):
    """One worker for both wires: a body as long as a row's bytes is them, any other is JSON."""

    def __init__(self):
        super().__init__()
        self.session = onnxruntime.InferenceSession(os.environ["MODEL_FILE"], providers=["CPUExecutionProvider"])
        self.shape = self.session.get_inputs()[0].shape[1:]
        self.nbytes = 4 * math.prod(self.shape)

    def deserialize(self, body):
        if len(body) == self.nbytes:
            return True, np.frombuffer(body, np.float32).reshape(self.shape)
        return False, np.array(super().deserialize(body)["input"], np.float32)

    def forward(self, requests):
        rows = self.session.run(None, {"input": np.stack([row for _, row in requests])})[0]
        return [(raw, row) for (raw, _), row in zip(requests, rows)]

    def serialize(self, answer):
        raw, row = answer
        return row.tobytes() if raw else super().serialize({"output": row.tolist()})


if __name__ == "__main__":
    server = Server()
    server.append_worker(Model, num=1, max_batch_size=32, max_wait_time=1)
    server.run()
'''

PEER = Peer(
    name="mosec",
    package="mosec",
    requirements=("mosec==0.9.8", "numpy==2.4.6"),
    files={"server.py": _PROGRAM},
    command=(
        "{python}", "server.py", "--address", "127.0.0.1", "--port", "{http}",
        "--timeout", "60000", "--log-level", "warning",
    ),
    ready="/",
    wires=(own_json("/inference", "input"), raw_bytes("/inference")),
    configuration="1 worker, max_batch_size 32, max_wait_time 1 ms (the least it takes); JSON is its default codec.",
)  # fmt: skip
