"""Models that give several answers to a request, over NVIDIA's clients and plain HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from onnx import TensorProto
from tritonclient.utils import InferenceServerException

from penstock.backends.backend import Array
from tests.backends.onnx_models import node
from tests.clients import models
from tests.clients.test_perf_analyzer import PROGRAM, analyze
from tests.live import Live, live_server

pytestmark = pytest.mark.slow

DECOUPLED_TEXT = "doesn't support models with decoupled transaction policy"

PATIENCE_S = 20.0
INT32, UINT32 = TensorProto.INT32, TensorProto.UINT32
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
HOOKED = '[hooks]\nfile = "answers.py"\n'
# Source: NVIDIA's repeat_int32 (the C++ backend "repeat"): a value at a time, each after its delay
REPEAT = """
import time
import numpy as np

def pre_inference(sample, signature, metadata, parameters):
    parameters["wait"] = int(sample["WAIT"][0]) if "WAIT" in sample else 0
    return sample

def post_inference(prediction, signature, metadata, parameters):
    values, delays = prediction
    for at, delay in enumerate(delays):
        time.sleep(int(delay) / 1000)
        yield {"OUT": values[at : at + 1], "IDX": np.array([at], np.uint32)}
    time.sleep(parameters["wait"] / 1000)
"""
# Source: NVIDIA's square_int32: as many answers as the value says
SQUARE = """
def post_inference(prediction, signature, metadata):
    for _ in range(int(prediction[0][0])):
        yield prediction
"""
REFUSES = """
from penstock.backends.errors import Code, InferError

def post_inference(prediction, signature, metadata):
    for _ in range(int(prediction[0][0])):
        yield prediction
    for _ in range(2):
        yield InferError(Code.OVERLOADED, "not today")
"""
# `witness` is the test's own module, in this process; answers 256 KiB each
WATCHED = """
import threading
import witness
import numpy as np

def post_inference(prediction, signature, metadata):
    many, kind = int(prediction[0][0]), int(prediction[0][1])
    try:
        for number in range(many):
            if kind == 1 and number == 2:
                raise ValueError("half-way")
            if kind == 2 and number == 2:
                witness.gate.wait(20)
            witness.steps += 1
            size = 1 << 16 if kind == 3 else 1
            yield {"y": np.full(size, number, np.int32)}
    finally:
        witness.closed.put(threading.current_thread().name)
"""


class Witness(ModuleType):
    """What the hooks of `watched` report about themselves."""

    def __init__(self) -> None:
        super().__init__("witness")
        self.steps = 0
        self.gate = threading.Event()
        self.closed: queue.Queue[str] = queue.Queue()


def write(root: Path, name: str, hooks: str, tensors: tuple[models.Tensors, models.Tensors], config: str) -> None:
    inputs, outputs = tensors
    work = [node("Identity", [source], [gives]) for source, gives in zip(inputs, outputs, strict=False)]
    models.write(root, name, work, tensors, config=config)
    if hooks:
        (root / name / "answers.py").write_text(hooks)
        (root / name / "penstock.toml").write_text(HOOKED)


@pytest.fixture(scope="module")
def witness() -> Iterator[Witness]:
    new_witness = sys.modules["witness"] = Witness()
    yield new_witness
    del sys.modules["witness"]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, witness: Witness) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("repository")
    models.write_examples(root)
    inputs: models.Tensors = {"IN": (INT32, ["N"]), "DELAY": (UINT32, ["M"]), "WAIT": (UINT32, [1])}
    repeated: models.Tensors = {"OUT": (INT32, ["N"]), "IDX": (UINT32, ["M"])}
    write(root, "repeat_int32", REPEAT, (inputs, repeated), DECOUPLED + "max_batch_size: 0\n")
    signature: tuple[models.Tensors, models.Tensors] = ({"IN": (INT32, [1])}, {"OUT": (INT32, [1])})
    write(root, "square_int32", SQUARE, signature, DECOUPLED)
    write(root, "refuses", REFUSES, signature, DECOUPLED)
    write(root, "plain", "", signature, DECOUPLED)
    write(root, "one", "def post_inference(prediction, metadata):\n    return prediction\n", signature, DECOUPLED)
    write(root, "watched", WATCHED, ({"x": (INT32, [2])}, {"y": (INT32, [2])}), DECOUPLED)
    with live_server(root) as server:
        yield server


@pytest.fixture
def watching(witness: Witness) -> Iterator[Witness]:
    witness.steps = 0
    witness.closed = queue.Queue()
    witness.gate.clear()
    yield witness
    witness.gate.set()


class Streamed:
    """The stream of one client; `next` returns its answers."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()

    def callback(self, result: Any, error: Any) -> None:
        self._answers.put((result, error))

    def ask(self, model: str, *inputs: tuple[str, Array], **more: Any) -> None:
        self._client.async_stream_infer(model, [input_of(*each) for each in inputs], **more)

    def next(self) -> tuple[str, bool, dict[str, Any], str]:
        """Return the next answer: id, whether it is final, outputs, and the error's text."""
        result, error = self._answers.get(timeout=PATIENCE_S)
        if result is None:
            return "", True, {}, str(error.message())
        answer = result.get_response()
        outputs = {each.name: result.as_numpy(each.name).tolist() for each in answer.outputs}
        final = answer.parameters["triton_final_response"].bool_param
        return answer.id, final, outputs, error.message() if error is not None else ""

    def rest(self) -> int:
        return self._answers.qsize()


