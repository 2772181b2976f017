"""Statistics and configuration as perf_analyzer reads them: present and absent members, and their changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.clients import models
from tests.clients.tensors import document, input_of
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

DURATIONS = (
    "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
)  # fmt: skip
COMPUTE = ("compute_input", "compute_infer", "compute_output")
ROW = np.ones((1, models.HEAVY_WIDTH), np.float32)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    for write in (models.write_examples, models.write_shapes, models.write_heavy):
        write(root)
    with live_server(root) as server:
        yield server


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[Any]:
    with triton.InferenceServerClient(live.address) as new_client:
        yield new_client


def statistics(client: Any, model: str, version: str = "") -> dict[str, Any]:
    (entry,) = client.get_inference_statistics(model, version)["model_stats"]
    found: dict[str, Any] = entry
    return found


def moved(client: Any, model: str, work: Any) -> tuple[dict[str, dict[str, int]], int, int]:
    """Do some work; return the changes of each duration, inference_count and execution_count."""
    before = statistics(client, model)
    work()
    after = statistics(client, model)
    durations = {
        name: {each: after["inference_stats"][name][each] - before["inference_stats"][name][each] for each in both}
        for name, both in after["inference_stats"].items()
    }
    counts = (after[name] - before[name] for name in ("inference_count", "execution_count"))
    return durations, *counts


def numbers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif not isinstance(value, str):
        yield value


class TestStatistics:
    @pytest.mark.parametrize("model", ["simple", "heavy", "whole", "mixed"])
    def test_every_member_is_present_from_the_start_and_every_number_is_an_integer(
        self, client: Any, model: str
    ) -> None:
        entry = statistics(client, model)

        assert {
            "name", "version", "last_inference", "inference_count", "execution_count", "inference_stats", "batch_stats",
            "memory_usage", "response_stats", "run_times",
        } == entry.keys()  # fmt: skip
        assert isinstance(entry["version"], str)
        assert tuple(entry["inference_stats"]) == DURATIONS
        assert all(duration.keys() == {"count", "ns"} for duration in entry["inference_stats"].values())
        assert all(type(number) is int and number >= 0 for number in numbers(entry))

    def test_all_models_are_listed_when_none_is_named(self, client: Any) -> None:
        entries = client.get_inference_statistics()["model_stats"]
        ready = [entry for entry in client.get_model_repository_index() if entry["state"] == "READY"]

        assert [(entry["name"], entry["version"]) for entry in entries] == [
            (entry["name"], entry["version"]) for entry in ready
        ]

    def test_versions_are_counted_separately(self, client: Any) -> None:
        before = [statistics(client, "versions", version)["inference_count"] for version in ("1", "2", "10")]
        client.infer("versions", [input_of("x", np.ones((3, 1), np.float32))], "2")
        after = [statistics(client, "versions", version)["inference_count"] for version in ("1", "2", "10")]

        assert [each - old for each, old in zip(after, before, strict=True)] == [0, 3, 0]

    @pytest.mark.parametrize("model", ["heavy", "free"])
    def test_one_request_increments_every_counter_by_one(self, client: Any, model: str) -> None:
        inputs = [input_of("x", ROW if model == "heavy" else ROW[np.newaxis])]
        durations, inferences, executions = moved(client, model, lambda: client.infer(model, inputs))

        assert {name: both["count"] for name, both in durations.items()} == {
            name: int(name in {"success", "queue", *COMPUTE}) for name in DURATIONS
        }
        assert (inferences, executions) == (1, 1)

    def test_a_request_with_several_rows_is_one_execution_and_as_many_inferences(self, client: Any) -> None:
        work = lambda: client.infer("heavy", [input_of("x", np.tile(ROW, (5, 1)))])  # noqa: E731
        durations, inferences, executions = moved(client, "heavy", work)

        assert (durations["success"]["count"], inferences, executions) == (1, 5, 1)
        sizes = [entry["batch_size"] for entry in statistics(client, "heavy")["batch_stats"]]
        assert 5 in sizes
        assert sizes == sorted(set(sizes))

    def test_a_model_without_a_batch_axis_counts_one_inference_per_request(self, client: Any) -> None:
        work = lambda: client.infer("whole", [input_of("x", np.ones((2, 3), np.float32))])  # noqa: E731
        _, inferences, executions = moved(client, "whole", work)

        assert (inferences, executions) == (1, 1)
        assert [entry["batch_size"] for entry in statistics(client, "whole")["batch_stats"]] == [1]

    def test_the_durations_of_the_phases_sum_to_at_most_the_total(self, client: Any) -> None:
        durations, _, _ = moved(client, "heavy", lambda: client.infer("heavy", [input_of("x", ROW)]))

        assert all(durations[each]["ns"] > 0 for each in ("success", "compute_infer"))
        assert sum(durations[each]["ns"] for each in ("queue", *COMPUTE)) <= durations["success"]["ns"]

    def test_requests_under_load_share_executions(self, client: Any, live: Live) -> None:
        requests = 192
        durations, inferences, executions = moved(client, "heavy", lambda: _load(live, requests, 32))

        assert {durations[each]["count"] for each in ("success", "queue", *COMPUTE)} == {requests}
        assert inferences == requests
        assert 0 < executions < requests / 2
        assert all(durations[each]["ns"] > 0 for each in ("success", "queue", *COMPUTE))

    def test_batch_statistics_sum_to_the_totals(self, client: Any, live: Live) -> None:
        _load(live, 64, 16)
        entry = statistics(client, "heavy")
        batches = entry["batch_stats"]

        assert sum(each["compute_infer"]["count"] for each in batches) == entry["execution_count"]
        assert sum(each["batch_size"] * each["compute_infer"]["count"] for each in batches) == entry["inference_count"]
        for each in batches:
            assert each.keys() == {"batch_size", *COMPUTE}
            assert len({each[part]["count"] for part in COMPUTE}) == 1

    def test_a_rejected_request_does_not_increment_success(self, client: Any) -> None:
        def work() -> None:
            with pytest.raises(InferenceServerException):
                client.infer("heavy", [input_of("x", ROW[:, :7])])

        durations, inferences, executions = moved(client, "heavy", work)

        assert (durations["success"]["count"], inferences, executions) == (0, 0, 0)

    def test_last_inference_is_in_milliseconds_since_the_epoch(self, client: Any) -> None:
        client.infer("heavy", [input_of("x", ROW)])
        first = statistics(client, "heavy")["last_inference"]
        client.infer("heavy", [input_of("x", ROW)])
        second = statistics(client, "heavy")["last_inference"]

        assert 1_600_000_000_000 < first <= second < 100_000_000_000_000


def _load(live: Live, requests: int, clients: int) -> None:
    """Send distinct rows at a concurrency, and check that each gets its own answer."""

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        url = f"{live.url}/v2/models/heavy/infer"
        async with session.post(url, json=document(ROW * number, id=str(number))) as response:
            answer = await response.json()
        assert answer["id"] == str(number)
        assert set(answer["outputs"][0]["data"]) == {float(number)}

    async def main() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
            await asyncio.gather(*(one(session, number) for number in range(requests)))

    asyncio.run(main())


class TestConfiguration:
    """perf_analyzer checks which members are present, and expects each name of the config in the metadata."""

    @pytest.mark.parametrize("model", ["simple", "simple_auto", "simple_string", "whole", "mixed", "versions", "free"])
    def test_the_configuration_agrees_with_the_metadata(self, client: Any, model: str) -> None:
        config, metadata = client.get_model_config(model), client.get_model_metadata(model)
        rows = 1 if config["max_batch_size"] else 0

        assert config["name"] == metadata["name"] == model
        assert config["platform"] == metadata["platform"] == "onnxruntime_onnx"
        for side, described in (("input", "inputs"), ("output", "outputs")):
            assert [(each["name"], each["data_type"].removeprefix("TYPE_"), each["dims"]) for each in config[side]] == [
                (each["name"], each["datatype"].replace("BYTES", "STRING"), each["shape"][rows:])
                for each in metadata[described]
            ]
            assert all(each["shape"][:rows] == [-1] * rows for each in metadata[described])

    @pytest.mark.parametrize("model", ["simple", "simple_auto", "whole", "mixed"])
    def test_unset_members_are_absent_and_never_null(self, client: Any, model: str) -> None:
        config = client.get_model_config(model)

        assert None not in list(numbers(config))
        assert not config.keys() & {
            "sequence_batching", "ensemble_scheduling", "response_cache", "model_transaction_policy",
        }  # fmt: skip
        assert ("dynamic_batching" in config) is (config["max_batch_size"] > 1)
        for side in ("input", "output"):
            for each in config[side]:
                assert each["is_shape_tensor"] is False
                assert all(type(dim) is int for dim in each["dims"])
        assert all(each["optional"] is False for each in config["input"])

    def test_integers_of_64_bits_are_reported_as_numbers(self, client: Any) -> None:
        batching = client.get_model_config("simple")["dynamic_batching"]

        assert batching["max_queue_delay_microseconds"] == 0
        assert type(batching["max_queue_delay_microseconds"]) is int
        assert batching["preferred_batch_size"] == [8]
