"""BentoML: a service with a batchable method."""

from __future__ import annotations

from .peer import Peer
from .wires import own_json

_PROGRAM = """
import os
from typing import Annotated

import bentoml
import numpy as np
import onnxruntime
from bentoml.validators import DType


@bentoml.service(workers=1, traffic={"timeout": 60}, metrics={"enabled": False}, logging={"access": {"enabled": False}})
class Model:
    def __init__(self):
        self.session = onnxruntime.InferenceSession(os.environ["MODEL_FILE"], providers=["CPUExecutionProvider"])

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=1000)
    def predict(self, x: Annotated[np.ndarray, DType("float32")]) -> np.ndarray:
        return self.session.run(None, {"input": x})[0]
"""

PEER = Peer(
    name="bentoml",
    package="bentoml",
    requirements=("bentoml==1.4.39",),  # 1.4.40 requires a certifi version that does not exist
    files={"service.py": _PROGRAM},
    command=("{bin}/bentoml", "serve", "service:Model", "--host", "127.0.0.1", "--port", "{http}"),
    environ={"BENTOML_HOME": "bentoml", "BENTOML_DO_NOT_TRACK": "True"},
    ready="/readyz",
    wires=(own_json("/predict", "x", batched=True),),
    fresh=True,  # after 32 concurrent requests it delays a single one to wait for more, for minutes
    configuration="1 worker, batchable, max_batch_size 32, max_latency_ms 1000 (it batches what is queued and learns), "
    "metrics and access log off. Restarted for each turn, lightest load first.",
)