def input_of(name: str, array: Array) -> Any:
    datatype = {"i": "INT32", "u": "UINT32"}[array.dtype.kind]
    return triton.InferInput(name, list(array.shape), datatype).set_data_from_numpy(array)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


@contextmanager
def streaming(live: Live, callback: Callable[[Any, Any], None] | None = None, **how: Any) -> Iterator[Streamed]:
    with triton.InferenceServerClient(live.grpc_address) as client:
        stream = Streamed(client)
        client.start_stream(callback or stream.callback, **how)
        yield stream
        client.stop_stream()


def repeat(*values: int, delay: int = 0) -> list[tuple[str, Array]]:
    delays = np.full(len(values), delay, np.uint32)
    return [("IN", ints(*values)), ("DELAY", delays), ("WAIT", np.array([0], np.uint32))]


def closed(witness: Witness) -> str:
    return witness.closed.get(timeout=PATIENCE_S)


class TestStream:
    @pytest.mark.parametrize("values", [(), (7,), (4, 2, 0, 1), tuple(range(100))])
    @pytest.mark.parametrize("empty", [True, False])
    def test_each_value_is_an_answer_and_an_empty_final_answer_is_sent_if_requested(
        self, live: Live, values: tuple[int, ...], empty: bool
    ) -> None:
        with streaming(live) as stream:
            stream.ask("repeat_int32", *repeat(*values), request_id="7", enable_empty_final_response=empty)
            # the answers to a later request show that there are no more
            for at, value in enumerate(values):
                assert stream.next() == ("7", False, {"OUT": [value], "IDX": [at]}, "")
            if empty:
                assert stream.next() == ("7", True, {}, "")
        assert stream.rest() == 0

    def test_an_empty_final_answer_has_the_name_of_its_model(self, live: Live) -> None:
        found: queue.Queue[Any] = queue.Queue()
        with streaming(live, lambda result, error: found.put(result.get_response())) as stream:
            stream.ask("square_int32", ("IN", ints(0)), request_id="x", enable_empty_final_response=True)
            answer = found.get(timeout=PATIENCE_S)

        assert (answer.model_name, answer.model_version, answer.id) == ("square_int32", "1", "x")
        assert answer.parameters["triton_final_response"].bool_param
        assert (len(answer.outputs), len(answer.raw_output_contents)) == (0, 0)

    @pytest.mark.parametrize("model", ["plain", "one"])
    @pytest.mark.parametrize("empty", [True, False])
    def test_the_answer_of_a_model_with_one_answer_is_marked_as_final(
        self, live: Live, model: str, empty: bool
    ) -> None:
        with streaming(live) as stream:
            for number in range(3):
                stream.ask(model, ("IN", ints(number)), request_id=f"{number}", enable_empty_final_response=empty)
            found = sorted(stream.next() for _ in range(3))

        assert found == [(f"{number}", True, {"OUT": [number]}, "") for number in range(3)]
        assert stream.rest() == 0

    def test_answers_to_each_of_many_requests_arrive_in_order(self, live: Live) -> None:
        with streaming(live) as stream:
            for number in range(20):
                stream.ask(
                    "square_int32", ("IN", ints(number)), request_id=f"{number}", enable_empty_final_response=True
                )
            counts = dict.fromkeys(map(str, range(20)), 0)
            ended: set[str] = set()
            while len(ended) < 20:
                request_id, final, outputs, _ = stream.next()
                assert request_id not in ended
                if final:
                    ended.add(request_id)
                else:
                    assert outputs == {"OUT": [int(request_id)]}
                    counts[request_id] += 1

        assert counts == {str(number): number for number in range(20)}

    def test_plain_models_on_a_stream_keep_their_order_and_do_not_wait_for_generators(
        self, live: Live, watching: Witness
    ) -> None:
        row = np.ones((1, 16), np.int32)
        with streaming(live) as stream:
            stream.ask("watched", ("x", ints(3, 2)), request_id="several", enable_empty_final_response=True)
            assert [stream.next()[:2] for _ in range(2)] == [("several", False)] * 2
            for number in range(8):
                stream.ask("simple", ("INPUT0", row * number), ("INPUT1", row), request_id=f"{number}")
            for number in range(8):
                request_id, final, outputs, _ = stream.next()
                assert (request_id, final, outputs["OUTPUT0"][0][0]) == (f"{number}", True, number + 1)
            watching.gate.set()
            assert stream.next() == ("several", False, {"y": [2]}, "")
            assert stream.next() == ("several", True, {}, "")
        closed(watching)

    def test_decoupled_answers_arrive_over_the_asyncio_client(self, live: Live) -> None:
        async def main() -> list[tuple[int, bool]]:
            async def requests() -> Any:
                yield {
                    "model_name": "repeat_int32",
                    "inputs": [input_of(*each) for each in repeat(5, 6, delay=1)],
                }

            found = []
            async with triton_aio.InferenceServerClient(live.grpc_address) as client, asyncio.timeout(PATIENCE_S):
                async for result, error in client.stream_infer(requests()):
                    assert error is None
                    final = result.get_response().parameters["triton_final_response"].bool_param
                    found.append((-1 if final else int(result.as_numpy("OUT")[0]), final))
            return found

        assert asyncio.run(main()) == [(5, False), (6, False)]


