"""Inference as the Service of a connection, over a fake transport and an Engine that answers on demand."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.server.http.limits import Limits
from penstock.server.http.service import HttpShared
from penstock.server.v2 import inference
from penstock.server.v2.encode import Encoder
from penstock.server.v2.inference import Inference
from tests.fakes import fake_model
from tests.server.http.lane import Lane, request, run, turns
from tests.server.v2.held_engine import HeldEngine

BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}).encode()
PATH = "/v2/models/m/infer"
ANSWER = b'{"model_name":"m","model_version":"1","outputs":[{"name":"y","datatype":"FP32","shape":[1,4],"data":%b}]}'


class NoHooks:
    has_pre = has_post = False


class Served(Lane):
    """A connection whose Service is Inference, shared with the connection `of` if there is one."""

    def __init__(self, beside: Served | None = None) -> None:
        self.engine: HeldEngine = beside.engine if beside else HeldEngine()
        service = Inference(cast(Any, self.engine), Limits(), lambda model: cast(Any, NoHooks()))
        super().__init__(shared=beside.shared if beside else HttpShared(service, Limits()))

    async def refused(self, raw: bytes) -> tuple[int, str]:
        """Feed one request that is rejected."""
        self.transport.written.clear()
        [answer] = await self.fed(raw)
        return answer.status, json.loads(answer.body)["error"]


def test_a_request_is_answered_when_its_batch_is_done() -> None:
    async def main() -> None:
        served = Served()
        assert await served.fed(request(PATH, BODY)) == []
        served.engine.let_go()

        assert served.bodies == [ANSWER % b"[1.0,2.0,3.0,4.0]"]

    run(main)


def test_pipelined_requests_run_one_after_the_other() -> None:
    async def main() -> None:
        served = Served()
        await served.fed(request(PATH, BODY) * 2)
        assert len(served.engine.held) == 1
        served.engine.let_go()
        assert len(served.engine.held) == 1
        served.engine.let_go()

        assert served.statuses == [200, 200]

    run(main)


@pytest.mark.parametrize("lines", [(), ("content-encoding: gzip",)])
def test_the_current_request_is_canceled_when_its_client_disconnects(lines: tuple[str, ...]) -> None:
    async def main() -> None:
        served = Served()
        body = gzip.compress(BODY) if lines else BODY
        await served.fed(request(PATH, body, *lines) * 2)
        served.engine.let_go()
        await turns()
        [second] = served.engine.held
        served.transport.lose(ConnectionResetError())
        await turns()
        served.engine.let_go()

        assert served.engine.cancelled == [second]
        assert served.statuses == [200]

    run(main)


def test_compressed_requests_that_wait_for_a_thread_are_not_decompressed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []

    def noted(name: str) -> None:
        original = getattr(inference, name)

        def step(*arguments: Any) -> Any:
            steps.append((name, threading.current_thread() is threading.main_thread()))
            return original(*arguments)

        monkeypatch.setattr(inference, name, step)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(3))
        noted("decompress")
        noted("decode")
        bomb = request(PATH, gzip.compress(BODY + b" " * 1_000_000), "content-encoding: gzip")
        first = Served()
        served = [first, Served(first), Served(first)]
        await asyncio.gather(*(each.fed(bomb) for each in served))
        await asyncio.gather(*(each.protocol.task for each in served if isinstance(each.protocol.task, asyncio.Task)))
        assert len(first.engine.held) == 3

    run(main)
    assert steps == [("decompress", False), ("decode", False)] * 3


def test_pipelined_requests_that_fail_in_a_task_are_all_answered() -> None:
    async def main() -> None:
        served = Served()
        broken = request(PATH, b"broken", "content-encoding: gzip")
        answers = await served.fed(broken * 9)

        assert [answer.status for answer in answers] == [400] * 9
        assert served.protocol.task is None

    run(main)


STRINGS = np.array([[b"text"]], np.object_)
ONES = np.ones((1, 1), np.float32)


@pytest.mark.parametrize(
    ("array", "count", "binary", "here"),
    [
        (STRINGS, 3, True, True),
        (STRINGS, 20_000, True, False),
        (ONES, 500_000, True, True),
        (ONES, 600_000, True, False),
        (ONES, 10_000, False, True),
        (ONES, 600_000, False, False),
    ],
)
def test_an_answer_is_encoded_on_a_thread_only_if_it_is_large(
    monkeypatch: pytest.MonkeyPatch, array: Any, count: int, *, binary: bool, here: bool
) -> None:
    where = []

    def noted(name: str) -> None:
        function = getattr(Encoder, name)

        def encode(*arguments: Any) -> Any:
            where.append(threading.current_thread() is threading.main_thread())
            return function(*arguments)

        monkeypatch.setattr(Encoder, name, encode)

    for name in ("encode_json", "encode_mixed", "encode_mapped"):
        noted(name)
    body = json.loads(BODY) | {"outputs": [{"name": "y", "parameters": {"binary_data": binary}}]}
    outputs = (TensorSpec("y", "BYTES" if array is STRINGS else "FP32", (-1, -1)),)
    values = np.repeat(array, count, 1)

    async def main() -> None:
        served = Served()
        inputs = served.engine.loaded[0].signature.inputs
        served.engine.loaded = [fake_model(signature=Signature(inputs, outputs, batched=True))]
        await served.fed(request(PATH, json.dumps(body).encode()))
        [each] = served.engine.held
        each.outputs = [values]
        each.sink.deliver([each])
        if isinstance(served.protocol.task, asyncio.Task):
            await served.protocol.task

        written = b"\4\0\0\0text" * count if array is STRINGS else values.tobytes()
        expected = b"]}" + written if binary else b"[" + b",".join([b"1.0"] * count) + b"]}]}"
        assert served.bodies[0].endswith(expected)

    run(main)
    assert where == [here]


@pytest.mark.parametrize("columns", [-1, 10_000], ids=["free", "fixed"])
@pytest.mark.parametrize(
    ("binary", "count", "here"), [(True, 50, True), (True, 60, False), (False, 1, True), (False, 2, False)]
)
def test_outputs_that_are_large_only_together_are_encoded_on_a_thread(
    columns: int, count: int, *, binary: bool, here: bool
) -> None:
    names = [f"y{number}" for number in range(60)]
    requested = [{"name": name, "parameters": {"binary_data": binary}} for name in names[:count]]

    async def main() -> None:
        served = Served()
        inputs = served.engine.loaded[0].signature.inputs
        outputs = tuple(TensorSpec(name, "FP32", (-1, columns)) for name in names)
        served.engine.loaded = [fake_model(signature=Signature(inputs, outputs, batched=True))]
        await served.fed(request(PATH, json.dumps(json.loads(BODY) | {"outputs": requested}).encode()))
        [each] = served.engine.held
        each.outputs = [np.ones((1, 10_000), np.float32) for _ in range(count)]
        each.sink.deliver([each])
        assert isinstance(served.protocol.task, asyncio.Task) is not here
        if isinstance(served.protocol.task, asyncio.Task):
            await served.protocol.task
        assert len(served.bodies[0]) > 40_000 * count

    run(main)


def test_a_large_request_survives_the_replacement_of_its_model_by_one_with_a_full_queue() -> None:
    async def main() -> None:
        served = Served()
        await served.fed(large := request(PATH, BODY + b" " * 70_000))
        served.engine.let_go()
        served.engine.generation += 1
        served.engine.refusal = InferError(Code.OVERLOADED, "its queue is full")
        await served.fed(large[:70_000])
        served.engine.refusal = None  # the rest is not rejected by the new model of that name either
        await served.fed(large[70_000:])
        served.engine.let_go()

        assert served.statuses == [200, 200]

    run(main)


@pytest.mark.parametrize("lines", [(), ("content-encoding: gzip",)])
def test_an_unexpected_exception_is_logged_and_answered_with_the_request_id(
    lines: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        served = Served()
        served.engine.failure = RuntimeError("secret")
        body = gzip.compress(BODY) if lines else BODY
        with caplog.at_level(logging.ERROR):
            status, text = await served.refused(request(PATH, body, "x-request-id: r1", *lines))

        assert (status, text) == (500, "internal error, request id r1")
        assert "secret" in caplog.text
        served.engine.failure = None
        await served.fed(request(PATH, BODY))
        served.engine.let_go()
        assert served.statuses == [500, 200]

    run(main)


def test_an_answer_that_cannot_be_encoded_does_not_affect_others_of_its_batch() -> None:
    async def main() -> None:
        first, second = Served(), Served()
        await first.fed(request(PATH, BODY))
        await second.fed(request(PATH, BODY))
        bad, good = first.engine.held[0], second.engine.held[0]
        bad.outputs, good.outputs = [object()], [np.zeros((1, 4), np.float32)]
        bad.sink.deliver([bad, good])

        assert (first.statuses, second.statuses) == ([500], [200])

    run(main)


@pytest.mark.parametrize(
    ("value", "status", "text"),
    [
        ("x", 400, "Unable to parse Inference-Header-Content-Length, got: x"),
        ("-1", 400, "Unable to parse Inference-Header-Content-Length, got: -1"),
        ("9" * 19, 400, f"Unable to parse Inference-Header-Content-Length, got: {'9' * 19}"),
        ("9" * 4500, 400, ""),
        ("1000", 400, f"inference header size should be in range (0, {len(BODY)}), got: 1000"),
    ],
)
def test_an_invalid_inference_header_content_length_is_rejected(value: str, status: int, text: str) -> None:
    async def main() -> None:
        served = Served()
        found = await served.refused(request(PATH, BODY, f"inference-header-content-length: {value}"))

        assert found[0] == status
        assert found[1] == text or not text

    run(main)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v2/models/m/versions/1/infer", 200),
        ("/v2/models/m/versions/0001/infer", 200),
        ("/v2/models/%6d/infer", 200),
        ("http://host:80/v2/models/m/infer", 200),
        ("HTTPS://host/v2/models/m/infer?a=b", 200),
        ("http://host/v2/models/x/infer", 404),
        ("/v2/models/m/versions/2/infer", 404),
        ("/v2/models/m/versions/0/infer", 404),
        ("/v2/models/%00/infer", 404),
        ("/v2/models/%ff/infer", 404),
        ("/v2/models/m%2F..%2Fm/infer", 404),
        ("/v2/models/m/versions/9223372036854775808/infer", 400),
        ("/v2/models/m/versions/" + "9" * 5000 + "/infer", 400),
    ],
)
def test_an_inference_path_has_a_model_name_and_an_optional_version(path: str, status: int) -> None:
    async def main() -> None:
        served = Served()
        await served.fed(request(path, BODY))
        if status == 200:
            served.engine.let_go()

        assert served.statuses == [status]

    run(main)


def test_a_path_that_only_resembles_an_inference_path_is_passed_to_the_application() -> None:
    async def main() -> None:
        served = Served()
        raw = [request(PATH + end, BODY) for end in ("/", "x", "/generate")]
        raw += [
            request("/v2/models//infer"),
            request("/v2/models/m/versions/x/infer"),
            request("/v2/models/m/v/1/infer"),
        ]
        answers = await served.fed(*raw)

        assert len(answers) == len(raw)
        assert all(answer.body.startswith(b"app ") for answer in answers)

    run(main)
