"""SageMaker's multi-model endpoint: the cases of Triton's L0_sagemaker, and archives that do not load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from penstock.backends.backend import Backend
from penstock.backends.errors import Code, InferError
from penstock.server.clouds.archives import escape_target, find_archive
from tests.backends.onnx_models import floats
from tests.clients.ensembles import CHAIN, write_ensemble, write_plus
from tests.clients.tensors import document
from tests.server.clouds.cloud_servers import SAGEMAKER_MIME, are_right, body, outputs_of, sagemaker, write_simple

TARGET = "X-Amzn-SageMaker-Target-Model"
JSON = {"content-type": "application/json"}


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with sagemaker(model_control_mode="explicit") as (_, client):
        yield client


def unpack(root: Path, name: str, model: str = "") -> str:
    """Unpack an archive with one model, at its top or in the folder `model`. Return its URL."""
    write_simple(root / name / "model" if model else root / name, model or "model")
    return str(root / name / "model")


def load(client: httpx.Client, name: str, url: str, target: str = "") -> httpx.Response:
    headers = {TARGET: target} if target else {}
    return client.post("/models", json={"model_name": name, "url": url}, headers=headers)


def test_models_are_loaded_listed_described_invoked_and_unloaded(client: httpx.Client, tmp_path: Path) -> None:
    url = unpack(tmp_path, "1234")
    answer = {"modelName": "m1", "modelUrl": str(tmp_path / "1234")}

    loaded = load(client, "m1", url)
    assert (loaded.status_code, loaded.content) == (200, b"")
    assert client.get("/models").json() == {"models": [answer]}
    assert client.get("/models/m1").json() == answer
    invoked = client.post("/models/m1/invoke", content=body()[0], headers=JSON)
    assert invoked.json()["model_name"] == "m1"
    assert are_right(outputs_of(invoked))
    unloaded = client.delete("/models/m1")
    assert (unloaded.status_code, unloaded.content) == (200, b"")
    assert client.get("/models").json() == {"models": []}
    assert [client.get("/models/m1").status_code, client.delete("/models/m1").status_code] == [404, 404]
    assert client.post("/models/m1/invoke", content=body()[0], headers=JSON).status_code == 404


def test_a_model_in_a_folder_of_its_archive_has_the_url_of_the_archive(client: httpx.Client, tmp_path: Path) -> None:
    url = unpack(tmp_path, "1234", "inner")

    assert load(client, "m1", url).status_code == 200
    assert client.get("/models/m1").json() == {"modelName": "m1", "modelUrl": url}


def test_loading_a_model_again_is_a_conflict(client: httpx.Client, tmp_path: Path) -> None:
    first, second = unpack(tmp_path, "1"), unpack(tmp_path, "2")

    assert load(client, "m1", first).status_code == 200
    again = load(client, "m1", first)
    assert again.status_code == 409
    assert again.json() == {"error": f"model repository '{tmp_path / '1'}' has already been registered"}
    elsewhere = load(client, "m1", second)
    assert elsewhere.status_code == 409
    assert elsewhere.json()["error"] == "failed to register 'm1', there is a conflicting mapping for 'm1'"
    assert load(client, "m2", second).status_code == 200
    assert len(client.get("/models").json()["models"]) == 2


def test_one_of_two_parallel_loads_of_a_model_is_a_conflict(client: httpx.Client, tmp_path: Path) -> None:
    urls = [unpack(tmp_path, "1"), unpack(tmp_path, "2")]
    with ThreadPoolExecutor(2) as both:
        answers = list(both.map(lambda url: load(client, "m1", url).status_code, urls))

    assert sorted(answers) == [200, 409]
    assert are_right(outputs_of(client.post("/models/m1/invoke", content=body()[0], headers=JSON)))


def test_binary_tensors_are_marked_by_the_content_type(client: httpx.Client, tmp_path: Path) -> None:
    load(client, "m1", unpack(tmp_path, "1"))
    sent, json_bytes = body((True, True), (True, True))
    response = client.post("/models/m1/invoke", content=sent, headers={"content-type": f"{SAGEMAKER_MIME}{json_bytes}"})

    assert are_right(outputs_of(response, int(response.headers["content-type"].removeprefix(SAGEMAKER_MIME))))


def test_a_model_is_served_under_the_name_of_its_target(client: httpx.Client, tmp_path: Path) -> None:
    assert load(client, "0a1b", unpack(tmp_path, "0a1b"), "team/m.tar.gz").status_code == 200
    headers = JSON | {TARGET: "team/m.tar.gz"}
    response = client.post("/models/0a1b/invoke", content=body()[0], headers=headers)

    assert response.json()["model_name"] == escape_target("team/m.tar.gz") == "team%2Fm.tar.gz"
    assert client.get("/models").json()["models"][0]["modelName"] == "0a1b"
    assert client.delete("/models/0a1b", headers=headers).status_code == 200


def test_an_ensemble_is_loaded_and_unloaded_with_the_models_of_its_steps(client: httpx.Client, tmp_path: Path) -> None:
    root = tmp_path / "e" / "model"
    write_plus(root, "double", 2.0)
    write_plus(root, "plus", 1.0)
    write_ensemble(root, "chain", CHAIN)

    assert load(client, "e", str(root), "e.tar.gz").status_code == 200
    sent = document(np.zeros((1, 4), np.float32), "in")
    response = client.post("/models/e/invoke", json=sent, headers={TARGET: "e.tar.gz"})
    assert response.json()["outputs"][0]["data"] == floats([3.0] * 4).tolist()
    assert client.delete("/models/e").status_code == 200
    assert load(client, "e", str(root), "e.tar.gz").status_code == 200


def test_the_steps_of_an_ensemble_that_fails_to_load_are_unloaded(tmp_path: Path) -> None:
    root = tmp_path / "e"
    write_plus(root, "double", 2.0)
    write_plus(root, "plus", 1.0, width=5)
    write_ensemble(root, "chain", CHAIN)
    with sagemaker(model_control_mode="explicit") as (live, client):
        assert load(client, "e", str(root)).status_code == 400
        states = {row["name"]: row["state"] for row in httpx.post(f"{live.url}/v2/repository/index").json()}
        ready = client.get("/ping").status_code

    assert "READY" not in states.values()
    assert ready == 200


def test_an_archive_with_the_model_name_of_another_archive_is_rejected(client: httpx.Client, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_plus(tmp_path / name, "double", 2.0)
        write_plus(tmp_path / name, "plus", 1.0)
        write_ensemble(tmp_path / name, "chain", CHAIN)

    assert load(client, "a", str(tmp_path / "a")).status_code == 200
    refused = load(client, "b", str(tmp_path / "b"))
    assert refused.status_code == 400
    assert "its model 'double' has the name of an existing model" in refused.json()["error"]


@pytest.mark.parametrize("url", ["/dev/shm", "/proc/self", "/opt/../sys/kernel", "/dev", "//dev/shm"])
def test_a_system_folder_is_not_accepted_as_an_archive(client: httpx.Client, url: str) -> None:
    response = load(client, "m1", url)

    assert (response.status_code, response.content) == (400, b"")


@pytest.mark.parametrize("body", [{}, [], {"model_name": "m"}, {"model_name": 1, "url": "/x"}])
def test_a_load_without_a_name_and_a_url_is_rejected(client: httpx.Client, body: object) -> None:
    response = client.post("/models", json=body)

    assert response.status_code == 400
    assert "model_name" in response.json()["error"]


def test_a_load_with_a_malformed_body_is_rejected(client: httpx.Client) -> None:
    response = client.post("/models", content=b"AAAA", headers={TARGET: "Z"})

    assert response.status_code == 400
    assert "failed to parse the request JSON buffer" in response.json()["error"]


def test_a_failed_load_leaves_no_model_and_the_server_ready(client: httpx.Client, tmp_path: Path) -> None:
    url = unpack(tmp_path, "1")
    model = tmp_path / "1" / "model" / "1" / "model.onnx"
    good = model.read_bytes()
    model.write_bytes(b"none")

    failed = load(client, "m1", url)
    assert failed.status_code == 400
    assert "m1" in failed.json()["error"]
    assert client.get("/models").json() == {"models": []}
    assert client.get("/ping").status_code == 200
    model.write_bytes(good)
    assert load(client, "m1", url).status_code == 200


def test_a_load_that_runs_out_of_memory_is_507(tmp_path: Path) -> None:
    def full(path: Path, device: str, options: Mapping[str, str]) -> Backend:
        raise InferError(Code.INTERNAL, "Failed to allocate memory for requested buffer of size 4096")

    with sagemaker(model_control_mode="explicit", loaders={"onnxruntime": full}) as (_, client):
        failed = load(client, "m1", unpack(tmp_path, "1"))

    assert failed.status_code == 507
    assert "Failed to allocate memory" in failed.json()["error"]


@pytest.mark.parametrize("target", ["..", ".hidden", "a\tb"])
def test_a_target_that_is_not_a_valid_model_name_is_rejected(client: httpx.Client, tmp_path: Path, target: str) -> None:
    refused = client.post("/models", json={"model_name": target, "url": unpack(tmp_path, "1")})

    assert refused.status_code == 400
    assert "invalid model name" in refused.json()["error"]


def test_a_load_from_an_impossible_path_is_rejected(client: httpx.Client) -> None:
    assert load(client, "m1", "/opt/\0").status_code == 400


def test_a_load_with_the_name_of_a_model_of_the_repository_is_a_conflict(tmp_path: Path) -> None:
    own = write_simple(tmp_path / "own", "m1")
    with sagemaker(own, model_control_mode="explicit", load_model=("m1",)) as (live, client):
        refused = load(client, "m1", unpack(tmp_path, "1"))
        there = httpx.post(f"{live.url}/v2/models/m1/infer", content=body()[0])

    assert (refused.status_code, there.status_code) == (409, 200)


def test_the_folder_of_links_is_removed_when_the_server_stops(tmp_path: Path) -> None:
    with sagemaker(model_control_mode="explicit") as (live, client):
        linked = live.server.clouds.links_folder
        assert linked is not None
        assert load(client, "m1", unpack(tmp_path, "1")).status_code == 200
        assert [path.name for path in linked.iterdir()] == ["m1"]

    assert not linked.exists()
    assert (tmp_path / "1" / "model" / "config.pbtxt").exists()


def test_an_archive_without_a_model_is_rejected(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(InferError) as refused:
            find_archive(place, "m")
        assert refused.value.code is Code.INVALID
