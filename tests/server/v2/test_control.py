"""The control plane over ASGI, without a socket: Triton's paths, status codes and messages."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.batching.request import InferRequest
from penstock.batching.running.batch import Batch
from penstock.server.health import Health
from penstock.server.repository.control import NOT_ALLOWED
from penstock.server.telemetry.hardware import Hardware
from penstock.server.telemetry.metrics import Metrics
from penstock.server.v2.control import ControlEndpoints
from penstock.server.v2.plane import make_app
from penstock.server.v2.repository import RepositoryEndpoints
from tests.fakes import fake_model

ZIPMAP = Signature(
    (TensorSpec("x", "FP32", (-1, 4)), TensorSpec("names", "BYTES", (-1, -1), optional=True)),
    (TensorSpec("label", "INT64", (-1,)), TensorSpec("scores", "seq(map(int64,tensor(float)))", ())),
    batched=True,
)
FIXED = Signature((TensorSpec("x", "FP16", (2, 3)),), (TensorSpec("y", "BOOL", ()),))


@dataclass
class FakeEngine:
    loaded: list[Model]

    def models(self) -> list[Model]:
        return self.loaded

    def model(self, name: str, version: str = "") -> Model:
        found = [model for model in self.loaded if model.name == name]
        if not found:
            raise InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if not version:
            return found[-1]
        for model in found:
            if model.version == version:
                return model
        raise InferError(Code.NOT_FOUND, f"Request for unknown model: '{name}' version {version} is not found")


@dataclass
class FakeRepository:
    rows: list[dict[str, Any]]
    strict: bool = True
    startup_finished: bool = True

    def config_json(self, model: Model) -> Mapping[str, Any]:
        return {"name": model.name, "max_batch_size": 8}

    def index(self, ready: bool) -> list[dict[str, Any]]:
        return [row for row in self.rows if not ready or row["state"] == "READY"]

    def ready(self, strict: bool = True) -> bool:
        return self.startup_finished and (self.strict or not strict)


@dataclass
class FakeControl:
    """The ModelControl of a server that does not load or unload models."""

    repository: FakeRepository

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        raise InferError(Code.NOT_READY, NOT_ALLOWED)

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        raise InferError(Code.NOT_READY, NOT_ALLOWED)

    async def index(self, ready: bool = False) -> list[dict[str, Any]]:
        return self.repository.index(ready)


@dataclass
class Server:
    """One application and its parts."""

    engine: FakeEngine
    repository: FakeRepository
    strict: bool = True
    app: Starlette = field(init=False)
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        metrics = Metrics(self.engine, Hardware(nvml=_no_gpu))
        self.health = Health(self.repository.ready, self.engine, strict=self.strict)
        extensions = RepositoryEndpoints(FakeControl(self.repository), 1 << 20).routes()
        control = ControlEndpoints(self.engine, self.repository, metrics, self.health).routes()
        self.app = make_app((*extensions, *control), pages=True)

    def call(self, method: str, path: str, content: Any = None) -> httpx.Response:
        async def main() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
                return await client.request(method, path, content=content)

        return asyncio.run(main())

    def get(self, path: str) -> httpx.Response:
        return self.call("GET", path)

    def post(self, path: str, content: Any = None) -> httpx.Response:
        return self.call("POST", path, content)


def _no_gpu() -> Any:
    raise ImportError("no pynvml here")


@pytest.fixture
def server() -> Server:
    models = [fake_model("iris", 1, ZIPMAP), fake_model("iris", 12, ZIPMAP), fake_model("plain", 1, FIXED)]
    rows: list[dict[str, Any]] = [{"name": model.name, "version": model.version, "state": "READY"} for model in models]
    rows.append({"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no such file"})
    return Server(FakeEngine(models), FakeRepository(rows))


def _error(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    return response.status_code, response.json()["error"]


# -- the server ------------------------------------------------------------------------------------------------


def test_server_metadata_lists_only_supported_extensions(server: Server) -> None:
    answer = server.get("/v2").json()

    assert list(answer) == ["name", "version", "extensions"]
    assert answer["name"] == "triton"
    assert answer["version"] == importlib.metadata.version("penstock")
    assert "statistics" in answer["extensions"]
    assert "generate" not in answer["extensions"]


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready", "/v2/health/ready?verbose=1&verbose=2"])
def test_health_is_200_and_empty(server: Server, path: str) -> None:
    response = server.get(path)

    assert (response.status_code, response.content) == (200, b"")


def test_readiness_is_400_and_liveness_200_while_models_are_loading(server: Server) -> None:
    server.repository.startup_finished = False

    response = server.get("/v2/health/ready")

    assert (response.status_code, response.content) == (400, b"")
    assert server.get("/v2/health/live").status_code == 200


def test_an_unknown_model_is_reported_as_not_ready_until_all_models_are_loaded(server: Server) -> None:
    assert server.get("/v2/models/later/ready").status_code == 404

    server.repository.startup_finished = False

    assert _error(server.get("/v2/models/later/ready")) == (400, "Model version not ready")


def test_one_broken_model_makes_the_server_unready_only_if_readiness_is_strict(server: Server) -> None:
    server.repository.strict = False
    lenient = Server(server.engine, server.repository, strict=False)

    assert server.get("/v2/health/ready").status_code == 400
    assert lenient.get("/v2/health/ready").status_code == 200


def test_a_server_that_has_lost_a_device_permanently_is_not_live(server: Server) -> None:
    server.repository.strict = True
    server.health.device_lost = True
    answer = server.get("/v2/health/live")

    assert _error(answer) == (503, "A GPU is lost for this process, which must be restarted")
    assert answer.headers["retry-after"] == "1"
    assert server.get("/v2/health/ready").status_code != 503


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health_is_503_while_the_server_is_exiting(server: Server, path: str) -> None:
    server.health.draining = True

    assert _error(server.get(path)) == (503, "Server exiting")


@pytest.mark.parametrize(
    "path", ["/", "/v2/", "/v3", "/v2/models", "/v2/models/iris/", "/v2/models/iris/versions/one", "/v2/models/a%2Fb/c"]
)
def test_an_unknown_path_is_not_found(server: Server, path: str) -> None:
    assert _error(server.get(path)) == (404, "Not Found")


@pytest.mark.parametrize("path", ["/v2/models%2Firis/infer", "/v%32/models/iris/infer", "/v2/models/iris%2Fpredict"])
def test_an_inference_path_that_the_fast_lane_does_not_recognize_is_not_found(server: Server, path: str) -> None:
    assert _error(server.call("POST", path)) == (404, "Not Found")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2"),
        ("PUT", "/v2/models/iris"),
        ("POST", "/v2/models/iris/versions/1/stats"),
        ("GET", "/v2/models/iris/infer"),
        ("DELETE", "/v2/models/iris/predict"),
        ("GET", "/v2/repository/index"),
        ("GET", "/v2/repository/models/iris/load"),
        ("OPTIONS", "/metrics"),
    ],
)
def test_a_wrong_http_method_is_not_allowed(server: Server, method: str, path: str) -> None:
    assert _error(server.call(method, path)) == (405, "Method Not Allowed")


@pytest.mark.parametrize("path", ["/v2", "/v2/health/live", "/v2/models/iris", "/v2/models/stats", "/metrics"])
def test_head_is_answered_wherever_get_is(server: Server, path: str) -> None:
    assert server.call("HEAD", path).status_code == 200


def test_an_unexpected_exception_is_logged_and_the_client_receives_only_its_id(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> list[Model]:
        raise RuntimeError("a secret")

    server.engine.models = fail  # type: ignore[method-assign]

    status, text = _error(server.get("/v2/models/stats"))

    assert status == 500
    number = re.fullmatch(r"internal error, id ([0-9a-f]{8})", text)
    assert number is not None
    assert number.group(1) in caplog.text


# -- models ----------------------------------------------------------------------------------------------------


def test_model_metadata_lists_the_versions_and_omits_outputs_that_are_not_tensors(server: Server) -> None:
    assert server.get("/v2/models/iris").json() == {
        "name": "iris",
        "versions": ["1", "12"],
        "platform": "fake",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "names", "datatype": "BYTES", "shape": [-1, -1]},
        ],
        "outputs": [{"name": "label", "datatype": "INT64", "shape": [-1]}],
    }


def test_metadata_of_a_version_names_that_version(server: Server) -> None:
    assert server.get("/v2/models/iris/versions/12").json()["versions"] == ["12"]
    assert server.get("/v2/models/iris/versions/0012").json()["versions"] == ["12"]


def test_metadata_of_a_model_without_a_batch_axis_shows_its_shapes_unchanged(server: Server) -> None:
    answer = server.get("/v2/models/plain").json()

    assert answer["inputs"] == [{"name": "x", "datatype": "FP16", "shape": [2, 3]}]
    assert answer["outputs"] == [{"name": "y", "datatype": "BOOL", "shape": []}]


@pytest.mark.parametrize("end", ["", "/config", "/ready"])
def test_an_unknown_model_is_not_found(server: Server, end: str) -> None:
    assert _error(server.get(f"/v2/models/tulip{end}")) == (404, "Request for unknown model: 'tulip' is not found")


@pytest.mark.parametrize("end", ["", "/config", "/ready"])
def test_an_unknown_version_is_not_found(server: Server, end: str) -> None:
    text = "Request for unknown model: 'iris' version 9 is not found"

    assert _error(server.get(f"/v2/models/iris/versions/9{end}")) == (404, text)


@pytest.mark.parametrize("digits", ["9223372036854775808", "9" * 5000])
def test_a_version_beyond_64_bits_is_rejected(server: Server, digits: str) -> None:
    status, text = _error(server.get(f"/v2/models/iris/versions/{digits}/ready"))

    assert status == 400
    assert text.startswith("failed to get model version from specified version string '9")


def test_a_model_name_that_is_not_unicode_is_not_found(server: Server) -> None:
    assert server.get("/v2/models/%ff%fe%ed%a0%80").status_code == 404


def test_model_ready_is_200_and_empty(server: Server) -> None:
    response = server.get("/v2/models/iris/versions/1/ready")

    assert (response.status_code, response.content) == (200, b"")


def test_readiness_of_a_model_that_failed_to_load_is_400(server: Server) -> None:
    assert _error(server.get("/v2/models/broken/ready")) == (400, "Model version not ready")
    assert _error(server.get("/v2/models/broken/versions/1/ready")) == (400, "Model version not ready")


def test_model_config_comes_from_the_repository(server: Server) -> None:
    assert server.get("/v2/models/iris/config").json() == {"name": "iris", "max_batch_size": 8}


# -- statistics ------------------------------------------------------------------------------------------------


def _serve(model: Model, rows: int) -> None:
    now_ns = time.monotonic_ns()
    request = InferRequest(model, [], rows, (), (0,), None)  # type: ignore[arg-type]
    request.start_ns = request.enqueued_ns = now_ns - 100_000
    batch = Batch([request], rows, (), now_ns - 90_000)
    batch.compute_start_ns, batch.compute_end_ns, batch.exec_end_ns = now_ns - 80_000, now_ns - 20_000, now_ns - 10_000
    model.statistics.record_batch(batch, now_ns)


def test_statistics_have_every_member_that_perf_analyzer_reads(server: Server) -> None:
    _serve(server.engine.loaded[0], 3)

    (answer,) = server.get("/v2/models/iris/versions/1/stats").json()["model_stats"]

    assert list(answer) == [
        "name", "version", "last_inference", "inference_count", "execution_count", "inference_stats",
        "response_stats", "batch_stats", "memory_usage", "run_times",
    ]  # fmt: skip
    assert answer["inference_stats"] == {
        "success": {"count": 1, "ns": 100_000},
        "fail": {"count": 0, "ns": 0},
        "queue": {"count": 1, "ns": 10_000},
        "compute_input": {"count": 1, "ns": 10_000},
        "compute_infer": {"count": 1, "ns": 60_000},
        "compute_output": {"count": 1, "ns": 10_000},
        "cache_hit": {"count": 0, "ns": 0},
        "cache_miss": {"count": 0, "ns": 0},
    }
    assert answer["batch_stats"] == [
        {
            "batch_size": 3,
            "compute_input": {"count": 1, "ns": 10_000},
            "compute_infer": {"count": 1, "ns": 60_000},
            "compute_output": {"count": 1, "ns": 10_000},
        }
    ]
    assert (answer["inference_count"], answer["execution_count"]) == (3, 1)
    assert (answer["response_stats"], answer["memory_usage"]) == ({}, [])


def test_statistics_include_the_learned_run_times(server: Server) -> None:
    model = server.engine.loaded[0]
    with model.lock:
        for rows, ns in ((1, 1_000), (16, 9_000), (16, 9_000)):
            model.scheduler.learn(((4,), None), rows, ns, 1)

    (answer,) = server.get("/v2/models/iris/versions/1/stats").json()["model_stats"]

    assert answer["run_times"] == [
        {"shapes": [[4], None], "rows": 1, "runs": 1, "mean_ns": 1_000, "p95_ns": 1_000},
        {"shapes": [[4], None], "rows": 16, "runs": 2, "mean_ns": 9_000, "p95_ns": 9_000},
    ]


def test_last_inference_is_in_milliseconds_since_the_epoch(server: Server) -> None:
    before_ms = time.time_ns() // 1_000_000
    _serve(server.engine.loaded[0], 1)

    first, second = server.get("/v2/models/iris/stats").json()["model_stats"]

    assert before_ms - 1 <= first["last_inference"] <= time.time_ns() // 1_000_000 + 1
    assert second["last_inference"] == 0


def test_statistics_of_a_model_cover_all_its_versions(server: Server) -> None:
    answer = server.get("/v2/models/iris/stats").json()["model_stats"]

    assert [(entry["name"], entry["version"]) for entry in answer] == [("iris", "1"), ("iris", "12")]


def test_statistics_without_a_model_name_cover_all_models(server: Server) -> None:
    assert [entry["name"] for entry in server.get("/v2/models/stats").json()["model_stats"]] == [
        "iris",
        "iris",
        "plain",
    ]


def test_statistics_yield_to_the_event_loop_after_each_model(server: Server) -> None:
    server.engine.loaded = [fake_model(f"m{number}") for number in range(50)]

    async def main() -> int:
        turns = 0
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
            telling = asyncio.ensure_future(client.get("/v2/models/stats"))
            while not telling.done():
                turns += 1
                await asyncio.sleep(0)
        return turns

    assert asyncio.run(main()) >= 50


def test_statistics_of_an_unknown_model_or_version_are_a_bad_request(server: Server) -> None:
    assert _error(server.get("/v2/models/tulip/stats")) == (400, "requested model 'tulip' is not available")
    text = "requested model version is not available for model 'iris'"
    assert _error(server.get("/v2/models/iris/versions/7/stats")) == (400, text)


# -- the repository --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready": false}', b'{"repository": "x"}'])
def test_the_repository_index_lists_ready_and_unavailable_models(server: Server, body: bytes) -> None:
    answer = server.post("/v2/repository/index", body).json()

    assert [row["name"] for row in answer] == ["iris", "iris", "plain", "broken"]
    assert answer[-1] == {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "no such file"}


def test_the_repository_index_can_be_restricted_to_ready_models(server: Server) -> None:
    answer = server.post("/v2/repository/index", b'{"ready": true}').json()

    assert {row["state"] for row in answer} == {"READY"}


@pytest.mark.parametrize(
    "body", [b"[]", b"1", b"null", b'{"ready": 1}', b'{"ready": null}', b"{", b"\xff", b"[" * 60000]
)
def test_a_malformed_index_request_is_a_bad_request(server: Server, body: bytes) -> None:
    assert _error(server.post("/v2/repository/index", body))[0] == 400


def test_a_body_that_is_not_json_is_rejected_with_tritons_message(server: Server) -> None:
    status, text = _error(server.post("/v2/repository/index", b"nonsense"))

    assert status == 400
    assert text.startswith("failed to parse the request JSON buffer: ")


def test_a_body_beyond_the_limit_is_rejected_before_it_is_received_in_full(server: Server) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(10_000):
            sent += 16384
            yield b" " * 16384

    status, text = _error(server.post("/v2/repository/index", chunks()))

    assert status == 400
    assert "65536 bytes" in text
    assert sent <= 10 * 16384


@pytest.mark.parametrize("action", ["load", "unload"])
def test_load_and_unload_are_rejected_unless_model_control_is_explicit(server: Server, action: str) -> None:
    text = "explicit model load / unload is not allowed if polling is enabled"

    assert _error(server.post(f"/v2/repository/models/iris/{action}", b"{}")) == (503, text)


def test_loading_into_a_named_repository_is_not_supported(server: Server) -> None:
    text = "'repository_name' specification is not supported"

    assert _error(server.post("/v2/repository/main/models/iris/load")) == (501, text)


# -- pages -----------------------------------------------------------------------------------------------------


def test_metrics_are_also_served_on_the_main_port(server: Server) -> None:
    response = server.get("/metrics")

    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert 'nv_inference_request_success{model="iris",version="12"} 0\n' in response.text


def test_the_openapi_document_has_inference_and_the_control_plane(server: Server) -> None:
    document = server.get("/openapi.json").json()

    for path in ("/v2", "/v2/models/{model}/versions/{version}/config", "/metrics"):
        assert list(document["paths"][path]) == ["get"]
    infer = document["paths"]["/v2/models/{model}/infer"]["post"]
    assert set(infer["requestBody"]["content"]) == {"application/json", "application/octet-stream"}
    assert "post" in document["paths"]["/v2/models/{model}/versions/{version}/predict"]
    assert [parameter["name"] for parameter in infer["parameters"]] == ["model"]


def test_the_openapi_document_declares_every_variable_part_of_each_path(server: Server) -> None:
    paths = server.get("/openapi.json").json()["paths"]

    assert "/v2/repository/{repository}/models/{model}/load" in paths
    for path, operations in paths.items():
        for operation in operations.values():
            assert [f"{{{parameter['name']}}}" for parameter in operation.get("parameters", [])] == re.findall(
                r"{\w+}", path
            )


def test_the_docs_page_loads_nothing_from_another_host(server: Server) -> None:
    page = server.get("/docs").text

    assert "POST /v2/models/{model}/infer" in page
    assert "<script" not in page
    assert "//" not in page.replace("<!doctype html>", "")


def test_two_servers_share_no_state(server: Server) -> None:
    other = Server(FakeEngine([]), FakeRepository([]))
    other.health.draining = True

    assert other.get("/v2/health/ready").status_code == 503
    assert server.get("/v2/health/ready").status_code == 200
    assert other.get("/v2/models/stats").json() == {"model_stats": []}
