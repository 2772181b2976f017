"""Ensembles with decoupled steps, as NVIDIA's qa/L0_decoupled has them, over every transport."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from tests.backends.onnx_models import node
from tests.clients import models
from tests.clients.ensembles import Pairs, step, write_ensemble
from tests.live import Live, live_server
from tests.server.fronts.live_fronts import live_front
from tests.server.python_models.inside_stage import MODELS

pytestmark = pytest.mark.slow

INT32 = TensorProto.INT32
REPEATED = step("repeat", [("IN", "IN")], [("OUT", "repeat_out")])
SQUARED: Pairs = [("IN", "repeat_out")]
ENSEMBLES = {
    "simple_repeat": [step("repeat", [("IN", "IN")], [("OUT", "OUT")])],
    "sequence_repeat": [REPEATED, step("identity", [("x", "repeat_out")], [("y", "OUT")])],
    "fan_repeat": [
        REPEATED,
        step("identity", [("x", "repeat_out")], [("y", "identity_out")]),
        step("difference", [("a", "repeat_out"), ("b", "identity_out")], [("y", "OUT")]),
    ],
    "repeat_square": [REPEATED, step("square", SQUARED, [("OUT", "OUT")])],
    "nested_square": [
        step("simple_repeat", [("IN", "IN")], [("OUT", "repeat_out")]),
        step("square", SQUARED, [("OUT", "OUT")]),
    ],
    "picky_repeat": [REPEATED, step("picky", [("x", "repeat_out")], [("y", "OUT")])],
}
NO_STREAM = "doesn't support models with decoupled transaction policy"


def config(steps: Sequence[str], more: str = "") -> str:
    tensors = [f'{side} {{ name: "{name}" data_type: TYPE_INT32 dims: [ {dims} ] }}'
               for side, name, dims in (("input", "IN", -1), ("output", "OUT", 1))]  # fmt: skip
    return "\n".join(['platform: "ensemble"', *tensors, f"ensemble_scheduling {{ step [ {', '.join(steps)} ] }}", more])


def write_all(root: Path) -> None:
    for name in ("repeat", "square"):
        shutil.copytree(MODELS / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    one = INT32, [1]
    unbatched = "max_batch_size: 0"
    models.write(root, "identity", [node("Identity", ["x"], ["y"])], ({"x": one}, {"y": one}), config=unbatched)
    models.write(root, "difference", [node("Sub", ["a", "b"], ["y"])], ({"a": one, "b": one}, {"y": one}),
                 config=unbatched)  # fmt: skip
    models.write(root, "picky", [node("Gather", ["table", "x"], ["y"])], ({"x": one}, {"y": one}),
                 {"table": np.array([7, 8, 9], np.int32)}, config=unbatched)  # fmt: skip
    for name, steps in ENSEMBLES.items():
        write_ensemble(root, name, config(steps))


@pytest.fixture(scope="module", params=[live_server, live_front], ids=["alone", "behind a front end"])
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    write_all(root)
    serve: Callable[..., AbstractContextManager[Live]] = request.param
    with serve(root) as served:
        yield served


class Streamed:
    """The answers of requests sent on one stream, by the request's id."""

    def __init__(self, live: Live) -> None:
        self._came: queue.Queue[Any] = queue.Queue()
        self._client = triton.InferenceServerClient(live.grpc_address)
        self.values: dict[str, list[int]] = {}
        self.finals: list[str] = []

    def __enter__(self) -> Self:
        self._client.start_stream(lambda result, error: self._came.put(error or result))
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, model: str, values: Sequence[int], request_id: str = "0") -> None:
        tensor = triton.InferInput("IN", [len(values)], "INT32")
        tensor.set_data_from_numpy(np.array(values, np.int32))
        self._client.async_stream_infer(model, [tensor], request_id=request_id, enable_empty_final_response=True)

    def take(self, ends: int) -> dict[str, list[int]]:
        """Wait until this many requests have ended."""
        while len(self.finals) < ends:
            answer = self._came.get(timeout=30)
            if isinstance(answer, InferenceServerException):
                raise answer
            response = answer.get_response()
            if response.outputs:
                self.values.setdefault(response.id, []).append(int(answer.as_numpy("OUT")[0]))
            if response.parameters["triton_final_response"].bool_param:
                self.finals.append(response.id)
        return self.values


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize("model", ["repeat", "simple_repeat", "sequence_repeat"])
def test_each_answer_of_a_decoupled_step_is_an_answer_of_the_ensemble(
    live: Live, model: str, requests: int, count: int
) -> None:
    values = list(range(100, 100 + count))
    with Streamed(live) as client:
        for number in range(requests):
            client.ask(model, values, str(number))
        came = client.take(requests)

    assert came == ({str(number): values for number in range(requests)} if values else {})