class TestErrors:
    def test_answers_before_an_error_are_kept_and_the_stream_continues(self, live: Live, watching: Witness) -> None:
        with streaming(live) as stream:
            stream.ask("watched", ("x", ints(5, 1)), request_id="bad")
            assert [stream.next()[2] for _ in range(2)] == [{"y": [0]}, {"y": [1]}]
            assert stream.next()[3].startswith("post_inference failed; see the server log, request id bad")
            stream.ask("watched", ("x", ints(1, 0)), request_id="good", enable_empty_final_response=True)
            assert [stream.next()[:2] for _ in range(2)] == [("good", False), ("good", True)]
        assert closed(watching).startswith("hooks-watched/1")
        closed(watching)

    def test_an_error_ends_the_stream_with_its_status_if_the_client_requests_grpc_errors(
        self, live: Live, watching: Witness
    ) -> None:
        with streaming(live, headers={"triton_grpc_error": "true"}) as stream:
            stream.ask("watched", ("x", ints(5, 1)))
            assert [stream.next()[2] for _ in range(2)] == [{"y": [0]}, {"y": [1]}]
            _, error = stream._answers.get(timeout=PATIENCE_S)
            assert error.status() == "StatusCode.INTERNAL"
        closed(watching)

    def test_an_invalid_request_is_answered_with_one_error(self, live: Live) -> None:
        with streaming(live) as stream:
            stream.ask("square_int32", ("x", ints(1)), enable_empty_final_response=True)
            assert "unexpected inference input 'x' for model 'square_int32'" in stream.next()[3]
        assert stream.rest() == 0

    def test_unary_calls_to_a_decoupled_model_are_rejected(self, live: Live) -> None:
        with triton.InferenceServerClient(live.grpc_address) as client:
            for inputs in ([input_of("IN", ints(1))], []):
                with pytest.raises(InferenceServerException) as caught:
                    client.infer("square_int32", inputs)
                assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
                assert caught.value.message() == f"ModelInfer RPC {DECOUPLED_TEXT}"
        with triton_http.InferenceServerClient(live.address) as client:
            array = triton_http.InferInput("IN", [1], "INT32").set_data_from_numpy(ints(1))
            for model in ("square_int32", "plain"):
                with pytest.raises(InferenceServerException) as caught:
                    client.infer(model, [array])
                assert caught.value.status() == "501"
                assert caught.value.message() == f"HTTP end point {DECOUPLED_TEXT}"


