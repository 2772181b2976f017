"""Restricted APIs: the flag, the check, the category of every path and RPC, and no way to bypass them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.server.grpc.method import Call, Method, Reader, Status
from penstock.server.http.head import HttpError
from penstock.server.listening.mapped_buffer import Body
from penstock.server.restricted import (
    CATEGORIES,
    GRPC_CATEGORIES,
    GRPC_PREFIX,
    RestrictedApis,
    category_of,
    restricted_methods,
    restriction_text,
)
from penstock.server.settings import SettingError, Settings
from tests.clients import models
from tests.clients.tensors import document
from tests.live import Live, live_server

PATHS = {
    "/v2/health/live": "health", "/v2/health/ready": "health", "/v2/models/m/ready": "health",
    "/v2/models/m/versions/1/ready": "health",
    "/v2": "metadata", "/v2/models/m": "metadata", "/v2/models/m/versions/1": "metadata",
    "/v2/models/m/infer": "inference", "/v2/models/m/versions/1/infer": "inference",
    "/v2/models/m/predict": "inference",
    "/v2/models/m/generate": "inference", "/v2/models/m/versions/1/generate_stream": "inference",
    "/v2/models/m/config": "model-config", "/v2/models/stats": "statistics", "/v2/models/m/stats": "statistics",
    "/v2/models/m/versions/2/stats": "statistics", "/metrics": "statistics",
    "/v2/repository/index": "model-repository", "/v2/repository/models/m/load": "model-repository",
    "/v2/repository/models/m/unload": "model-repository",
    "/v2/systemsharedmemory/status": "shared-memory", "/v2/systemsharedmemory/region/r/register": "shared-memory",
    "/v2/cudasharedmemory/unregister": "shared-memory",
    "/v2/trace/setting": "trace", "/v2/models/m/trace/setting": "trace", "/v2/logging": "logging",
}  # fmt: skip


class FakeCall:
    """A Call that records how it was rejected."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        self.metadata = metadata
        self.deadline_ns = 0
        self.context: Any = None
        self.on_cancel: Callable[[], None] | None = None
        self.ended = False
        self.writable = True
        self.refused: list[tuple[Status, str]] = []

    def answer(self, message: Body) -> None: ...

    def abort(self, status: Status, text: str, pushback_ms: int = 0) -> None:
        self.refused.append((status, text))

    def count_error(self, status: Status) -> None: ...

    def send(self, message: Body) -> None: ...

    def finish(self) -> None: ...

    async def drain(self) -> None: ...


def of(fields: Mapping[str, str]) -> Callable[[str], str | None]:
    """Return a function that gets a request header by name."""
    return fields.get


# -- the flag --------------------------------------------------------------------------------------------------


def test_a_rule_names_categories_a_header_and_its_value() -> None:
    restricted = RestrictedApis.parse(["health,trace:Admin-Key=a=b", "logging:other=x"])

    assert restricted.check("health", of({"admin-key": "a=b"})) is None
    assert restricted.check("trace", of({"admin-key": "a"})) == "admin-key"
    assert restricted.check("logging", of({})) == "other"
    assert restricted.check("inference", of({})) is None


def test_nothing_is_restricted_without_a_rule() -> None:
    restricted = RestrictedApis.parse([])

    assert not restricted
    assert {restricted.check(category, of({})) for category in CATEGORIES} == {None}


@pytest.mark.parametrize(
    "entries",
    [
        ["health"], ["health:key"], ["health:=v"], ["health:key="], [":key=v"], ["helth:key=v"], ["health,:key=v"],
        ["health:a key=v"], ["health:key=v\u00e9"], ["health:key=a\x01b"], ["health,health:key=v"],
        ["health:a=v", "health:b=w"],
    ],
)  # fmt: skip
def test_an_invalid_restriction_rule_is_a_setting_error(entries: list[str]) -> None:
    with pytest.raises(SettingError, match="--http-restricted-api: "):
        Settings(http_restricted_api=tuple(entries))
    with pytest.raises(SettingError, match="--grpc-restricted-protocol: "):
        Settings(grpc_restricted_protocol=tuple(entries))


def test_an_error_in_a_restriction_rule_does_not_quote_the_secret() -> None:
    with pytest.raises(ValueError, match="unknown restricted api 'everything'") as raised:
        RestrictedApis.parse(["everything:key=hunter2"])

    assert "hunter2" not in str(raised.value)
    with pytest.raises(ValueError, match="unknown restricted protocol 'everything'"):
        RestrictedApis.parse(["everything:key=hunter2"], GRPC_PREFIX)
    with pytest.raises(ValueError, match="api 'health' can not be specified in multiple config groups"):
        RestrictedApis.parse(["trace,health:a=v", "health:b=w"])


# -- the check -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", "secre", "secrets", "Secret", "secr\u00e9t", "\ud800"])
def test_only_the_exact_header_value_passes(header: str | None) -> None:
    assert RestrictedApis.parse(["health:key=secret"]).check("health", lambda name: header) == "key"


