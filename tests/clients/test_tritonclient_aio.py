"""NVIDIA's asyncio HTTP client against a live server. It accepts compressed answers in every call, as aiohttp does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import numpy as np
import pytest
import tritonclient.http.aio as triton

from tests.clients.client_errors import refused_later
from tests.clients.tensors import ONLY_BINARY, VALUES, input_of, output_of, pair, same, texts
from tests.live import Live

pytestmark = pytest.mark.slow

T = TypeVar("T")
Run = Callable[[Callable[[Any], Awaitable[T]]], T]
ASCENDING = np.arange(16, dtype=np.int32).reshape(1, 16)
MINUS_ONES = np.full((1, 16), -1, np.int32)
WAYS = [None, "gzip", "deflate"]


@pytest.fixture
def run(live: Live) -> Run[Any]:
    """Run a coroutine function with a client."""

    def runner(work: Callable[[Any], Awaitable[T]]) -> T:
        async def main() -> T:
            async with triton.InferenceServerClient(live.address) as client:
                return await work(client)

        return asyncio.run(main())

    return runner


def test_health_metadata_config_index_and_statistics_are_answered(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        query = {"test_1": 1, "test_2": 2}
        assert await client.is_server_live(query_params=query)
        assert await client.is_server_ready()
        assert await client.is_model_ready("simple", query_params=query)
        assert not await client.is_model_ready("wrong_model_name")
        assert (await client.get_server_metadata())["name"] == "triton"
        assert (await client.get_model_metadata("simple", query_params=query))["name"] == "simple"
        assert (await client.get_model_metadata("versions", "10"))["versions"] == ["10"]
        assert (await client.get_model_config("simple"))["max_batch_size"] == 8
        assert {"name": "simple", "version": "1", "state": "READY"} in await client.get_model_repository_index()
        assert len((await client.get_inference_statistics("simple"))["model_stats"]) == 1
        assert len((await client.get_inference_statistics())["model_stats"]) > 1

    run(work)


def test_errors_have_a_status_and_a_message(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        unknown = ("404", "Request for unknown model: 'nope' is not found")
        inputs = pair(ASCENDING, MINUS_ONES)
        assert await refused_later(client.get_model_metadata("nope")) == unknown
        assert await refused_later(client.get_model_config("nope")) == unknown
        assert await refused_later(client.infer("nope", inputs)) == unknown
        assert (await refused_later(client.get_inference_statistics("nope")))[0] == "400"
        text = "explicit model load / unload is not allowed if polling is enabled"
        assert await refused_later(client.load_model("simple")) == ("503", text)
        assert await refused_later(client.unload_model("simple")) == ("503", text)
        status, text = await refused_later(client.infer("simple", inputs[:1], request_id="8"))
        assert status == "400"
        assert text.startswith("[request id: 8] expected 2 inputs but got 1 inputs for model 'simple'.")

    run(work)


@pytest.mark.parametrize(("request_way", "response_way"), [*itertools.product(WAYS, WAYS)])
def test_simple_adds_and_subtracts_alone_and_in_parallel(
    run: Run[None], request_way: str | None, response_way: str | None
) -> None:
    async def one(client: Any, outputs: list[Any] | None) -> None:
        result = await client.infer(
            "simple", pair(ASCENDING, MINUS_ONES, binary=(False, True)), outputs=outputs, query_params={"test_1": 1},
            request_id="7", request_compression_algorithm=request_way, response_compression_algorithm=response_way,
        )  # fmt: skip

        assert result.get_response()["id"] == "7"
        assert np.array_equal(result.as_numpy("OUTPUT0"), ASCENDING + MINUS_ONES)
        assert np.array_equal(result.as_numpy("OUTPUT1"), ASCENDING - MINUS_ONES)

    async def work(client: Any) -> None:
        named = [output_of("OUTPUT0"), output_of("OUTPUT1", binary=False)]
        await one(client, named)
        await one(client, None)
        await asyncio.gather(*(one(client, outputs) for outputs in [named, None] * 10))

    run(work)


@pytest.mark.parametrize("times", [1, 200])
def test_every_datatype_is_returned_unchanged_in_any_mixture_of_encodings(run: Run[None], times: int) -> None:
    async def one(client: Any, datatype: str, ways: tuple[bool, bool | None]) -> None:
        sent = np.tile(VALUES[datatype], (1, times))
        outputs = None if ways[1] is None else [output_of("y", binary=ways[1])]
        result = await client.infer(f"identity_{datatype}", [input_of("x", sent, binary=ways[0])], outputs=outputs)

        assert same(datatype, result.as_numpy("y"), sent), (datatype, ways)

    async def work(client: Any) -> None:
        await asyncio.gather(
            *(
                one(client, datatype, ways)
                for datatype in VALUES
                for ways in itertools.product([True, False], [True, False, None])
                if datatype not in ONLY_BINARY or False not in ways
            )
        )

    run(work)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_tensors_are_returned_unchanged(run: Run[None], shape: tuple[int, int]) -> None:
    async def work(client: Any) -> None:
        for datatype, values in VALUES.items():
            sent = np.empty(shape, values.dtype)
            result = await client.infer(f"identity_{datatype}", [input_of("x", sent)])

            assert same(datatype, result.as_numpy("y"), sent)

    run(work)


def test_strings_are_added_and_subtracted(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        numbers = np.array([str(each) for each in range(16)], np.object_).reshape(1, 16)
        inputs = pair(numbers, numbers, binary=(True, False))
        result = await client.infer(
            "simple_string", inputs, outputs=[output_of("OUTPUT0"), output_of("OUTPUT1", binary=False)]
        )

        assert texts(result.as_numpy("OUTPUT0")) == [str(2 * i) for i in range(16)]
        assert texts(result.as_numpy("OUTPUT1")) == ["0"] * 16

    run(work)


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # tritonclient does
def test_small_requests_are_answered_while_large_tensors_are_transferred(run: Run[None]) -> None:
    async def small(client: Any) -> None:
        for i in range(20):
            row = np.full((1, 16), i, np.int32)
            result = await client.infer("simple", pair(row, ASCENDING))

            assert np.array_equal(result.as_numpy("OUTPUT0"), row + ASCENDING)

    async def large(client: Any, *, binary: bool) -> None:
        sent = (np.arange(20 << 18 if binary else 60_000, dtype=np.float32) % 1000).reshape(1, -1)
        inputs = [input_of("x", sent, binary=binary)]
        result = await client.infer("identity_FP32", inputs, outputs=[output_of("y", binary=binary)])

        assert np.array_equal(result.as_numpy("y"), sent)

    async def work(client: Any) -> None:
        await asyncio.gather(large(client, binary=True), large(client, binary=False), small(client), small(client))

    run(work)


def test_a_canceled_call_does_not_affect_others(run: Run[None]) -> None:
    async def work(client: Any) -> None:
        inputs = pair(ASCENDING, MINUS_ONES)
        calls = [asyncio.ensure_future(client.infer("simple", inputs)) for _ in range(50)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)

        assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
        for result in results[1::2]:
            assert np.array_equal(result.as_numpy("OUTPUT0"), ASCENDING + MINUS_ONES)

    run(work)
