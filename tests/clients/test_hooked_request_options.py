"""Priority, deadline and sequence of a request reach its model through hooks, over every endpoint."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as rpc
from tritonclient import http

from tests.clients import models
from tests.clients.gated_onnxruntime import Gated, waiting
from tests.clients.sequence_models import CONTROLS, STATE, config, write_accumulator
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0
LEVELS = "max_batch_size: 1 dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
HOOKED = '[hooks]\nfile = "answers.py"\n'
THREAD = '[batching]\nexecutor = "thread"\n'
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
PASSES = "def post_inference(prediction, metadata):\n    return prediction\n"
YIELDS = "def post_inference(prediction, metadata):\n    yield prediction\n    yield prediction\n"


def hook(root: Path, name: str, source: str, more: str = "") -> None:
    (root / name / "answers.py").write_text(source)
    (root / name / "penstock.toml").write_text(HOOKED + more)


class TestPriority:
    @pytest.fixture
    def gated(self) -> Gated:
        return Gated()

    @pytest.fixture
    def live(self, tmp_path: Path, gated: Gated) -> Iterator[Live]:
        models.write_identity(tmp_path, "m", LEVELS)
        hook(tmp_path, "m", PASSES, THREAD)
        with live_server(tmp_path, loaders=gated.loaders) as live:
            yield live
            gated.gate.open()

    def test_the_highest_priority_runs_first_over_every_endpoint(self, live: Live, gated: Gated) -> None:
        with ThreadPoolExecutor(8) as pool:

            def ask(way: Callable[[Live, float, int], None], value: float, priority: int) -> Future[None]:
                return pool.submit(way, live, value, priority)

            gated.gate.close()
            calls = [ask(over_http, 0, 0)]
            live.call(gated.gate.entered())
            priorities = ((over_http, 3), (over_grpc, 2), (over_generate, 1), (over_stream, 1))
            for count, (way, priority) in enumerate(priorities, 1):
                calls.append(ask(way, count, priority))
                live.call(waiting(live, count))
            gated.gate.open()
            for each in calls:
                each.result(PATIENCE_S)

        assert gated.runs[-5:] == [[0], [3], [4], [2], [1]]


def over_http(live: Live, value: float, priority: int) -> None:
    with http.InferenceServerClient(live.address) as client:
        client.infer("m", [input_of(http, value)], priority=priority)


def over_grpc(live: Live, value: float, priority: int) -> None:
    with rpc.InferenceServerClient(live.grpc_address) as client:
        client.infer("m", [input_of(rpc, value)], priority=priority)


def over_generate(live: Live, value: float, priority: int) -> None:
    body = {"x": [value], "priority": priority}
    assert httpx.post(f"{live.url}/v2/models/m/generate", json=body, timeout=PATIENCE_S).status_code == 200


def over_stream(live: Live, value: float, priority: int) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    with rpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("m", [input_of(rpc, value)], priority=priority)
        assert answers.get(timeout=PATIENCE_S) is None


def input_of(module: Any, value: float) -> Any:
    return module.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.full((1, 1), value, np.float32))


@pytest.fixture(scope="module")
def accumulators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    for name, source, more in (("one", PASSES, ""), ("several", YIELDS, DECOUPLED)):
        write_accumulator(root, name, config(4, "direct {}" + CONTROLS + STATE % "", more))
        hook(root, name, source)
    with live_server(root) as live:
        yield live


class TestSequences:
    VALUES = (1.0, 2.0, 4.0)
    SUMS = (1.0, 3.0, 7.0)

    @pytest.mark.parametrize("module", [http, rpc])
    def test_each_request_uses_the_state_of_its_own_sequence(self, accumulators: Live, module: Any) -> None:
        address = accumulators.address if module is http else accumulators.grpc_address
        with module.InferenceServerClient(address) as client:
            for at, (value, expected) in enumerate(zip(self.VALUES, self.SUMS, strict=True)):
                for identity in (7, 8):
                    answer = client.infer(
                        "one", [input_of(module, value * identity)], sequence_id=identity,
                        sequence_start=not at, sequence_end=at == 2,
                    )  # fmt: skip
                    assert answer.as_numpy("y").tolist() == [[expected * identity]]

    def test_sequence_state_is_kept_over_a_stream_with_several_answers_per_request(self, accumulators: Live) -> None:
        answers: queue.Queue[Any] = queue.Queue()
        found: dict[str, list[float]] = {"0": [], "1": [], "2": []}
        with rpc.InferenceServerClient(accumulators.grpc_address) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for at, value in enumerate(self.VALUES):
                client.async_stream_infer(
                    "several", [input_of(rpc, value)], request_id=f"{at}", sequence_id=7,
                    sequence_start=not at, sequence_end=at == 2,
                )  # fmt: skip
            for _ in range(6):
                result, error = answers.get(timeout=PATIENCE_S)
                assert error is None
                found[result.get_response().id].append(float(result.as_numpy("y").item()))

        assert found == {f"{at}": [expected] * 2 for at, expected in enumerate(self.SUMS)}

    def test_sequence_state_is_kept_over_generate_stream(self, accumulators: Live) -> None:
        with httpx.Client(base_url=f"{accumulators.url}/v2/models/several/") as client:
            for at, (value, expected) in enumerate(zip(self.VALUES, self.SUMS, strict=True)):
                body = {"x": [value], "sequence_id": 9, "sequence_start": not at, "sequence_end": at == 2}
                text = client.post("generate_stream", json=body).text
                assert text.count(f'"y":{expected}') == 2, text
