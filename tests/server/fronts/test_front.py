"""Two front ends and an engine over sockets answer as one process does, and share all state.

They share a loop here; for separate processes, see tests/server/supervisor.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from penstock.server.fronts.remote_engine import NO_ENGINE
from penstock.server.json_text import MAX_VALUES
from tests.clients import models, sequence_models
from tests.live import Live, live_server

from .live_fronts import LiveFronts, attach, live_front

pytestmark = pytest.mark.slow

IRIS = Path(__file__).parents[3] / "examples" / "iris"
SAMPLE = {"sepal_length": 5.2, "sepal_width": 3.6, "petal_length": 1.4, "petal_width": 0.3}
A, B = np.arange(16, dtype=np.int32).reshape(1, 16), np.full((1, 16), 3, np.int32)
ACCUMULATES = sequence_models.config(
    4, sequence_models.CONTROLS + sequence_models.STATE % "", "instance_group [ { kind: KIND_CPU } ]"
)


def write(root: Path) -> Path:
    models.write_examples(root)
    models.write_identities(root)
    sequence_models.write_accumulator(root, "adds", ACCUMULATES)
    return root


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFronts]:
    root = write(tmp_path_factory.mktemp("repository"))
    with live_front(
        root, IRIS, count=2, allow_client_shm=True, model_control_mode="explicit", load_model=("*",)
    ) as live:
        yield live


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = write(tmp_path_factory.mktemp("repository"))
    with live_server(root, IRIS, allow_client_shm=True, model_control_mode="explicit", load_model=("*",)) as live:
        yield live


def tensor(name: str, datatype: str, shape: list[int], data: Any) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


PAIR = [tensor("INPUT0", "INT32", [1, 16], A.ravel().tolist()), tensor("INPUT1", "INT32", [1, 16], [3] * 16)]
TEXTS = [tensor("x", "BYTES", [1, 2], ["a", "täg"])]
CLASSES = {"classification": 2}
CASES = {
    "a request": ("simple/infer", {"inputs": PAIR}),
    "an id": ("simple/infer", {"id": "seven", "inputs": PAIR}),
    "some outputs": ("simple/infer", {"inputs": PAIR, "outputs": [{"name": "OUTPUT1"}]}),
    "classes": ("simple/infer", {"inputs": PAIR, "outputs": [{"name": "OUTPUT0", "parameters": CLASSES}]}),
    "texts": ("identity_BYTES/infer", {"inputs": TEXTS}),
    "no such model": ("none/infer", {"inputs": PAIR}),
    "no such version": ("simple/versions/9/infer", {"inputs": PAIR}),
    "another name": ("simple/infer", {"inputs": TEXTS}),
    "another shape": ("simple/infer", {"inputs": [tensor("INPUT0", "INT32", [1, 2], [1, 2]), PAIR[1]]}),
    "too many rows": ("identity_FP32/infer", {"id": "r", "inputs": [tensor("x", "FP32", [65, 1], [0.0] * 65)]}),
    "an end without a start": (
        "adds/infer",
        {"parameters": {"sequence_id": 9, "sequence_end": True}, "inputs": [tensor("x", "FP32", [1, 1], [1])]},
    ),
    "a far deadline": ("simple/infer", {"parameters": {"timeout": (1 << 64) - 1, "priority": 3}, "inputs": PAIR}),
    "hooks": ("iris/predict", SAMPLE),
    "hooks that fail": ("iris/predict", {"sepal_length": 1}),
    "generate": ("iris/generate", {"sepal_length": 5.2}),
    "generate without hooks": ("identity_INT32/generate", {"x": [[1, 2]]}),
    "no JSON": ("simple/infer", "{"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("position", [0, 1])
def test_a_front_end_answers_as_one_process_does(fronts: LiveFronts, alone: Live, case: str, position: int) -> None:
    path, request_body = CASES[case]
    body = request_body if isinstance(request_body, str) else json.dumps(request_body)
    answers = [
        httpx.post(f"{url}/v2/models/{path}", content=body, timeout=30) for url in (alone.url, fronts.url_of(position))
    ]

    one, other = ((answer.status_code, answer.content, answer.headers.get("content-type")) for answer in answers)
    assert other == one


@pytest.mark.parametrize("path", ["simple/infer", "iris/predict", "simple/generate"])
@pytest.mark.parametrize(
    ("body", "refused"),
    [
        ('{"x":' + "[" * 101 + "]" * 101 + "}", "JSON nesting depth exceeds maximum allowed limit (100)"),
        ('{"x":[' + "{}," * MAX_VALUES + "{}]}", f"JSON has more than {MAX_VALUES} values"),
        ("0" * ((64 << 20) + 1), "request JSON size of 67108865 bytes exceeds the maximum allowed input size"),
    ],
    ids=["deep", "many", "large"],
)
def test_a_front_end_limits_the_depth_count_and_size_of_json(
    fronts: LiveFronts, path: str, body: str, refused: str
) -> None:
    answer = httpx.post(f"{fronts.url_of(1)}/v2/models/{path}", content=body, timeout=60)

    assert answer.status_code == 400
    assert refused in answer.json()["error"]


@pytest.mark.parametrize(
    "path", ["", "/models/simple", "/models/simple/config", "/models/none", "/models/simple/ready"]
)
def test_the_control_plane_answers_as_one_process_does(fronts: LiveFronts, alone: Live, path: str) -> None:
    answers = [httpx.get(f"{url}/v2{path}") for url in (alone.url, fronts.url_of(1))]

    assert answers[1].status_code == answers[0].status_code
    assert answers[1].json() == answers[0].json() if answers[0].content else not answers[1].content


def test_a_front_end_answers_grpc_as_one_process_does(fronts: LiveFronts, alone: Live) -> None:
    responses = []
    for address in (alone.grpc_address, f"127.0.0.1:{fronts.fronts[1].grpc_port}"):
        with triton_grpc.InferenceServerClient(address) as client:
            inputs = [triton_grpc.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in (0, 1)]
            for tensor, array in zip(inputs, (A, B), strict=True):
                tensor.set_data_from_numpy(array)
            responses.append(client.infer("simple", inputs, request_id="7").get_response().SerializeToString())
            with pytest.raises(InferenceServerException) as caught:
                client.infer("none", inputs)
            responses.append((caught.value.status(), caught.value.message()))
    assert responses[:2] == responses[2:]


def test_statistics_are_the_same_at_every_front_end(fronts: LiveFronts) -> None:
    def counts(position: int, model: str) -> Any:
        stats = httpx.get(f"{fronts.url_of(position)}/v2/models/{model}/stats").json()["model_stats"][0]
        parts = stats["inference_stats"]
        return stats["inference_count"], parts["success"]["count"], parts["fail"]["count"]

    before, hooked = counts(0, "simple"), counts(0, "iris")
    for position in (0, 1):
        url = f"{fronts.url_of(position)}/v2/models"
        for _ in range(3):
            assert httpx.post(f"{url}/simple/infer", json={"inputs": PAIR}).status_code == 200
        assert httpx.post(f"{url}/iris/predict", json=SAMPLE).status_code == 200
        assert httpx.post(f"{url}/iris/predict", json={}).status_code == 400

    assert counts(0, "simple") == counts(1, "simple") == (before[0] + 6, before[1] + 6, before[2])
    assert counts(0, "iris") == counts(1, "iris") == (hooked[0] + 2, hooked[1] + 2, hooked[2] + 2)
    page = httpx.get(f"{fronts.url_of(1)}/metrics").text
    (calls,) = [line for line in page.splitlines() if "hook" in line and 'hook="pre"' in line and "_count{" in line]
    assert float(calls.split()[-1]) >= 4


def test_a_sequence_continues_at_another_front_end(fronts: LiveFronts) -> None:
    sums = []
    for number, value in enumerate((1.0, 2.0, 4.0)):
        request_body = {
            "parameters": {"sequence_id": 42, "sequence_start": number == 0, "sequence_end": number == 2},
            "inputs": [tensor("x", "FP32", [1, 1], [value])],
        }
        answer = httpx.post(f"{fronts.url_of(number % 2)}/v2/models/adds/infer", json=request_body)
        sums.append(next(each["data"] for each in answer.json()["outputs"] if each["name"] == "y")[0])
    assert sums == [1.0, 3.0, 7.0]


def test_a_region_is_registered_at_every_front_end(fronts: LiveFronts) -> None:
    memory = shm.create_shared_memory_region("mine", f"/penstock-{id(fronts)}", 64)
    try:
        shm.set_shared_memory_region(memory, [A])
        with triton.InferenceServerClient(fronts.address) as client:
            client.register_system_shared_memory("mine", f"/penstock-{id(fronts)}", 64)
        with triton.InferenceServerClient(f"127.0.0.1:{fronts.fronts[1].http_port}") as client:
            inputs = [triton.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in (0, 1)]
            inputs[0].set_shared_memory("mine", 64)
            inputs[1].set_data_from_numpy(B)
            assert np.array_equal(client.infer("simple", inputs).as_numpy("OUTPUT0"), A + B)
            client.unregister_system_shared_memory("mine")
        with triton.InferenceServerClient(fronts.address) as client:
            assert client.get_system_shared_memory_status() == []
    finally:
        shm.destroy_shared_memory_region(memory)


def test_a_load_or_unload_has_reached_every_front_end_when_it_is_answered(fronts: LiveFronts) -> None:
    for number in range(6):
        changed, other = fronts.url_of(number % 2), fronts.url_of(1 - number % 2)
        url = f"{other}/v2/models/simple_auto/infer"
        assert httpx.post(f"{changed}/v2/repository/models/simple_auto/unload").status_code == 200
        assert httpx.post(url, json={"inputs": PAIR}).status_code == 404
        assert httpx.post(f"{changed}/v2/repository/models/simple_auto/load", timeout=30).status_code == 200
        assert httpx.post(url, json={"inputs": PAIR}).status_code == 200


def test_a_front_end_answers_503_without_an_engine_and_serves_again_with_the_next() -> None:
    with live_front(IRIS) as live:

        async def part() -> None:
            for number in list(live.engine_server._fronts):
                live.engine_server.detach(number)
            while live.fronts[0].ready:  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)

        async def join() -> None:
            attach(live.engine_server, live.fronts[0])
            assert await live.fronts[0].wait_ready(10)

        live.call(part())
        refused = httpx.post(f"{live.url}/v2/models/iris/predict", json=SAMPLE)
        assert (refused.status_code, refused.json()) == (503, {"error": NO_ENGINE})
        assert refused.headers["retry-after"] == "1"
        assert httpx.get(f"{live.url}/v2/health/live").status_code == 200
        assert httpx.get(f"{live.url}/v2/health/ready").status_code == 400

        live.call(join())
        assert httpx.post(f"{live.url}/v2/models/iris/predict", json=SAMPLE).status_code == 200
        assert httpx.get(f"{live.url}/v2/health/ready").status_code == 200