class TestDisconnection:
    def test_a_canceled_stream_closes_its_generators(self, live: Live, watching: Witness) -> None:
        with triton.InferenceServerClient(live.grpc_address) as client:
            stream = Streamed(client)
            client.start_stream(stream.callback)
            stream.ask("watched", ("x", ints(100_000, 3)))
            stream.next()
            client.stop_stream(cancel_requests=True)
            assert closed(watching).startswith("hooks-watched/1")
        assert watching.steps < 100_000

    def test_a_closed_http_connection_closes_its_generator(self, live: Live, watching: Witness) -> None:
        asking = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=PATIENCE_S)
        asking.request("POST", "/v2/models/watched/generate_stream", json.dumps({"x": [1_000_000, 0]}))
        assert asking.getresponse().readline().startswith(b"data: ")
        asking.close()

        assert closed(watching).startswith("hooks-watched/1")
        assert watching.steps < 1_000_000

    @pytest.mark.parametrize("protocol", ["grpc", "http"])
    def test_a_client_that_does_not_read_suspends_the_generator(
        self, live: Live, watching: Witness, protocol: str
    ) -> None:
        go_on = threading.Event()

        def read(result: Any, error: Any) -> None:
            assert go_on.wait(PATIENCE_S)

        if protocol == "grpc":
            with streaming(live, read) as stream:
                stream.ask("watched", ("x", ints(400, 3)))
                stood_still_at = stands_still(watching)
                go_on.set()
        else:
            asking = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=PATIENCE_S)
            asking.request("POST", "/v2/models/watched/generate_stream", json.dumps({"x": [400, 3]}))
            answer = asking.getresponse()
            stood_still_at = stands_still(watching)
            assert answer.read().count(b"data: ") == 400
            asking.close()

        # 256 KiB each: what both sockets and the client's window hold, some MiB
        assert 0 < stood_still_at < 200
        closed(watching)
        assert watching.steps == 400


def stands_still(witness: Witness) -> int:
    """Wait until the generator has made no step for a while: only time can show that nothing happens."""
    steps_seen, since = -1, time.monotonic()
    while time.monotonic() - since < 0.4 or not steps_seen:
        if witness.steps != steps_seen:
            steps_seen, since = witness.steps, time.monotonic()
        time.sleep(0.02)
    return steps_seen


