"""Sequences over the network: every answer is correct in any batch, and no state is left when clients die."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as rpc
import tritonclient.grpc.aio as rpc_aio
import tritonclient.http.aio as http_aio
from tritonclient import http
from tritonclient.utils import InferenceServerException

from tests.clients.sequence_models import (
    CONTROLS,
    CORRID,
    STATE,
    config,
    write_accumulator,
    write_growing,
    write_teller,
    write_truths,
)
from tests.live import Live, live_server

SEQUENCES = int(os.environ.get("SEQUENCES", "120"))
"""How many sequences are under way at once. 1000 takes about ten seconds."""
IDLE = "max_sequence_idle_microseconds: %d"
THREAD = '[batching]\nexecutor = "thread"\n'
WITH_STATE = CONTROLS + STATE % ""
MORE = 'output [ {{ name: "flags" data_type: TYPE_INT32 dims: [ 1 ] }}, {{ name: "id" data_type: {} dims: [ 1 ] }} ]'


ROWS = {"restless": 1, "direct_of_many": 8}


def write_all(root: Path) -> Path:
    for name, inside in (
        ("direct", "direct {}"),
        ("oldest", "oldest { max_candidate_sequences: 4 }"),
        ("one_at_a_time", f"oldest {{ max_candidate_sequences: 1 }} {IDLE % 60_000_000}"),
        ("restless", f"direct {{}} {IDLE % 50_000}"),
        ("threaded", "direct {}"),
        ("direct_of_many", "direct {}"),
    ):
        write_accumulator(root, name, config(ROWS.get(name, 4), inside + WITH_STATE))
    (root / "threaded" / "penstock.toml").write_text(THREAD)
    write_accumulator(root, "rowless", config(0, "direct {}" + WITH_STATE), rows="")
    shown = 'output [ { name: "STATE_OUT" data_type: TYPE_FP32 dims: [ 1 ] } ]'
    write_accumulator(root, "shown", config(4, "direct {}" + WITH_STATE, shown))
    initial = STATE % 'initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "hundred" }'
    write_accumulator(root, "begun", config(4, "direct {}" + CONTROLS.replace("[ 0, 1 ]", "[ 0, 0 ]") + initial))
    (root / "begun" / "initial_state").mkdir()
    (root / "begun" / "initial_state" / "hundred").write_bytes(np.float32(100).tobytes())
    write_growing(root, "growing", config(4, "oldest {}" + (STATE % "").replace("[ 1 ]", "[ -1 ]")))
    for name, kind in (("teller", "TYPE_UINT64"), ("text_teller", "TYPE_STRING")):
        write_teller(root, name, config(4, "direct {}" + CORRID % kind, MORE.format(kind)), string="text" in name)
    for kind in ("INT64", "UINT32", "INT32"):
        write_truths(root, f"teller_{kind}", kind)
    return root


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(write_all(tmp_path_factory.mktemp("models"))) as live:
        yield live


@pytest.fixture(scope="module", params=["http", "grpc"])
def client(live: Live, request: pytest.FixtureRequest) -> Iterator[Any]:
    module, address = (http, live.address) if request.param == "http" else (rpc, live.grpc_address)
    with module.InferenceServerClient(address) as client:
        yield client


def number(client: Any, value: float, shape: tuple[int, ...] = (1, 1)) -> list[Any]:
    module = http if "http" in type(client).__module__ else rpc
    tensor = module.InferInput("x", list(shape), "FP32")
    return [tensor.set_data_from_numpy(np.full(shape, value, np.float32))]


def ask(client: Any, model: str, value: float, identity: int | str, **options: Any) -> float:
    shape = (1,) if model == "rowless" else (1, 1)
    result = client.infer(model, number(client, value, shape), sequence_id=identity, **options)
    return float(result.as_numpy("y").item())


def sums(client: Any, model: str, identity: int | str, values: tuple[int, ...]) -> list[float]:
    """Send a whole sequence, and return its answers."""
    last = len(values) - 1
    return [
        ask(client, model, value, identity, sequence_start=not i, sequence_end=i == last)
        for i, value in enumerate(values)
    ]


def left_in(live: Live, model: str) -> int:
    """Count the sequences that a model still has once the idle ones have been removed."""

    async def settle() -> int:
        scheduler = live.server.engine.model(model).scheduler
        async with asyncio.timeout(15):
            while len(scheduler.sequences or ()):  # noqa: ASYNC110 - nobody says when one is forgotten
                await asyncio.sleep(0.01)
        return scheduler.request_count + len(scheduler.sequences or ())

    return live.call(settle())


class TestState:
    @pytest.mark.parametrize("model", ["direct", "oldest", "threaded", "rowless", "growing", "shown"])
    def test_state_is_kept_from_request_to_request(self, client: Any, model: str) -> None:
        assert sums(client, model, 7, (1, 2, 3, 4)) == [1, 3, 6, 10]
        assert sums(client, model, 7, (5,)) == [5]

    def test_sequences_with_similar_ids_do_not_share_state(self, client: Any) -> None:
        identities: tuple[int | str, ...] = (5, "5", (1 << 63) - 1)
        firsts = [ask(client, "direct", i, each, sequence_start=True) for i, each in enumerate(identities)]
        seconds = [ask(client, "direct", 10, each, sequence_end=True) for each in identities]

        assert (firsts, seconds) == ([0, 1, 2], [10, 11, 12])

    def test_restarting_a_sequence_resets_its_state(self, client: Any) -> None:
        ask(client, "direct", 1, 8, sequence_start=True)

        assert sums(client, "direct", 8, (2, 3)) == [2, 5]

    def test_a_sequence_starts_with_the_state_of_the_initial_state_file(self, client: Any) -> None:
        assert sums(client, "begun", 9, (1, 2)) == [101, 103]

    def test_a_state_output_can_be_requested_only_if_the_model_declares_it(self, client: Any) -> None:
        result = client.infer("shown", number(client, 3), sequence_id=1, sequence_start=True, sequence_end=True)
        assert result.as_numpy("STATE_OUT").tolist() == [[3]]

        module = http if "http" in type(client).__module__ else rpc
        requested = [module.InferRequestedOutput("STATE_OUT")]
        with pytest.raises(InferenceServerException, match="unexpected inference output 'STATE_OUT'"):
            client.infer("direct", number(client, 3), outputs=requested, sequence_id=1, sequence_start=True)

    def test_a_model_receives_the_controls_of_its_sequences(self, client: Any) -> None:
        controls = []
        for flags in ({"sequence_start": True}, {}, {"sequence_end": True}):
            result = client.infer("teller", number(client, 0), sequence_id=1 << 40, **flags)
            controls.append((result.as_numpy("flags").item(), result.as_numpy("id").item()))

        assert controls == [(5, 1 << 40), (4, 1 << 40), (6, 1 << 40)]

    @pytest.mark.parametrize("kind", ["INT64", "UINT32", "INT32"])
    def test_correlation_ids_may_have_other_integer_types_and_flags_may_be_booleans(
        self, client: Any, kind: str
    ) -> None:
        identity, controls = (1 << 40) + 9, []
        for flags in ({"sequence_start": True}, {}, {"sequence_end": True}):
            result = client.infer(f"teller_{kind}", number(client, 0), sequence_id=identity, **flags)
            controls.append([result.as_numpy(name).item() for name in ("start", "end", "ready", "id")])

        id_seen = identity if kind == "INT64" else 9  # an id that is too long loses its upper bits, as in Triton
        assert controls == [[True, False, True, id_seen], [False, False, True, id_seen], [False, True, True, id_seen]]

    def test_a_model_may_receive_string_correlation_ids(self, client: Any) -> None:
        result = client.infer(
            "text_teller", number(client, 0), sequence_id="näme", sequence_start=True, sequence_end=True
        )

        assert result.as_numpy("id").item().decode() == "näme"

    def test_a_waiting_sequence_gets_the_slot_of_a_sequence_that_ends(self, live: Live) -> None:
        with rpc.InferenceServerClient(live.grpc_address) as client:
            ask(client, "one_at_a_time", 1, 1, sequence_start=True)
            answers = Future[float](), Future[float]()
            for i, answer in enumerate(answers):
                _send(client, 2, 3 + i, answer, sequence_start=not i, sequence_end=i == 1)
            waiting(live, "one_at_a_time", 2)
            assert ask(client, "one_at_a_time", 2, 1) == 3

            assert ask(client, "one_at_a_time", 3, 1, sequence_end=True) == 6
            assert [each.result(10) for each in answers] == [3, 7]
        assert left_in(live, "one_at_a_time") == 0

    @pytest.mark.parametrize("order", [("inputs", "parameters"), ("parameters", "inputs")])
    def test_requests_that_differ_only_in_their_sequence_are_not_confused(
        self, live: Live, order: tuple[str, str]
    ) -> None:
        identities: tuple[int | str, ...] = (5, 15, "5", "15", 1)
        with closing(HTTPConnection(live.address)) as connection:
            answers = [
                [_post(connection, order, identity, sequence_start=first) for identity in identities]
                for first in (True, False, False)
            ]

        assert answers == [[1.0] * 5, [2.0] * 5, [3.0] * 5]

    def test_metadata_and_configuration_omit_controls_and_states(self, live: Live) -> None:
        with http.InferenceServerClient(live.address) as client:
            metadata, configuration = client.get_model_metadata("teller"), client.get_model_config("direct")

        assert [each["name"] for each in metadata["inputs"]] == ["x"]
        assert [each["name"] for each in configuration["output"]] == ["y"]
        assert configuration["sequence_batching"]["max_sequence_idle_microseconds"] == 1_000_000
        assert "dynamic_batching" not in configuration

    def test_padding_rows_are_not_counted_in_the_statistics(self, live: Live) -> None:
        with http.InferenceServerClient(live.address) as client:
            before = client.get_inference_statistics("rowless")["model_stats"][0]
            sums(client, "rowless", 3, (1, 2, 3))
            after = client.get_inference_statistics("rowless")["model_stats"][0]

        assert [after[name] - before[name] for name in ("inference_count", "execution_count")] == [3, 3]


class TestRejections:
    @pytest.mark.parametrize("identity", [0, ""])
    def test_a_request_without_a_correlation_id_is_rejected(self, client: Any, identity: int | str) -> None:
        text = "inference request to model 'direct' must specify a non-zero or non-empty correlation ID"
        with pytest.raises(InferenceServerException, match=text) as caught:
            client.infer("direct", number(client, 1), sequence_id=identity, sequence_start=True)
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")

    @pytest.mark.parametrize("identity", [5, "five"])
    def test_a_request_of_a_sequence_that_was_not_started_is_rejected(self, client: Any, identity: int | str) -> None:
        text = f"inference request for sequence {identity} to model 'oldest' must specify the START flag on the first"
        with pytest.raises(InferenceServerException, match=f"{text} request of the sequence") as caught:
            client.infer("oldest", number(client, 1), sequence_id=identity)
        assert caught.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")

    def test_a_sequence_request_with_several_rows_is_rejected(self, client: Any) -> None:
        text = "inference request to model 'direct' must specify batch-size 1 due to requirements of sequence batcher"
        with pytest.raises(InferenceServerException, match=text):
            client.infer("direct", number(client, 1, (2, 1)), sequence_id=1, sequence_start=True)

    def test_a_correlation_id_that_is_too_long_is_rejected(self, client: Any) -> None:
        assert sums(client, "direct", "x" * 128, (1,)) == [1]
        with pytest.raises(InferenceServerException, match="128 characters"):
            ask(client, "direct", 1, "x" * 129, sequence_start=True)

    @pytest.mark.parametrize(
        ("model", "identity", "sent", "expected"),
        [("teller", "a", "BYTES", "UINT64"), ("text_teller", 1, "UINT64", "BYTES")],
    )
    def test_a_correlation_id_of_a_type_that_the_model_does_not_take_is_rejected(
        self, client: Any, model: str, identity: int | str, sent: str, expected: str
    ) -> None:
        text = f"sequence batching control 'CORRID' data-type is '{sent}', but model '{model}' expects '{expected}'"
        with pytest.raises(InferenceServerException, match=text):
            ask(client, model, 1, identity, sequence_start=True)

    def test_a_request_of_a_sequence_that_was_idle_for_too_long_is_rejected(self, live: Live, client: Any) -> None:
        ask(client, "restless", 1, 1, sequence_start=True)
        assert left_in(live, "restless") == 0

        with pytest.raises(InferenceServerException, match="must specify the START flag"):
            ask(client, "restless", 1, 1)
        assert sums(client, "restless", 2, (4, 5)) == [4, 9]


class TestDisconnection:
    def test_a_client_that_disconnects_while_waiting_for_a_slot_leaves_no_state(self, live: Live) -> None:
        with http.InferenceServerClient(live.address) as client:
            ask(client, "one_at_a_time", 1, 1, sequence_start=True)
            connection = HTTPConnection(live.address)
            connection.request("POST", "/v2/models/one_at_a_time/infer", _document(("inputs", "parameters"), 2, True))
            waiting(live, "one_at_a_time", 1)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            waiting(live, "one_at_a_time", 0)
            assert ask(client, "one_at_a_time", 2, 1, sequence_end=True) == 3

        assert left_in(live, "one_at_a_time") == 0

    def test_canceling_a_request_cancels_later_requests_of_its_sequence(self, live: Live) -> None:
        with rpc.InferenceServerClient(live.grpc_address) as client:
            ask(client, "one_at_a_time", 1, 1, sequence_start=True)
            first, second = Future[float](), Future[float]()
            call = _send(client, 2, 1, first, sequence_start=True)
            _send(client, 2, 1, second)
            waiting(live, "one_at_a_time", 2)
            call.cancel()

            for each in (first, second):
                with pytest.raises(InferenceServerException) as caught:
                    each.result(10)
                assert caught.value.status() == "StatusCode.CANCELLED"
            assert ask(client, "one_at_a_time", 2, 1, sequence_end=True) == 3
        assert left_in(live, "one_at_a_time") == 0


def waiting(live: Live, model: str, count: int) -> None:
    """Wait until this many requests are queued."""

    async def settle() -> None:
        scheduler = live.server.engine.model(model).scheduler
        async with asyncio.timeout(15):
            while scheduler.request_count != count:  # noqa: ASYNC110 - nobody says when one has come
                await asyncio.sleep(0.01)

    live.call(settle())


def _document(order: tuple[str, str], identity: int | str, start: bool) -> bytes:
    parts = {
        "inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}],
        "parameters": {"sequence_id": identity, "sequence_start": start},
    }
    return json.dumps({name: parts[name] for name in order}).encode()


def _post(connection: HTTPConnection, order: tuple[str, str], identity: int | str, *, sequence_start: bool) -> float:
    connection.request("POST", "/v2/models/direct_of_many/infer", _document(order, identity, sequence_start))
    answer = json.loads(connection.getresponse().read())
    return float(answer["outputs"][0]["data"][0])


def _send(client: Any, identity: int, value: float, future: Future[float], **options: Any) -> Any:
    """Send a request without waiting for its answer."""

    def answered(result: Any, error: Exception | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(float(result.as_numpy("y").item()))

    return client.async_infer("one_at_a_time", number(client, value), answered, sequence_id=identity, **options)


class Stream:
    """A gRPC stream of one sequence. Answers come in the order of the requests, as in Triton."""

    def __init__(self, client: Any) -> None:
        self._requests_queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._answers = client.stream_infer(self._requests())

    async def _requests(self) -> AsyncIterator[dict[str, Any]]:
        while (request := await self._requests_queue.get()) is not None:
            yield request

    async def infer(self, model: str, inputs: list[Any], **options: Any) -> Any:
        self._requests_queue.put_nowait({"model_name": model, "inputs": inputs, **options})
        result, error = await anext(aiter(self._answers))
        if error is not None:
            raise error
        return result

    async def close(self) -> None:
        """Half-close the stream, and wait until the server has noticed."""
        self._requests_queue.put_nowait(None)
        async for _ in self._answers:
            raise AssertionError("nobody asked")

    def die(self) -> None:
        """Disconnect abruptly."""
        self._answers.cancel()


class Life:
    """One sequence with a random end: it ends properly, falls silent, or is cut off within a request."""

    def __init__(self, seed: int, model: str) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.model = model
        self.id: int | str = f"s{seed}" if model == "soak_text_teller" else seed + 1
        self.values = [self.random.randint(1, 9) for _ in range(self.random.randint(1, 6))]
        self.end = self.random.choice(("ends", "ends", "ends", "ends", "is silent", "is cut off"))

    async def live(self, by_http: Any, by_rpc: Any) -> None:
        stream = None if self.seed % 2 else Stream(by_rpc)
        client, module = (by_http, http) if stream is None else (stream, rpc)
        total = 0
        for i, value in enumerate(self.values):
            total += value
            last = i == len(self.values) - 1
            flags = {"sequence_start": not i, "sequence_end": last and self.end == "ends"}
            tensor = module.InferInput("x", [1, 1], "FP32").set_data_from_numpy(np.full((1, 1), value, np.float32))
            asking = asyncio.ensure_future(client.infer(self.model, [tensor], sequence_id=self.id, **flags))
            if last and self.end == "is cut off":
                await asyncio.wait({asking}, timeout=self.random.choice((0, 0.001, 0.01)))
                asking.cancel()
                if stream is not None:
                    stream.die()
                return
            self._check(await asking, total, value, flags)
        if stream is not None:
            await stream.close()

    def _check(self, result: Any, total: int, value: int, flags: dict[str, bool]) -> None:
        if "teller" not in self.model:
            assert result.as_numpy("y").tolist() == [[total]], (self.id, self.values)
            return
        assert result.as_numpy("y").tolist() == [[value]]
        id_seen = result.as_numpy("id").item()
        assert (id_seen.decode() if isinstance(id_seen, bytes) else id_seen) == self.id
        assert result.as_numpy("flags").item() == 4 + flags["sequence_start"] + 2 * flags["sequence_end"]


SOAKED = ("soak_direct", "soak_oldest", "soak_threaded", "soak_teller", "soak_text_teller")


def write_soaked(root: Path) -> Path:
    """Some models have a slot for every sequence; at the others most sequences wait."""
    # longer than a round of these clients takes, which share a core with the server
    idle = IDLE % (1_000_000 + 4_000 * SEQUENCES)
    oldest = "oldest {{ max_candidate_sequences: {} }} {}"
    write_accumulator(root, "soak_direct", config(256, f"direct {{}} {idle}" + WITH_STATE))
    write_accumulator(root, "soak_oldest", config(32, oldest.format(256, idle) + WITH_STATE))
    write_accumulator(root, "soak_threaded", config(16, f"direct {{}} {idle}" + WITH_STATE))
    (root / "soak_threaded" / "penstock.toml").write_text(THREAD + "[instances]\ncount = 2\n")
    for name, kind, how in (
        ("soak_teller", "TYPE_UINT64", f"direct {{}} {idle}"),
        ("soak_text_teller", "TYPE_STRING", oldest.format(64, idle)),
    ):
        write_teller(root, name, config(64, how + CORRID % kind, MORE.format(kind)), string="text" in name)
    return root


async def soak(live: Live) -> None:
    """Half of the sequences come over HTTP, half over gRPC streams."""
    lives = [Life(seed, SOAKED[seed % len(SOAKED)]) for seed in range(SEQUENCES)]
    # a server has no patience with a connection that resets many calls, so there are some
    channels = [("grpc.use_local_subchannel_pool", 1)]
    by_rpc = [rpc_aio.InferenceServerClient(live.grpc_address, channel_args=channels) for _ in range(10)]
    async with http_aio.InferenceServerClient(live.address, conn_limit=SEQUENCES) as by_http:
        await asyncio.gather(*(each.live(by_http, by_rpc[each.seed // 2 % 10]) for each in lives))
    for each in by_rpc:
        await each.close()


def test_answers_of_many_parallel_sequences_are_correct_and_no_state_is_left(tmp_path: Path) -> None:
    with live_server(write_soaked(tmp_path)) as live:
        asyncio.run(asyncio.wait_for(soak(live), 60))
        for model in SOAKED:
            assert left_in(live, model) == 0
