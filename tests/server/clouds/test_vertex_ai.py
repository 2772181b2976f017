"""Vertex AI's port: the cases of Triton's L0_vertex_ai, redirected requests, and failed starts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from penstock.server.clouds.vertex_ai import PredictRoutes, VertexApp
from penstock.server.listening.sockets import StartError
from tests.live import Live
from tests.server.clouds.cloud_servers import VERTEX_MIME, are_right, body, outputs_of, vertex_ai, write_simple

JSON = {"content-type": "application/json"}
SINGLE = "Expect the model repository contains only a single model if default model is not specified"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_simple(root, "addsub")
    return write_simple(root, "subadd")


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[tuple[Live, httpx.Client]]:
    with vertex_ai(repository, vertex_ai_default_model="addsub", allow_client_shm=True) as both:
        yield both


@pytest.fixture
def client(served: tuple[Live, httpx.Client]) -> httpx.Client:
    return served[1]


def redirected(client: httpx.Client, path: str, sent: bytes = b"", key: str = "") -> httpx.Response:
    headers = {"X-Vertex-Ai-Triton-Redirect": path, "X-Vertex-Restricted": key}
    return client.post("/predict", content=sent, headers=headers)


def test_the_health_route_succeeds_when_the_server_is_ready(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200


def test_a_prediction_is_answered_by_the_default_model(client: httpx.Client) -> None:
    response = client.post("/predict", content=body()[0], headers=JSON)

    assert response.json()["model_name"] == "addsub"
    assert are_right(outputs_of(response))


def test_a_prediction_is_answered_by_the_model_named_in_the_redirect_header(client: httpx.Client) -> None:
    for path in ("v2/models/subadd/infer", "v2/models/subadd/versions/1/infer"):
        response = redirected(client, path, body()[0])

        assert response.json()["model_name"] == "subadd"


def test_binary_tensors_are_marked_by_content_type_and_answered_as_on_the_http_port(client: httpx.Client) -> None:
    sent, json_bytes = body((True, False), (True, False))
    response = client.post("/predict", content=sent, headers={"content-type": f"{VERTEX_MIME}{json_bytes}"})

    assert response.headers["content-type"] == "application/octet-stream"
    assert are_right(outputs_of(response, int(response.headers["inference-header-content-length"])))


@pytest.mark.parametrize(
    "content_type",
    [f"more/{VERTEX_MIME}{{size}}", f"{VERTEX_MIME}more{{size}}", f"{VERTEX_MIME}-123", f"{VERTEX_MIME}12345"],
)
def test_a_malformed_content_type_is_rejected(client: httpx.Client, content_type: str) -> None:
    sent, json_bytes = body((True, False))
    response = client.post("/predict", content=sent, headers={"content-type": content_type.format(size=json_bytes)})

    assert response.status_code == 400
    assert response.json()["error"]


@pytest.mark.parametrize(
    ("path", "there", "not_there"),
    [
        ("metrics", "nv_inference_request_success", '{"error"'), ("v2/models/stats", "subadd", "error"),
        ("v2/models/subadd/stats", "subadd", "addsub"), ("v2/health/live", "", "error"),
        ("v2/health/ready", "", "error"), ("v2/models/addsub/ready", "", "error"), ("v2", "extensions", "error"),
        ("v2/models/addsub", "platform", "error"), ("v2/models/addsub/config", "version_policy", "error"),
        ("v2/models/addsub/versions/1", "platform", "error"), ("v2/systemsharedmemory/status", "[]", "name"),
        ("v2/cudasharedmemory/status", "[]", "name"), ("v2/repository/index", "subadd", "error"),
    ],
)  # fmt: skip
def test_the_redirect_header_selects_another_endpoint(
    client: httpx.Client, path: str, there: str, not_there: str
) -> None:
    response = redirected(client, path)

    assert response.status_code == 200
    assert there in response.text
    assert not_there not in response.text


def test_redirected_unloads_are_rejected_outside_explicit_mode(client: httpx.Client) -> None:
    response = redirected(client, "v2/repository/models/subadd/unload")

    assert response.status_code == 503
    assert "explicit model load / unload is not allowed" in response.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "v2/logging", "v2/trace/setting", "v2/models/addsub/trace/setting", "v2/models/addsub/generate", "docs",
        "v2/models/a%2Ftrace%2Fsetting", "/v2", "v2/health/else", "../v2", "",
    ],
)  # fmt: skip
def test_endpoints_outside_tritons_redirect_list_are_rejected(client: httpx.Client, path: str) -> None:
    response = redirected(client, path)

    assert (response.status_code, response.content) == (400, b"")


def test_paths_other_than_the_two_routes_are_rejected_with_an_empty_body(client: httpx.Client) -> None:
    found = [client.get("/predict"), client.get("/v2"), client.post("/v2/models/addsub/infer"), client.get("/")]

    assert [(response.status_code, response.content) for response in found] == [
        (405, b""), (400, b""), (400, b""), (400, b""),
    ]  # fmt: skip


def test_restricted_apis_need_their_key_when_redirected(repository: Path) -> None:
    rule = "metadata,model-config,model-repository,statistics,shared-memory:X-Vertex-Restricted=secret"
    paths = [
        "v2", "v2/models/addsub/config", "v2/repository/index", "v2/systemsharedmemory/status",
        "v2/cudasharedmemory/status", "v2/models/stats", "metrics",
    ]  # fmt: skip
    more = {"vertex_ai_default_model": "addsub", "http_restricted_api": (rule,), "allow_client_shm": True}
    with vertex_ai(repository, **more) as (_, client):
        assert are_right(outputs_of(client.post("/predict", content=body()[0], headers=JSON)))
        refused = [redirected(client, path) for path in paths]
        let_pass = [redirected(client, path, key="secret") for path in paths]
        region = redirected(client, "v2/systemsharedmemory/region/test/register", b"{}")

    assert {response.status_code for response in [*refused, region]} == {403}
    assert "This API is restricted" in refused[0].json()["error"]
    assert {response.status_code for response in let_pass} == {200}


def test_the_only_model_is_the_default_model(tmp_path: Path) -> None:
    with vertex_ai(write_simple(tmp_path, "addsub")) as (_, client):
        assert are_right(outputs_of(client.post("/predict", content=body()[0], headers=JSON)))


def test_several_models_without_a_default_prevent_startup(repository: Path) -> None:
    with pytest.raises(StartError, match=SINGLE), vertex_ai(repository):
        pass


def test_a_default_model_that_is_not_loaded_prevents_startup(tmp_path: Path) -> None:
    repository = write_simple(tmp_path, "addsub")
    with (
        pytest.raises(StartError, match="Expect the default model 'subadd' is loaded"),
        vertex_ai(repository, vertex_ai_default_model="subadd"),
    ):
        pass


@pytest.mark.parametrize(("missing", "named"), [("predict", "API_PREDICT_ROUTE"), ("health", "AIP_HEALTH_ROUTE")])
def test_a_missing_route_prevents_startup(repository: Path, missing: str, named: str) -> None:
    with (
        pytest.raises(StartError, match=f"{named} is not defined for Vertex AI endpoint"),
        vertex_ai(repository, **{f"vertex_ai_{missing}_route": ""}),
    ):
        pass


def test_the_routes_are_those_that_vertex_ai_configures(tmp_path: Path) -> None:
    route = "/v1/endpoints/1/deployedModels/2"
    routes = {"vertex_ai_health_route": route, "vertex_ai_predict_route": f"{route}:predict"}
    with vertex_ai(write_simple(tmp_path, "addsub"), **routes) as (_, client):
        assert client.get(route).status_code == 200
        assert are_right(outputs_of(client.post(f"{route}:predict", content=body()[0], headers=JSON)))


def test_models_are_loaded_and_unloaded_by_redirect_in_explicit_mode(repository: Path) -> None:
    more = {"model_control_mode": "explicit", "load_model": ("addsub",)}
    with vertex_ai(repository, **more) as (_, client):
        assert redirected(client, "v2/models/subadd/ready").status_code != 200
        assert redirected(client, "v2/repository/models/subadd/load").status_code == 200
        assert redirected(client, "v2/models/subadd/infer", body()[0]).status_code == 200
        assert redirected(client, "v2/repository/models/subadd/unload").status_code == 200


def test_a_prediction_before_the_models_are_loaded_is_503() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def main() -> None:
        app = VertexApp(cast(Any, None), PredictRoutes("/health", "/predict", ""))
        await app({"type": "http", "path": "/predict", "method": "POST", "headers": []}, cast(Any, None), send)

    asyncio.run(main())
    assert [sent[0]["status"], sent[1]["body"]] == [503, b'{"error":"models are being loaded"}']