class TestGenerate:
    def test_generate_stream_sends_each_answer_as_an_event_immediately(self, live: Live, watching: Witness) -> None:
        with httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client:
            streaming = client.stream("POST", "/v2/models/watched/generate_stream", json={"x": [3, 2], "id": "7"})
            with streaming as answer:
                lines = answer.iter_lines()
                first = [next(lines) for _ in range(4)]
                watching.gate.set()
                rest = list(lines)

        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [line for line in first + rest if line]
        assert events == [
            f'data: {{"id":"7","model_name":"watched","model_version":"1","y":{number}}}' for number in range(3)
        ]
        closed(watching)

    def test_generate_stream_without_answers_has_an_empty_body(self, live: Live) -> None:
        answer = httpx.post(f"{live.url}/v2/models/square_int32/generate_stream", json={"IN": 0})

        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"

    def test_an_error_after_some_answers_is_the_last_event(self, live: Live, watching: Witness) -> None:
        answer = httpx.post(f"{live.url}/v2/models/watched/generate_stream", json={"x": [5, 1]})

        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
        assert [event.get("y") for event in events] == [0, 1, None]
        assert events[-1]["error"].startswith("post_inference failed")
        closed(watching)

    def test_the_first_answer_sets_the_status_of_generate_stream(self, live: Live) -> None:
        found = [httpx.post(f"{live.url}/v2/models/refuses/generate_stream", json={"IN": number}) for number in (0, 1)]

        assert [answer.status_code for answer in found] == [503, 200]
        assert [answer.text.count("data: ") for answer in found] == [2, 3]
        assert all(answer.text.endswith('data: {"error":"not today"}\n\n' * 2) for answer in found)
        assert {answer.headers["content-type"] for answer in found} == {"text/event-stream; charset=utf-8"}

    @pytest.mark.parametrize("n", [0, 2])
    def test_generate_requires_exactly_one_answer(self, live: Live, n: int) -> None:
        answer = httpx.post(f"{live.url}/v2/models/square_int32/generate", json={"IN": n})
        one = httpx.post(f"{live.url}/v2/models/square_int32/generate", json={"IN": 1})

        text = "generate expects model to produce exactly 1 response, use generate stream for model that generates"
        assert answer.status_code == 500
        assert answer.json() == {"error": f"{text} various number of responses"}
        assert one.json() == {"model_name": "square_int32", "model_version": "1", "OUT": 1}

    @pytest.mark.parametrize("model", ["plain", "one"])
    def test_a_model_with_one_answer_serves_generate_and_generate_stream(self, live: Live, model: str) -> None:
        with httpx.Client(base_url=f"{live.url}/v2/models/{model}/") as client:
            assert client.post("generate", json={"IN": 4}).json()["OUT"] == 4
            assert json.loads(client.post("generate_stream", json={"IN": 4}).text[6:])["OUT"] == 4


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_server_that_exits_finishes_its_decoupled_requests(tmp_path: Path, watching: Witness, protocol: str) -> None:
    write(tmp_path, "watched", WATCHED, ({"x": (INT32, [2])}, {"y": (INT32, [2])}), DECOUPLED)
    with ExitStack() as until_exit:
        live = until_exit.enter_context(live_server(tmp_path))
        leaving = threading.Thread(target=until_exit.pop_all().close)
        if protocol == "grpc":
            with streaming(live) as stream:
                stream.ask("watched", ("x", ints(4, 2)), enable_empty_final_response=True)
                found = [stream.next() for _ in range(2)]
                leave(live, leaving, watching)
                found += [stream.next() for _ in range(3)]
            numbers = [answer[2]["y"][0] for answer in found if answer[2]]
            assert [answer[1] for answer in found] == [False] * 4 + [True]
        else:
            asking = http.client.HTTPConnection("127.0.0.1", live.http_port, timeout=PATIENCE_S)
            asking.request("POST", "/v2/models/watched/generate_stream", json.dumps({"x": [4, 2]}))
            answer = asking.getresponse()
            begun = [answer.readline() for _ in range(2)]
            leave(live, leaving, watching)
            numbers = [json.loads(line[6:])["y"] for line in (begun[0], *answer) if line.strip()]
            asking.close()
        leaving.join(PATIENCE_S)

    assert numbers == [0, 1, 2, 3]
    assert not leaving.is_alive()
    closed(watching)


