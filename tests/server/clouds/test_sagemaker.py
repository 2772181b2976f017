"""SageMaker's port with one model: the cases of Triton's L0_sagemaker, and other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.clouds.archives import NOT_EXPLICIT
from penstock.server.clouds.sagemaker import UNSPECIFIED, is_out_of_memory
from tests.backends.onnx_models import FLOAT, node
from tests.clients.models import write
from tests.fakes import FakeBackend, fake_loader
from tests.live import Live
from tests.server.clouds.cloud_servers import ROWS, SAGEMAKER_MIME, are_right, body, outputs_of, sagemaker, write_simple
from tests.server.test_serve import BODY, GRAPH, Gate, write_models

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_simple(tmp_path_factory.mktemp("models"))
    write(root, "identity", [node("Identity", ["x"], ["y"])], ({"x": (FLOAT, ["N", 2])}, {"y": (FLOAT, ["N", 2])}))
    return root


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[tuple[Live, httpx.Client]]:
    with sagemaker(repository, sagemaker_default_model="simple") as both:
        yield both


@pytest.fixture
def client(served: tuple[Live, httpx.Client]) -> httpx.Client:
    return served[1]


def test_ping_succeeds_when_the_server_is_ready(client: httpx.Client) -> None:
    assert client.get("/ping").status_code == 200
    assert client.post("/ping").status_code == 405


def test_an_invocation_in_json_is_answered_by_the_default_model(client: httpx.Client) -> None:
    response = client.post("/invocations", content=body()[0], headers=JSON)

    assert response.json()["model_name"] == "simple"
    assert response.headers["content-type"] == "application/json"
    assert are_right(outputs_of(response))


def test_an_invocation_with_binary_tensors_is_marked_by_its_content_type(client: httpx.Client) -> None:
    sent, json_bytes = body((True, False))
    response = client.post("/invocations", content=sent, headers={"content-type": f"{SAGEMAKER_MIME}{json_bytes}"})

    assert are_right(outputs_of(response))


def test_an_answer_with_binary_tensors_is_marked_by_its_content_type(client: httpx.Client) -> None:
    response = client.post("/invocations", content=body(binary_outputs=(True, False))[0], headers=JSON)
    content_type = response.headers["content-type"]

    assert content_type.startswith(SAGEMAKER_MIME)
    assert "inference-header-content-length" not in response.headers
    assert are_right(outputs_of(response, int(content_type.removeprefix(SAGEMAKER_MIME))))


@pytest.mark.parametrize(
    ("content_type", "text"),
    [
        (f"more/{SAGEMAKER_MIME}{{size}}", "expect MIME type for binary data starts with"),
        (f"{SAGEMAKER_MIME}more{{size}}", "Raw request must only have 1 input (found 1)"),
        (f"{SAGEMAKER_MIME}-123", "inference header size should be in range (0, "),
        (f"{SAGEMAKER_MIME}12345", "inference header size should be in range (0, "),
        (SAGEMAKER_MIME + "9" * 30, "inference header size should be in range (0, "),
    ],
)
def test_a_malformed_content_type_is_rejected(client: httpx.Client, content_type: str, text: str) -> None:
    sent, json_bytes = body((True, False))
    response = client.post("/invocations", content=sent, headers={"content-type": content_type.format(size=json_bytes)})

    assert response.status_code == 400
    assert text in response.json()["error"]


def test_a_body_without_json_is_the_model_s_only_input(repository: Path) -> None:
    sent = np.array([[1, 2]], np.float32).tobytes()
    with sagemaker(repository, sagemaker_default_model="identity") as (_, client):
        response = client.post("/invocations", content=sent, headers={"content-type": f"{SAGEMAKER_MIME}0"})

    json_bytes = int(response.headers["content-type"].removeprefix(SAGEMAKER_MIME))

    assert response.content[json_bytes:] == sent


def test_header_fields_of_the_http_port_are_ignored(client: httpx.Client) -> None:
    headers = JSON | {"inference-header-content-length": "3", "accept-encoding": "gzip"}
    response = client.post("/invocations", content=body()[0], headers=headers)

    assert "content-encoding" not in response.headers
    assert are_right(outputs_of(response))


def test_a_body_in_many_chunks_is_answered(client: httpx.Client) -> None:
    sent, _ = body()
    response = client.post("/invocations", content=(sent[i : i + 7] for i in range(0, len(sent), 7)), headers=JSON)

    assert are_right(outputs_of(response))


def test_an_invalid_request_has_the_same_error_as_on_the_http_port(client: httpx.Client) -> None:
    response = client.post("/invocations", content=b"{", headers=JSON)

    assert response.status_code == 400
    assert "failed to parse the request JSON buffer" in response.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/invocations", 405), ("GET", "/", 400), ("POST", "/v2/models/simple/infer", 400),
        ("GET", "/v2/health/ready", 400), ("PUT", "/models", 400), ("GET", "/models/simple", 404),
        ("POST", "/models/simple/invoke", 404), ("DELETE", "/models/simple", 404), ("GET", "/metrics", 400),
    ],
)  # fmt: skip
def test_paths_other_than_sagemakers_are_rejected_with_an_empty_body(
    client: httpx.Client, method: str, path: str, status: int
) -> None:
    response = client.request(method, path, content=b"{}" if method == "POST" else None)

    assert (response.status_code, response.content) == (status, b"")


def test_loads_are_rejected_outside_explicit_mode(client: httpx.Client) -> None:
    response = client.post("/models", json={"model_name": "m", "url": "/opt/ml/models/m/model"})

    assert response.status_code == 400
    assert response.json() == {"error": NOT_EXPLICIT}
    assert client.get("/models").json() == {"models": []}


def test_the_http_port_is_unaffected_by_the_sagemaker_port(served: tuple[Live, httpx.Client]) -> None:
    live, _ = served
    response = httpx.post(
        f"{live.url}/v2/models/simple/infer", content=body(binary_outputs=(True, True))[0], headers=JSON
    )

    assert response.headers["content-type"] == "application/octet-stream"
    assert httpx.post(f"{live.url}/invocations", content=body()[0]).status_code == 404


def test_an_invocation_without_a_default_model_is_404(repository: Path) -> None:
    with sagemaker(repository, allow_http=False, allow_grpc=False, allow_metrics=False) as (_, client):
        response = client.post("/invocations", content=body()[0], headers=JSON)

    assert response.status_code == 404
    assert UNSPECIFIED in response.json()["error"]


def test_an_unavailable_model_makes_ping_fail_unless_the_mode_is_live(tmp_path: Path) -> None:
    root = write_simple(tmp_path)
    (root / "simple" / "1" / "model.onnx").unlink()
    with sagemaker(root, sagemaker_default_model="simple") as (_, client):
        assert client.get("/ping").status_code == 400
    with sagemaker(root, sagemaker_default_model="simple", sagemaker_ping_mode="live") as (_, client):
        assert client.get("/ping").status_code == 200


def test_an_invocation_may_be_a_generate_request(repository: Path) -> None:
    sent = {f"INPUT{i}": ROWS.ravel().tolist() for i in (0, 1)}
    with sagemaker(repository, sagemaker_default_model="simple", sagemaker_inference_type="generate") as (_, client):
        response = client.post("/invocations", json=sent)
        assert client.get("/invocations").status_code == 405

    assert response.headers["content-type"] == "application/json"
    assert response.json()["OUTPUT0"] == (2 * ROWS).ravel().tolist()


def test_an_invocation_may_be_a_generate_stream_request(repository: Path) -> None:
    sent = {f"INPUT{i}": ROWS.ravel().tolist() for i in (0, 1)}
    kind = "generate_stream"
    with sagemaker(repository, sagemaker_default_model="simple", sagemaker_inference_type=kind) as (_, client):
        response = client.post("/invocations", json=sent)

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.startswith("data: {")


def test_restricted_apis_need_their_key_on_the_sagemaker_port(repository: Path) -> None:
    rule = "health,inference,model-repository:key=secret"
    with sagemaker(repository, sagemaker_default_model="simple", http_restricted_api=(rule,)) as (_, client):
        refused = [client.get("/ping"), client.get("/models"), client.post("/invocations", content=body()[0])]
        client.headers["key"] = "secret"
        let_pass = [client.get("/ping"), client.get("/models"), client.post("/invocations", content=body()[0])]

    assert {response.status_code for response in refused} == {403}
    assert {response.status_code for response in let_pass} == {200}


@pytest.mark.slow
def test_a_draining_server_answers_accepted_requests_and_rejects_new_ones(tmp_path: Path) -> None:
    gate = Gate()
    models = write_models(tmp_path, "a")
    with sagemaker(models, sagemaker_default_model="a", loaders=gate.loaders) as (live, client):
        gate.open.clear()
        with ThreadPoolExecutor(1) as asking:
            accepted = asking.submit(client.post, "/invocations", content=BODY, headers=JSON)
            assert gate.entered.wait(10)
            drained = asyncio.run_coroutine_threadsafe(live.server.drain(), live.loop)
            while httpx.get(client.base_url.join("/ping")).headers.get("connection") != "close":
                pass
            late = [httpx.get(client.base_url.join("/ping")), httpx.post(client.base_url.join("/invocations"))]
            gate.open.set()

        assert [response.status_code for response in late] == [503, 503]
        assert (accepted.result().status_code, accepted.result().headers["connection"]) == (200, "close")
        assert drained.result(30) == 0


@pytest.mark.parametrize(
    ("failure", "status"),
    [(InferError(Code.INTERNAL, "Failed to allocate memory"), 507), (InferError(Code.INTERNAL, "it broke"), 400)],
)
def test_a_failed_run_is_400_and_an_out_of_memory_error_507(tmp_path: Path, failure: InferError, status: int) -> None:
    def run(inputs: list[Array | None]) -> list[Array | None]:
        if any(array is not None and array.any() for array in inputs):  # warmup sends zeros
            raise failure
        return inputs

    loaders = {"onnxruntime": fake_loader(FakeBackend(GRAPH, run))}
    with sagemaker(write_models(tmp_path, "a"), sagemaker_default_model="a", loaders=loaders) as (live, client):
        there = httpx.post(f"{live.url}/v2/models/a/infer", content=BODY)
        response = client.post("/invocations", content=BODY, headers=JSON)

    assert (there.status_code, response.status_code) == (500, status)
    assert response.json() == there.json()


@pytest.mark.parametrize(
    "text", ["CUDA out of memory. Tried", "MemoryError: ", "Failed to allocate memory for requested buffer of size 4"]
)
def test_out_of_memory_errors_are_recognized_by_their_text(text: str) -> None:
    assert is_out_of_memory(InferError(Code.INTERNAL, text))
    assert not is_out_of_memory(InferError(Code.INTERNAL, "internal error"))
