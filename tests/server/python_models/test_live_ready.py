"""Python models that define `is_ready`, as tested by qa/L0_backend_python/model_readiness."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from penstock.server.python_models import readiness
from tests.live import Live, live_server
from tests.server.python_models.repositories import ONE, write_model

pytestmark = pytest.mark.slow
SAYING = """
import asyncio
import threading
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.open = threading.Event()

    def execute(self, requests):
        self.open.set()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]

    {}
"""
SAYS = {
    "yes": "def is_ready(self): return True",
    "no": "def is_ready(self): return False",
    "word": "def is_ready(self): return 'ready'",
    "raises": "def is_ready(self): raise RuntimeError('not yet')",
    "leaves": "def is_ready(self): raise SystemExit",
    "awaits": "async def is_ready(self): return await asyncio.sleep(0, True)",
    "waits": "def is_ready(self): self.open.clear(); return self.open.wait(30)",
}
ASKER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request.inputs()[0].as_numpy()) for request in requests]

    def one(self, x):
        x = x * 0 + [pb_utils.is_model_ready("yes"), pb_utils.is_model_ready("no")]
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x.astype("float32"))])
"""
Ready = Callable[[str], bool]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    for name, statement in SAYS.items():
        write_model(root, name, SAYING.format(statement), ONE)
    write_model(root, "pair", SAYING.format(SAYS["no"]), ONE + "instance_group [ { count: 2 kind: KIND_CPU } ]")
    write_model(root, "asker", ASKER, ONE)
    with live_server(root) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def ready(request: pytest.FixtureRequest, live: Live) -> Iterator[Ready]:
    module = triton_http if request.param == "http" else triton_grpc
    address = live.address if request.param == "http" else live.grpc_address
    with module.InferenceServerClient(address) as client:
        yield client.is_model_ready


def infer(live: Live, model: str) -> list[float]:
    tensor = triton_http.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 2), np.float32))
    with triton_http.InferenceServerClient(live.address) as client:
        found: list[float] = client.infer(model, [tensor]).as_numpy("y")[0].tolist()
    return found


@pytest.mark.parametrize(
    ("model", "says"),
    [("yes", True), ("awaits", True), ("no", False), ("word", False), ("raises", False), ("leaves", False),
     ("pair", False), ("asker", True)],
)  # fmt: skip
def test_readiness_follows_the_is_ready_method(ready: Ready, live: Live, model: str, says: bool) -> None:
    assert [ready(model) for _ in range(3)] == [says] * 3
    assert live.call(_server_ready(live))  # not affected by the model
    if model != "asker":
        assert infer(live, model) == [1, 1]  # nor are requests


async def _server_ready(live: Live) -> bool:
    return live.server.health.ready()


def test_is_ready_beyond_its_time_limit_means_not_ready(
    ready: Ready, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "ANSWER_LIMIT_S", 0.0)

    assert not ready("waits")
    assert infer(live, "waits") == [1, 1]


def test_a_model_can_query_the_readiness_of_another_model(live: Live) -> None:
    assert infer(live, "asker") == [1, 0]