def test_a_step_joins_tensors_derived_from_the_same_decoupled_answer(live: Live) -> None:
    with Streamed(live) as client:
        client.ask("fan_repeat", range(100, 150))

        assert client.take(1) == {"0": [0] * 50}


@pytest.mark.parametrize("model", ["repeat_square", "nested_square"])
def test_all_answers_of_nested_decoupled_steps_are_returned(live: Live, model: str) -> None:
    with Streamed(live) as client:
        client.ask(model, [4, 2, 0, 1])
        client.ask(model, [], "none")
        came = client.take(2)

    assert sorted(came["0"]) == [1, 2, 2, 4, 4, 4, 4]
    assert "none" not in came


def test_an_answer_rejected_by_a_later_step_ends_the_request_after_the_answers_before_it(live: Live) -> None:
    with Streamed(live) as client:
        client.ask("picky_repeat", [0, 2, 1])
        assert client.take(1) == {"0": [7, 9, 8]}
        client.ask("picky_repeat", [3])

        with pytest.raises(InferenceServerException, match="in ensemble 'picky_repeat', "):
            client.take(2)


@pytest.mark.parametrize("library", [triton, triton_http], ids=["grpc", "http"])
def test_a_decoupled_ensemble_is_rejected_outside_a_stream(live: Live, library: Any) -> None:
    tensor = library.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([1], np.int32))
    address = live.grpc_address if library is triton else live.address
    with (
        library.InferenceServerClient(address) as client,
        pytest.raises(InferenceServerException, match=NO_STREAM),
    ):
        client.infer("sequence_repeat", [tensor])


def test_generate_returns_a_single_answer_and_generate_stream_returns_all(live: Live) -> None:
    url = f"{live.url}/v2/models/sequence_repeat"
    one = httpx.post(f"{url}/generate", json={"IN": [7]}, timeout=20)
    two = httpx.post(f"{url}/generate", json={"IN": [7, 8]}, timeout=20)
    streamed = httpx.post(f"{url}/generate_stream", json={"IN": [7, 8]}, timeout=20)

    assert one.json()["OUT"] == 7
    assert two.status_code == 500
    assert "expects model to produce exactly 1 response" in two.json()["error"]
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.text.split("\n\n") if line]
    assert [each["OUT"] for each in events] == [7, 8]


def test_the_configuration_of_an_ensemble_with_decoupled_steps_reports_the_decoupled_policy(live: Live) -> None:
    with triton.InferenceServerClient(live.grpc_address) as client:
        configs = {
            name: client.get_model_config(name, as_json=True)["config"] for name in ("nested_square", "identity")
        }

    assert configs["nested_square"]["model_transaction_policy"] == {"decoupled": True}
    assert "model_transaction_policy" not in configs["identity"]


def test_each_answer_counts_at_the_steps_and_one_request_at_the_ensemble(live: Live) -> None:
    with triton.InferenceServerClient(live.grpc_address) as client:
        before = [counted(client, name) for name in ("sequence_repeat", "repeat", "identity")]
        with Streamed(live) as streamed:
            streamed.ask("sequence_repeat", [1, 2, 3])
            streamed.take(1)
        after = [counted(client, name) for name in ("sequence_repeat", "repeat", "identity")]

    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, 3]


def counted(client: Any, model: str) -> int:
    (entry,) = client.get_inference_statistics(model, as_json=True)["model_stats"]
    return int(entry.get("inference_stats", {}).get("success", {}).get("count", 0))
