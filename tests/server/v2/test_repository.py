"""The endpoints of the model repository over ASGI: their requests, and the resulting calls of ModelControl."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from penstock.backends.errors import Code, InferError
from penstock.server.errors import HTTP_STATUS
from penstock.server.v2.repository import RepositoryEndpoints

MOST_BYTES = 1 << 20


class Control:
    """Records its calls."""

    def __init__(self, failure: InferError | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure = failure

    async def load(self, name: str, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        self.calls.append((name, config, files))
        if self.failure is not None:
            raise self.failure

    async def unload(self, name: str, *, dependents: bool = False) -> None:
        self.calls.append((name, dependents))

    async def index(self, ready: bool = False) -> list[dict[str, str]]:
        self.calls.append((ready,))
        return [{"name": "a"}]


def post(path: str, body: Any = b"", control: Control | None = None) -> tuple[int, bytes, list[tuple[Any, ...]]]:
    """Return the status, the body, and the calls of ModelControl."""
    control = control or Control()
    app = FastAPI()
    for route in RepositoryEndpoints(control, MOST_BYTES).routes():
        for each in route.paths:
            app.add_api_route(each, route.endpoint, methods=[route.method], response_model=None)

    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
            return await client.post(path, content=body if isinstance(body, bytes) else json.dumps(body))

    try:
        answer = asyncio.run(main())
    except InferError as error:
        return HTTP_STATUS[error.code], error.message.encode(), control.calls
    return answer.status_code, answer.content, control.calls


LOAD = "/v2/repository/models/m/load"
UNLOAD = "/v2/repository/models/m/unload"


class TestLoad:
    @pytest.mark.parametrize("body", [b"", {}, {"parameters": {}}])
    def test_load_accepts_an_empty_body(self, body: Any) -> None:
        assert post(LOAD, body) == (200, b"", [("m", None, {})])

    @pytest.mark.parametrize("size", [0, 5, 400_000])
    def test_load_decodes_small_and_large_base64_files(self, size: int) -> None:
        content = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        parameters = {"config": "{}", "file:1/model.onnx": base64.b64encode(content).decode()}

        assert post(LOAD, {"parameters": parameters}) == (200, b"", [("m", "{}", {"1/model.onnx": content})])

    def test_an_unknown_load_parameter_is_tritons_internal_error(self) -> None:
        status, text, calls = post(LOAD, {"parameters": {"nonsense": "x"}})

        assert (status, text, calls) == (500, b"unexpected error on creating Triton parameter", [])

    @pytest.mark.parametrize("name", ["config", "file:1/model.onnx"])
    @pytest.mark.parametrize("value", [1, True, None, {}, ["x"]])
    def test_a_load_parameter_of_the_wrong_type_is_a_bad_request(self, name: str, value: Any) -> None:
        status, text, calls = post(LOAD, {"parameters": {name: value}})

        assert (status, calls) == (400, [])
        assert text.decode() == f"invalid value type for load parameter '{name}', expected string."

    @pytest.mark.parametrize("text", ["!", "a", "ab=c", "QUJD\n", "ü"])
    def test_a_file_that_is_not_base64_is_a_bad_request(self, text: str) -> None:
        status, message, calls = post(LOAD, {"parameters": {"config": "{}", "file:x": text}})

        assert (status, calls) == (400, [])
        assert b"is not base64" in message

    @pytest.mark.parametrize(
        "body",
        [b"nonsense", b"[]", b"1", b"null", b"[" * 60_000, b"\xff", {"parameters": []}, {"parameters": None}, {"x": 1}],
    )
    def test_a_malformed_load_body_is_a_bad_request(self, body: Any) -> None:
        status, _, calls = post(LOAD, body)

        assert (status, calls) == (400, [])

    def test_a_body_beyond_the_limit_is_rejected_without_being_decoded(self) -> None:
        status, text, calls = post(LOAD, {"parameters": {"file:x": "A" * MOST_BYTES}})

        assert (status, calls) == (400, [])
        assert b"exceeds the maximum of 1048576 bytes" in text

    def test_the_reason_of_a_failed_load_is_returned(self) -> None:
        failure = InferError(Code.INTERNAL, "failed to load 'm', failed to poll from model repository")

        assert post(LOAD, b"", Control(failure))[:2] == (500, failure.message.encode())


class TestUnload:
    @pytest.mark.parametrize(
        ("body", "dependents"),
        [(b"", False), ({"parameters": {"unload_dependents": True}}, True),
         ({"parameters": {"unload_dependents": False}}, False)],
    )  # fmt: skip
    def test_unload_also_unloads_dependents_if_requested(self, body: Any, dependents: bool) -> None:
        assert post(UNLOAD, body) == (200, b"", [("m", dependents)])

    @pytest.mark.parametrize("parameters", [{"unload_dependents": 1}, {"unload_dependents": "true"}, {"x": True}])
    def test_an_invalid_unload_parameter_is_a_bad_request(self, parameters: dict[str, Any]) -> None:
        status, _, calls = post(UNLOAD, {"parameters": parameters})

        assert (status, calls) == (400, [])


@pytest.mark.parametrize(("body", "ready"), [(b"", False), ({"ready": True}, True), ({"ready": False}, False)])
def test_the_index_can_be_restricted_to_ready_models(body: Any, ready: bool) -> None:
    for path in ("/v2/repository/index", "/v2/repository/r/index"):
        assert post(path, body) == (200, b'[{"name":"a"}]', [(ready,)])


@pytest.mark.parametrize("action", ["load", "unload"])
def test_a_named_repository_is_not_supported(action: str) -> None:
    status, text, calls = post(f"/v2/repository/r/models/m/{action}")

    assert (status, text, calls) == (501, b"'repository_name' specification is not supported", [])
