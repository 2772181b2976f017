"""Other calls of tritonclient's two HTTP clients: shared memory, trace and log settings, plugins, prepared bodies."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http
import tritonclient.http.aio
from tritonclient.http import InferInput
from tritonclient.utils import InferenceServerException
from tritonclient.utils import shared_memory as shm

from tests.clients import models
from tests.live import Live, live_server

pytestmark = pytest.mark.slow


class Waited:
    """The asyncio client with the interface of the sync one: each call is awaited on its own event loop."""

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = self._loop.run_until_complete(self._make(address))

    @staticmethod
    async def _make(address: str) -> Any:
        return tritonclient.http.aio.InferenceServerClient(address)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(method):
            return method
        return lambda *args, **named: self._loop.run_until_complete(method(*args, **named))

    def end(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_examples(root)
    trace = f"triton,file={tmp_path_factory.mktemp('traces')}/trace.json"
    with live_server(root, allow_client_shm=True, trace_config=(trace,)) as server:
        yield server


@pytest.fixture(params=["sync", "asyncio"])
def client(request: pytest.FixtureRequest, live: Live) -> Iterator[Any]:
    if request.param == "sync":
        with tritonclient.http.InferenceServerClient(live.address) as new_client:
            yield new_client
    else:
        waited = Waited(live.address)
        yield waited
        waited.end()


@pytest.fixture
def region() -> Iterator[tuple[str, str, Any]]:
    name = f"r{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(name, f"/{name}", 64)
    yield name, f"/{name}", handle
    shm.destroy_shared_memory_region(handle)


def test_system_shared_memory_is_registered_listed_and_unregistered(client: Any, region: tuple[str, str, Any]) -> None:
    name, key, _ = region
    client.register_system_shared_memory(name, key, 64)

    listed = client.get_system_shared_memory_status()
    assert {"name": name, "key": key, "offset": 0, "byte_size": 64} in listed
    assert client.get_system_shared_memory_status(name) == [listed[-1]]

    client.unregister_system_shared_memory(name)
    assert client.get_system_shared_memory_status() == []
    client.register_system_shared_memory(name, key, 32, offset=32)
    client.unregister_system_shared_memory()
    assert client.get_system_shared_memory_status() == []


def test_cuda_shared_memory_can_be_listed_and_unregistered_without_cuda(client: Any) -> None:
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("nothing")
    with pytest.raises(InferenceServerException):
        client.register_cuda_shared_memory("c", b"no handle", 0, 64)


def test_trace_settings_are_read_and_changed(client: Any) -> None:
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    changed = client.update_trace_settings("simple", {"trace_level": ["TIMESTAMPS"], "trace_rate": "7"})
    assert (changed["trace_level"], changed["trace_rate"]) == (["TIMESTAMPS"], "7")
    assert client.get_trace_settings("simple")["trace_rate"] == "7"
    cleared = client.update_trace_settings("simple", {"trace_level": None, "trace_rate": None})
    assert cleared["trace_level"] == ["OFF"]


def test_log_settings_are_read_and_changed(client: Any) -> None:
    before = client.get_log_settings()
    assert client.update_log_settings({"log_warning": False})["log_warning"] is False
    assert client.update_log_settings({"log_warning": before["log_warning"]}) == before


def test_headers_added_by_a_plugin_are_accepted(client: Any) -> None:
    class Plugin(tritonclient.http.InferenceServerClientPlugin):  # type: ignore[misc]
        def __call__(self, request: Any) -> None:
            request.headers["x-who"] = "me"

    client.register_plugin(plugin := Plugin())
    assert client.plugin() is plugin
    assert client.is_server_live()
    client.unregister_plugin()


@pytest.mark.parametrize("binary", [True, False])
def test_a_request_body_generated_by_the_client_is_accepted(live: Live, binary: bool) -> None:
    triton_client = tritonclient.http.InferenceServerClient
    inputs = []
    for name in ("INPUT0", "INPUT1"):
        inputs.append(InferInput(name, [1, 16], "INT32"))
        inputs[-1].set_data_from_numpy(np.ones((1, 16), np.int32), binary_data=binary)
    body, json_bytes = triton_client.generate_request_body(inputs)
    headers = {} if json_bytes is None else {"Inference-Header-Content-Length": str(json_bytes)}
    with triton_client(live.address) as client:
        answer = client._post("v2/models/simple/infer", body, headers, None)
        length = answer.get("Inference-Header-Content-Length")
        result = triton_client.parse_response_body(answer.read(), header_length=length and int(length))

    assert result.as_numpy("OUTPUT0").tolist() == [[2] * 16]