def test_a_model_is_unloaded_after_its_generators_have_ended(tmp_path: Path, watching: Witness) -> None:
    write(tmp_path, "watched", WATCHED, ({"x": (INT32, [2])}, {"y": (INT32, [2])}), DECOUPLED)
    with (
        live_server(tmp_path, model_control_mode="explicit", load_model=("watched",)) as live,
        triton.InferenceServerClient(live.grpc_address) as client,
        streaming(live) as stream,
    ):
        stream.ask("watched", ("x", ints(3, 2)), enable_empty_final_response=True)
        found = [stream.next()[2]["y"] for _ in range(2)]
        unloading = threading.Thread(target=client.unload_model, args=("watched",))
        unloading.start()
        while client.is_model_ready("watched"):
            time.sleep(0.001)
        stream.ask("watched", ("x", ints(1, 0)))
        assert "Request for unknown model: 'watched'" in stream.next()[3]
        watching.gate.set()
        found.append(stream.next()[2]["y"])
        assert stream.next()[1:3] == (True, {})
        unloading.join(PATIENCE_S)

    assert found == [[0], [1], [2]]
    assert not unloading.is_alive()
    closed(watching)


def leave(live: Live, leaving: threading.Thread, witness: Witness) -> None:
    """Stop the server, and let the generator continue once the server is draining."""
    leaving.start()
    deadline = time.monotonic() + PATIENCE_S
    while not live.draining and time.monotonic() < deadline:
        time.sleep(0.001)
    witness.gate.set()


def test_the_model_configuration_reports_the_decoupled_policy(live: Live) -> None:
    with triton.InferenceServerClient(live.grpc_address) as client:
        assert client.get_model_config("repeat_int32").config.model_transaction_policy.decoupled
    with triton_http.InferenceServerClient(live.address) as client:
        assert client.get_model_config("repeat_int32")["model_transaction_policy"] == {"decoupled": True}


def test_statistics_are_kept_per_answer(tmp_path: Path) -> None:
    signature: tuple[models.Tensors, models.Tensors] = ({"IN": (INT32, [1])}, {"OUT": (INT32, [1])})
    write(tmp_path, "square_int32", SQUARE, signature, DECOUPLED)
    write(tmp_path, "plain", "", signature, DECOUPLED)
    with live_server(tmp_path) as live, triton.InferenceServerClient(live.grpc_address) as client:
        with streaming(live) as stream:
            for number in (3, 1):
                stream.ask("square_int32", ("IN", ints(number)), enable_empty_final_response=True)
            for _ in range(3 + 1 + 2):
                stream.next()
        stats = client.get_inference_statistics("square_int32").model_stats[0].response_stats
        with triton_http.InferenceServerClient(live.address) as other:
            read = other.get_inference_statistics("square_int32")["model_stats"][0]["response_stats"]
            plain_stats = other.get_inference_statistics("plain")["model_stats"][0]["response_stats"]

    success = {position: stats[position].success.count for position in sorted(stats)}
    assert success == {"0": 2, "1": 1, "2": 1, "3": 0}
    assert {position: stats[position].empty_response.count for position in stats} == {"0": 0, "1": 1, "2": 0, "3": 1}
    assert sorted(read) == ["0", "1", "2", "3"]
    assert read["0"]["compute_infer"]["ns"] == stats["0"].compute_infer.ns > 0
    assert read["3"].keys() == {"compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"}
    assert plain_stats == {}


@pytest.mark.skipif(not PROGRAM.exists(), reason="perf_analyzer is not here: .ci/peers fetches it")
def test_perf_analyzer_counts_each_answer(live: Live, tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text('{"data": [{"IN": {"content": [3], "shape": [1]}}]}')
    words = f"-i grpc -m square_int32 --streaming --async --input-data {tmp_path}/asked.json"
    report = analyze(live, words)

    rates = {line.partition(":")[0].strip(): line.split()[-2] for line in report.splitlines() if "infer/sec" in line}
    assert "Detected decoupled model" in report
    assert float(rates["Response Throughput"]) == pytest.approx(3 * float(rates["Throughput"]), rel=0.1)
