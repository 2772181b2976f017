"""predict and infer through hooks, on examples/iris and on models with other hooks."""

from __future__ import annotations

import asyncio
import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.clients import models
from tests.clients.tensors import document, input_of, output_of, texts
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

IRIS = Path(__file__).parents[2] / "examples" / "iris"
NAMES = ["iris-setosa", "iris-versicolor", "iris-virginica"]
MEMBERS = ("sepal_length", "sepal_width", "petal_length", "petal_width")
SETOSA = dict(zip(MEMBERS, (5.2, 3.6, 1.4, 0.3), strict=True))
PREDICT, INFER = "/v2/models/iris/predict", "/v2/models/iris/infer"

HOOKS = """
import asyncio

async def pre_inference(sample, signature, metadata):
    if sample == "die":
        raise ValueError("no such sample")
    await asyncio.sleep(0)
    return {"x": [sample["x"]]} if isinstance(sample["x"], list) else {"x": sample["x"] * 10}

def post_inference(prediction, signature, metadata):
    total = float(prediction[0].sum())
    if total < 0:
        return {"total": float("nan")}
    if total == 0:
        raise KeyError("zero")
    return {"total": total, "note": "naïve", "rows": prediction[0]}
"""

ADDING = """
def post_inference(prediction, signature, metadata):
    return {"y": prediction[0], "note": "naïve"}
"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_identity(root, "hooked", "")
    (root / "hooked" / "handler.py").write_text(HOOKS)
    (root / "hooked" / "penstock.toml").write_text('[hooks]\nfile = "handler.py"\n')
    models.write_identity(root, "adding", "")
    (root / "adding" / "handler.py").write_text(ADDING)
    (root / "adding" / "penstock.toml").write_text('[hooks]\nfile = "handler.py"\n')
    models.write_identity(root, "plain", "")
    with live_server(IRIS, root) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, timeout=20) as new_client:
        yield new_client


@pytest.fixture(scope="module")
def tritonclient(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(live.address) as new_client:
        yield new_client


def flowers() -> tuple[list[dict[str, float]], list[int]]:
    """Read Fisher's iris flowers and the class of each."""
    with (IRIS / "iris.csv").open() as file:
        rows = [[float(each) for each in row] for row in csv.reader(file) if row[0][0].isdigit()]
    return [dict(zip(MEMBERS, row, strict=False)) for row in rows], [int(row[4]) for row in rows]


