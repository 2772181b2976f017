"""Ray Serve: a proxy and a replica on a single-machine cluster."""

from __future__ import annotations

from .peer import Peer
from .wires import own_json

_PROGRAM = """
import os
import signal

import numpy as np
import onnxruntime
import ray
from ray import serve


@serve.deployment(num_replicas=1, max_ongoing_requests=256)
class Model:
    def __init__(self, file):
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0)
    async def rows(self, rows):
        return list(self.session.run(None, {"input": np.stack(rows)})[0])

    async def __call__(self, request):
        row = np.array((await request.json())["input"], np.float32)
        return {"output": (await self.rows(row)).tolist()}


if __name__ == "__main__":
    ray.init(include_dashboard=False, log_to_driver=False, _temp_dir=os.environ["TMPDIR"])
    serve.start(http_options={"host": "127.0.0.1", "port": int(os.environ["HTTP_PORT"])}, logging_config={
        "enable_access_log": False,
    })
    serve.run(Model.bind(os.environ["MODEL_FILE"]), route_prefix="/predict")
    signal.pause()
"""

PEER = Peer(
    name="ray-serve",
    package="ray",
    requirements=("ray[serve]==2.60.0",),
    files={"server.py": _PROGRAM},
    command=("{python}", "server.py"),
    environ={"RAY_USAGE_STATS_ENABLED": "0"},
    ready="/-/healthz",
    wires=(own_json("/predict", "input"),),
    configuration="1 replica, 1 HTTP proxy, max_batch_size 32, batch_wait_timeout_s 0, dashboard and access log off.",
)
