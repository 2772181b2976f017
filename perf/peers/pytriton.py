"""PyTriton: NVIDIA's Triton with its Python backend, around a function."""

from __future__ import annotations

from .peer import Peer
from .wires import V2_BINARY, V2_GRPC, V2_JSON

_PROGRAM = """
import os
import sysconfig

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

os.environ["LD_LIBRARY_PATH"] = sysconfig.get_config_var("LIBDIR")  # its stub is linked to libpython
session = onnxruntime.InferenceSession(os.environ["MODEL_FILE"], providers=["CPUExecutionProvider"])
taken, given = session.get_inputs()[0], session.get_outputs()[0]


@batch
def infer(input):
    return session.run(None, {"input": input})


config = TritonConfig(
    http_address="127.0.0.1", http_port=int(os.environ["HTTP_PORT"]),
    grpc_address="127.0.0.1", grpc_port=int(os.environ["GRPC_PORT"]),
    allow_metrics=False,
)
with Triton(config=config) as triton:
    triton.bind(
        model_name=os.environ["MODEL_NAME"],
        infer_func=infer,
        inputs=[Tensor(name="input", dtype=np.float32, shape=tuple(taken.shape[1:]))],
        outputs=[Tensor(name="output", dtype=np.float32, shape=tuple(given.shape[1:]))],
        config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(max_queue_delay_microseconds=0)),
    )
    triton.serve()
"""

PEER = Peer(
    name="pytriton",
    package="nvidia-pytriton",
    requirements=("nvidia-pytriton==0.7.0",),
    files={"server.py": _PROGRAM},
    command=("{python}", "server.py"),
    ready="/v2/models/{model}/ready",
    wires=(V2_JSON, V2_BINARY, V2_GRPC),
    configuration="@batch, max_batch_size 64, dynamic batching without delay, metrics off.",
)