class TestIrisExample:
    @pytest.mark.parametrize("path", [PREDICT, "/v2/models/iris/versions/1/predict"])
    @pytest.mark.parametrize(
        ("lengths", "name"),
        [((5.2, 3.6, 1.4, 0.3), NAMES[0]), ((5.7, 2.8, 4.1, 1.3), NAMES[1]), ((6.3, 3.3, 6.0, 2.5), NAMES[2])],
    )
    def test_predict_returns_the_name_of_a_flower(
        self, client: httpx.Client, path: str, lengths: tuple[float, ...], name: str
    ) -> None:
        response = client.post(path, json=dict(zip(MEMBERS, lengths, strict=True)))

        assert (response.status_code, response.json()) == (200, name)
        assert response.headers["content-type"] == "application/json"

    def test_predict_returns_every_flower_correctly_at_a_concurrency_of_64(
        self, live: Live, client: httpx.Client
    ) -> None:
        samples, _ = flowers()
        labels: list[int] = []
        for start in range(0, len(samples), 50):
            rows = np.array([list(sample.values()) for sample in samples[start : start + 50]], np.float32)
            body = {**document(rows, "input"), "parameters": {"hooks": False}, "outputs": [{"name": "label"}]}
            labels += client.post(INFER, json=body).json()["outputs"][0]["data"]
        order = [number % len(samples) for number in range(0, 7 * 600, 7)]

        async def one(session: aiohttp.ClientSession, number: int) -> str:
            async with session.post(live.url + PREDICT, json=samples[number]) as response:
                assert response.status == 200
                answer: str = await response.json()
                return answer

        async def main() -> list[str]:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:
                return await asyncio.gather(*(one(session, number) for number in order))

        assert asyncio.run(main()) == [NAMES[labels[number]] for number in order]

    def test_the_iris_model_classifies_nearly_all_flowers_correctly(self, client: httpx.Client) -> None:
        samples, classes = flowers()
        right = [
            client.post(PREDICT, json=each).json() == NAMES[kind] for each, kind in zip(samples, classes, strict=True)
        ]

        assert sum(right) >= 0.95 * len(samples)

    def test_a_missing_key_is_a_bad_request(self, client: httpx.Client) -> None:
        response = client.post(PREDICT, json=dict.fromkeys(MEMBERS[1:], 1))

        assert response.status_code == 400
        assert "sepal_length" in response.json()["error"]

    @pytest.mark.parametrize("body", [b"", b"{", b"[1, 2", b"\xff"])
    def test_a_body_that_is_not_json_is_a_bad_request(self, client: httpx.Client, body: bytes) -> None:
        assert client.post(PREDICT, content=body).status_code == 400

    @pytest.mark.parametrize("body", [1, None, "x", [], [1, 2], {}, {**SETOSA, "petal_width": "wide"}])
    def test_a_sample_of_the_wrong_type_is_a_bad_request(self, client: httpx.Client, body: object) -> None:
        assert client.post(PREDICT, json=body).status_code == 400
        assert client.post(PREDICT, json=SETOSA).json() == NAMES[0]

    def test_the_form_content_type_that_curl_sends_is_accepted(self, client: httpx.Client) -> None:
        fields = {"content-type": "application/x-www-form-urlencoded"}

        assert client.post(PREDICT, content=json.dumps(SETOSA), headers=fields).json() == NAMES[0]

    @pytest.mark.parametrize("coding", ["gzip", "deflate"])
    def test_a_compressed_sample_is_accepted(self, client: httpx.Client, coding: str) -> None:
        uncompressed = json.dumps(SETOSA).encode()
        body = gzip.compress(uncompressed) if coding == "gzip" else zlib.compress(uncompressed)

        assert client.post(PREDICT, content=body, headers={"content-encoding": coding}).json() == NAMES[0]

    def test_infer_bypasses_the_hooks_if_requested(self, tritonclient: Any) -> None:
        rows = np.array([[5.2, 3.6, 1.4, 0.3], [6.3, 3.3, 6.0, 2.5]], np.float32)
        for binary in (True, False):
            result = tritonclient.infer(
                "iris", [input_of("input", rows, binary=binary)], parameters={"hooks": False},
                outputs=[output_of("label", binary=binary), output_of("probabilities", binary=binary)],
            )  # fmt: skip

            assert result.as_numpy("label").tolist() == [0, 2]
            np.testing.assert_allclose(result.as_numpy("probabilities").sum(axis=1), [1, 1], rtol=1e-5)

    def test_infer_passes_arrays_to_a_hook_and_its_error_is_a_bad_request(self, tritonclient: Any) -> None:
        with pytest.raises(InferenceServerException, match="sepal_length") as caught:
            tritonclient.infer("iris", [input_of("input", np.ones((1, 4), np.float32))])

        assert caught.value.status() == "400"

    def test_an_unknown_model_is_not_found(self, client: httpx.Client) -> None:
        response = client.post("/v2/models/nope/predict", json=SETOSA)

        assert response.status_code == 404
        assert response.json() == {"error": "Request for unknown model: 'nope' is not found"}

    def test_hooks_are_counted_in_the_metrics(self, live: Live, client: httpx.Client) -> None:
        client.post(PREDICT, json=SETOSA)
        page = httpx.get(f"http://127.0.0.1:{live.metrics_port}/metrics").text

        for hook in ("pre", "post"):
            (line,) = [line for line in page.splitlines() if line.startswith("penstock_hook_seconds_count")
                       and 'model="iris"' in line and f'hook="{hook}"' in line]  # fmt: skip
            assert float(line.split()[-1]) > 0


