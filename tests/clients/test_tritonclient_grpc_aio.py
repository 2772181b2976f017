"""NVIDIA's asyncio gRPC client against a live server: every public method of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc.auth import BasicAuth
from tritonclient.utils import InferenceServerException

from penstock.backends.backend import Array
from tests.clients import models
from tests.clients.client_errors import refused_later
from tests.clients.gated_onnxruntime import at_a_gate, cancelled, waiting
from tests.clients.tensors import VALUES, same, texts
from tests.fakes import Gate
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

T = TypeVar("T")
Run = Callable[[Callable[[Any], Awaitable[T]]], T]
ASCENDING = np.arange(16, dtype=np.int32).reshape(1, 16)
ONES = np.ones((1, 16), np.int32)
WAYS = [None, "gzip", "deflate"]
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    for write in (models.write_examples, models.write_identities, models.write_shapes):
        write(root)
    with live_server(root, allow_client_shm=True) as server:
        yield server


@pytest.fixture
def run(live: Live) -> Run[Any]:
    return lambda work: using(live, work)


def using(live: Live, work: Callable[[Any], Awaitable[T]]) -> T:
    """Run a coroutine function with a client."""

    async def main() -> T:
        async with triton.InferenceServerClient(live.grpc_address) as client:
            async with asyncio.timeout(PATIENCE_S):
                return await work(client)

    return asyncio.run(main())


def input_of(name: str, array: Array, datatype: str) -> Any:
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def pair(second: Array = ONES) -> list[Any]:
    return [input_of("INPUT0", ASCENDING, "INT32"), input_of("INPUT1", second, "INT32")]


def test_health_metadata_config_index_and_statistics_are_answered(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("simple")
        assert not await client.is_model_ready("wrong_model_name")
        assert (await client.get_server_metadata()).name == "triton"
        assert (await client.get_model_metadata("simple", as_json=True))["name"] == "simple"
        assert (await client.get_model_config("simple")).config.max_batch_size == 8
        index = await client.get_model_repository_index(as_json=True)
        assert {"name": "simple", "version": "1", "state": "READY"} in index["models"]
        assert len((await client.get_inference_statistics("simple")).model_stats) == 1

    run(work)


def test_errors_have_a_status_and_a_message(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        unknown = ("StatusCode.NOT_FOUND", "Request for unknown model: 'nope' is not found")
        assert await refused_later(client.get_model_metadata("nope")) == unknown
        assert await refused_later(client.infer("nope", pair())) == unknown
        text = "explicit model load / unload is not allowed if polling is enabled"
        assert await refused_later(client.load_model("simple")) == ("StatusCode.UNAVAILABLE", text)
        assert await refused_later(client.unload_model("simple")) == ("StatusCode.UNAVAILABLE", text)

    run(work)


def test_settings_regions_and_plugins_are_supported(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        client.register_plugin(BasicAuth("user", "secret"))
        assert client.plugin() is not None
        rate = await client.update_trace_settings("simple", {"trace_rate": "9"})
        assert list(rate.settings["trace_rate"].value) == ["9"]
        assert list((await client.get_trace_settings("simple")).settings["trace_rate"].value) == ["9"]
        await client.update_trace_settings("simple", {"trace_rate": None})
        assert (await client.update_log_settings({"log_verbose_level": 0})).settings["log_info"].bool_param
        assert (await client.get_log_settings(as_json=True))["settings"]["log_info"]["bool_param"]
        path = Path("/dev/shm", "grpc_aio_test")
        path.write_bytes(bytes(64))
        try:
            await client.register_system_shared_memory("aio", "/" + path.name, 64)
            assert (await client.get_system_shared_memory_status()).regions["aio"].byte_size == 64
            await client.unregister_system_shared_memory("aio")
        finally:
            path.unlink()
        assert not (await client.get_cuda_shared_memory_status()).regions
        await client.unregister_cuda_shared_memory()
        assert (await refused_later(client.register_cuda_shared_memory("g", b"x" * 64, 0, 64)))[
            0
        ] != "StatusCode.INTERNAL"
        client.unregister_plugin()

    run(work)


@pytest.mark.parametrize("way", WAYS)
def test_many_parallel_requests_are_answered(run: Run[None], way: str | None) -> None:
    async def one(client: Any, number: int) -> None:
        result = await client.infer(
            "simple", pair(ONES * number), request_id=str(number), compression_algorithm=way, headers={"a": "b"},
            client_timeout=PATIENCE_S, parameters={"mine": 1.5},
        )  # fmt: skip
        assert result.get_response().id == str(number)
        assert (result.as_numpy("OUTPUT0") == ASCENDING + number).all()

    async def work(client: Any) -> None:
        await asyncio.gather(*(one(client, number) for number in range(50)))

    run(work)


def test_every_datatype_is_returned_unchanged(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        for datatype, values in VALUES.items():
            for _ in range(2):
                result = await client.infer(f"identity_{datatype}", [input_of("x", values, datatype)])
                assert same(datatype, result.as_numpy("y"), values), datatype

    run(work)


@pytest.mark.parametrize("way", WAYS)
def test_a_stream_is_answered_in_order(run: Run[None], way: str | None) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(20):
            yield {
                "model_name": "nope" if number == 7 else "simple",
                "inputs": pair(ONES * number),
                "request_id": str(number),
            }

    async def work(client: Any) -> None:
        number = 0
        async for result, error in client.stream_infer(requests(), compression_algorithm=way):
            if number == 7:
                assert "unknown model: 'nope'" in str(error)
            else:
                assert error is None
                assert result.get_response().id == str(number)
            number += 1
        assert number == 20

    run(work)


def test_strings_are_returned_unchanged(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        words = np.array([[b"a", b"", b"\0\n"]], np.object_)
        found = (await client.infer("identity_BYTES", [input_of("x", words, "BYTES")])).as_numpy("y")
        assert found.tolist() == words.tolist()
        again = np.array([["naïve"]], np.object_)
        assert texts((await client.infer("identity_BYTES", [input_of("x", again, "BYTES")])).as_numpy("y")) == ["naïve"]

    run(work)


def test_models_are_loaded_and_unloaded_in_explicit_mode(tmp_path: Path) -> None:
    models.write_identity(tmp_path, "one", "")

    async def work(client: Any) -> None:
        assert not await client.is_model_ready("one")
        await client.load_model("one", config='{"max_batch_size": 3}')
        assert await client.is_model_ready("one")
        await client.unload_model("one", unload_dependents=True)
        assert not await client.is_model_ready("one")

    with live_server(tmp_path, model_control_mode="explicit") as live:
        using(live, work)


class TestDeadlinesAndCancellation:
    @pytest.fixture
    def gate(self) -> Gate:
        return Gate(list)

    @pytest.fixture
    def live(self, tmp_path: Path, gate: Gate) -> Iterator[Live]:
        yield from at_a_gate(tmp_path, gate)

    def test_deadlines_and_canceled_tasks_free_their_place_in_the_queue(self, live: Live, gate: Gate) -> None:
        row = [input_of("x", np.ones((1, 2), np.float32), "FP32")]

        async def work(client: Any) -> None:
            first = asyncio.ensure_future(client.infer("m", row))
            await asyncio.to_thread(live.call, gate.entered())
            late = await refused_later(client.infer("m", row, client_timeout=0.2))
            assert late == ("StatusCode.DEADLINE_EXCEEDED", "Deadline Exceeded")
            second = asyncio.ensure_future(client.infer("m", row))
            await asyncio.to_thread(live.call, waiting(live, 1))
            second.cancel()
            await asyncio.to_thread(live.call, waiting(live, 0))
            assert await asyncio.to_thread(live.call, cancelled(live)) == 2
            gate.open()
            assert (await first).as_numpy("y").tolist() == [[1, 1]]

        using(live, work)

    def test_a_canceled_stream_cancels_its_requests(self, live: Live, gate: Gate) -> None:
        row = [input_of("x", np.ones((1, 2), np.float32), "FP32")]

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for _ in range(3):
                yield {"model_name": "m", "inputs": row}
            await asyncio.sleep(PATIENCE_S)

        async def work(client: Any) -> None:
            answers = client.stream_infer(requests())
            first = asyncio.ensure_future(anext(answers))
            await asyncio.to_thread(live.call, gate.entered())
            assert answers.cancel()
            with pytest.raises((asyncio.CancelledError, StopAsyncIteration, InferenceServerException)):
                await first
            await asyncio.to_thread(live.call, waiting(live, 0))

        using(live, work)