def test_header_fields_of_the_fast_lane_are_compared_as_bytes() -> None:
    restricted = RestrictedApis.parse(["inference:key=secret"])
    restricted.require("inference", {b"key": b"secret"})
    restricted.require("health", {})

    with pytest.raises(HttpError) as raised:
        restricted.require("inference", {b"key": b"\xff"})
    assert (raised.value.status, raised.value.text) == (403, "This API is restricted, expecting header 'key'")


@pytest.mark.parametrize(("path", "category"), PATHS.items())
def test_every_path_has_its_category(path: str, category: str) -> None:
    assert category_of(path) == category


def test_pages_without_model_information_have_no_category() -> None:
    assert {category_of(path) for path in ("/docs", "/openapi.json", "/", "/v2/models/m/other")} == {None}


# -- gRPC ------------------------------------------------------------------------------------------------------


def test_every_rpc_has_its_category() -> None:
    rpcs = [path for path in GRPC_CATEGORIES if path.startswith("/inference.GRPCInferenceService/")]

    assert len(rpcs) == 20
    assert set(GRPC_CATEGORIES.values()) == set(CATEGORIES)


def methods(messages_read: list[str]) -> dict[str, Method]:
    class Taking:
        def on_message(self, message: bytes) -> None:
            messages_read.append("message")

        def on_half_close(self) -> None:
            messages_read.append("end")

    def unary(call: Call, message: bytes) -> None:
        messages_read.append("unary")

    def streaming(call: Call) -> Reader:
        messages_read.append("stream")
        return Taking()

    service = "/inference.GRPCInferenceService/"
    all_methods = (
        Method(service + "ModelInfer", unary=unary),
        Method(service + "ModelStreamInfer", streaming=streaming),
        Method(service + "ServerLive", unary=unary),
    )
    return {method.path: method for method in all_methods}


def test_a_restricted_rpc_is_rejected_before_any_message_is_read() -> None:
    messages_read: list[str] = []
    restricted = RestrictedApis.parse(["inference:key=secret"], GRPC_PREFIX)
    guarded = restricted_methods(methods(messages_read), restricted)
    one, other = FakeCall({}), FakeCall({"key": "secret"})
    unary, streaming = (
        guarded["/inference.GRPCInferenceService/" + name] for name in ("ModelInfer", "ModelStreamInfer")
    )

    assert unary.unary is not None
    assert streaming.streaming is not None
    unary.unary(one, b"")
    reader = streaming.streaming(other)
    reader.on_message(b"x")
    reader.on_half_close()

    text = "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
    assert one.refused == other.refused == [(Status.UNAVAILABLE, text)]
    assert messages_read == []


def test_every_call_to_a_restricted_rpc_needs_the_header() -> None:
    messages_read: list[str] = []
    restricted = RestrictedApis.parse(["inference:key=secret"], GRPC_PREFIX)
    unary = restricted_methods(methods(messages_read), restricted)["/inference.GRPCInferenceService/ModelInfer"].unary
    metadata = {GRPC_PREFIX + "key": "secret"}

    assert unary is not None
    for sent in (metadata, metadata, {}, metadata, {GRPC_PREFIX + "key": "wrong"}):
        unary(FakeCall(sent), b"")

    assert messages_read == ["unary"] * 3


def test_unrestricted_rpcs_are_left_unchanged() -> None:
    unrestricted = methods([])
    path = "/inference.GRPCInferenceService/ServerLive"

    assert restricted_methods(unrestricted, RestrictedApis.parse(["inference:k=v"]))[path] is unrestricted[path]
    assert restricted_methods(unrestricted, RestrictedApis()) == unrestricted


# -- a server --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_shapes(root)
    rules = (
        "health,metadata,inference,shared-memory,model-config,model-repository,statistics,trace,logging:key=secret",
    )
    with live_server(root, http_restricted_api=rules) as server:
        yield server


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_no_endpoint_answers_without_the_header(live: Live, path: str, method: str) -> None:
    answer = httpx.request(method, live.url + path, headers={"key": "wrong"})

    assert answer.status_code in {403, 405}
    if answer.status_code == 403 and method != "HEAD":
        assert answer.json() == {"error": restriction_text("key")}


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2", "/v2/models/free", "/v2/models/free/stats", "/v2/logging"])
@pytest.mark.parametrize("change", ["%0a", "%0A", "?x=1", "#x", ";x", "/", "//", "%2f", "/."])
def test_no_spelling_of_a_path_bypasses_the_restriction(live: Live, path: str, change: str) -> None:
    assert httpx.get(live.url + path + change).status_code in {403, 404}


def test_requests_with_the_header_are_served_as_usual(live: Live) -> None:
    headers = {"Key": "secret"}

    assert httpx.get(live.url + "/v2/health/live", headers=headers).status_code == 200
    body = document(np.ones((1, 1, 1), np.float32))
    for wrong in (None, {"key": "no"}):
        refused = httpx.post(live.url + "/v2/models/free/infer", json=body, headers=wrong)
        assert (refused.status_code, refused.json()) == (403, {"error": restriction_text("key")})
    for _ in range(2):
        assert httpx.post(live.url + "/v2/models/free/infer", json=body, headers=headers).status_code == 200


def test_the_metrics_port_is_not_restricted(live: Live) -> None:
    assert httpx.get(f"http://127.0.0.1:{live.metrics_port}/metrics").status_code == 200