class TestHooks:
    def test_what_post_inference_returns_is_the_answer(self, client: httpx.Client) -> None:
        response = client.post("/v2/models/hooked/predict", json={"x": [1.5, 2]})

        assert response.json() == {"total": 3.5, "note": "naïve", "rows": [[1.5, 2.0]]}

    def test_nan_is_written_as_pythons_json_module_reads_it(self, client: httpx.Client) -> None:
        assert client.post("/v2/models/hooked/predict", json={"x": [-1]}).text == '{"total":NaN}'

    def test_an_error_in_pre_inference_fails_only_its_own_request(self, live: Live) -> None:
        url = f"{live.url}/v2/models/hooked/predict"

        async def one(session: aiohttp.ClientSession, number: int) -> int:
            body = "die" if number % 3 == 0 else {"x": [0.0 if number % 3 == 1 else number]}
            async with session.post(url, json=body) as response:
                answer = await response.json()
            assert response.status == {0: 400, 1: 500, 2: 200}[number % 3], answer
            return response.status

        async def main() -> list[int]:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=16)) as session:
                return await asyncio.gather(*(one(session, number) for number in range(60)))

        assert asyncio.run(main()).count(200) == 20

    def test_an_error_in_post_inference_exposes_only_the_request_id(self, client: httpx.Client) -> None:
        fields = {"x-request-id": "abc-7"}
        response = client.post("/v2/models/hooked/predict", json={"x": [0]}, headers=fields)

        assert response.status_code == 500
        assert "abc-7" in response.json()["error"]
        assert "zero" not in response.json()["error"]

    def test_infer_passes_arrays_to_the_hooks_and_returns_their_tensors(self, tritonclient: Any) -> None:
        sent = np.array([[1, 2], [3, 4]], np.float32)
        result = tritonclient.infer("hooked", [input_of("x", sent)], request_id="9")

        assert result.get_response()["id"] == "9"
        assert [each["name"] for each in result.get_response()["outputs"]] == ["total", "note", "rows"]
        assert result.as_numpy("total").tolist() == [100]
        assert texts(result.as_numpy("note")) == ["naïve"]
        np.testing.assert_array_equal(result.as_numpy("rows"), sent * 10)

    def test_infer_with_json_inputs_returns_json_outputs(self, client: httpx.Client) -> None:
        response = client.post("/v2/models/hooked/infer", json=document(np.ones((1, 2), np.float32)))

        assert [(each["name"], each["data"]) for each in response.json()["outputs"]] == [
            ("total", [20.0]), ("note", ["naïve"]), ("rows", [10.0, 10.0]),
        ]  # fmt: skip

    def test_an_output_added_by_a_hook_is_returned_unless_outputs_are_requested_by_name(
        self, client: httpx.Client
    ) -> None:
        body = document(np.ones((1, 2), np.float32))
        for options, names in (({}, ["y", "note"]), ({"outputs": [{"name": "y"}]}, ["y"])):
            outputs = client.post("/v2/models/adding/infer", json={**body, **options}).json()["outputs"]

            assert [each["name"] for each in outputs] == names
            assert outputs[0]["data"] == [1.0, 1.0]

    def test_an_output_added_by_a_hook_is_binary_if_all_outputs_are(self, tritonclient: Any) -> None:
        result = tritonclient.infer("adding", [input_of("x", np.ones((1, 2), np.float32))])

        assert texts(result.as_numpy("note")) == ["naïve"]
        assert all("binary_data_size" in each["parameters"] for each in result.get_response()["outputs"])

    def test_an_error_in_a_hook_of_infer_reaches_the_client_with_the_request_id(self, tritonclient: Any) -> None:
        with pytest.raises(InferenceServerException) as caught:
            tritonclient.infer("hooked", [input_of("x", np.zeros((1, 2), np.float32))], request_id="id-5")

        assert caught.value.status() == "500"
        assert "id-5" in caught.value.message()

    def test_predict_without_hooks_passes_the_sample_to_the_model(self, client: httpx.Client) -> None:
        for sample in ({"x": [1, 2]}, [1, 2], {"x": [[1, 2], [3, 4]]}):
            response = client.post("/v2/models/plain/predict", json=sample)

            assert response.status_code == 200, response.text
