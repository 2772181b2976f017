"""The generate extension: members that become tensors or parameters, and answers as objects and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from starlette.requests import Request

from penstock.backends.errors import Code, InferError
from penstock.backends.signature import Signature, TensorSpec
from penstock.batching.model import Model
from penstock.server.hooks.generator_call import Answer
from penstock.server.http.limits import Limits
from penstock.server.http.uvicorn_answers import PARTS
from penstock.server.v2.generate import _LARGE_BYTES, _MAX_GROUP_BYTES, Generate, parse_generate
from penstock.server.v2.generate_encoder import GenerateEncoder
from tests.clients import models
from tests.fakes import fake_model
from tests.live import live_server
from tests.server.v2.held_engine import HeldEngine

WORDS = Signature(
    (TensorSpec("text", "BYTES", (-1, 1)), TensorSpec("n", "INT32", (-1, -1, 2), optional=True)),
    (TensorSpec("out", "BYTES", (-1, 1)), TensorSpec("m", "FP32", (-1, 2))), batched=True,
)  # fmt: skip
MODEL = fake_model(signature=WORDS)


def decode_members(**members: Any) -> Any:
    return parse_generate(MODEL, json.dumps(members).encode(), 100)


def refused(**members: Any) -> str:
    with pytest.raises(InferError) as caught:
        decode_members(**members)
    return caught.value.message


class TestDecoding:
    def test_a_member_named_like_an_input_is_a_tensor_and_any_other_is_a_parameter(self) -> None:
        request_id, inputs, options = decode_members(
            text="hello", id="7", temperature=0.5, parameters={"n": [1, 2, 3, 4], "k": True}
        )

        assert request_id == "7"
        assert inputs["text"].tolist() == [[b"hello"]]
        assert inputs["n"].tolist() == [[[1, 2], [3, 4]]]
        assert options.parameters == {"temperature": 0.5, "k": True}

    def test_the_innermost_free_dim_takes_the_remaining_values(self) -> None:
        assert decode_members(text=["a", "b"])[1]["text"].tolist() == [[b"a"], [b"b"]]

    def test_values_that_do_not_fill_the_input_shape_are_rejected(self) -> None:
        text = "The schema can not convert input 'n' to tensor with proper shape"

        assert refused(text="a", n=[1, 2, 3]) == text
        assert refused(text="a", n=1) == text

    def test_a_missing_or_duplicate_input_or_a_nested_parameter_is_rejected(self) -> None:
        assert "missing required input(s) ['text']" in refused(n=[1, 2])
        nested = "Converting keyword: 'parameters': "
        assert refused(text="a", parameters={"text": "b"}) == f"{nested}input 'text' already exists in request"
        twice = refused(text="a", n=[1, 2], parameters={"nested": {"twice": 1}})
        assert twice.startswith(f"{nested}parameter 'nested' has invalid type. It should be")
        for members in (
            '"text": "a", "text": "b"',
            '"text": "a", "\\u0074ext": "b"',
            '"n": [1, 2], "text": "a", "n": [1, 2]',
        ):
            with pytest.raises(InferError, match=r"input '(text|n)' already exists in request"):
                parse_generate(MODEL, f"{{{members}}}".encode(), 100)
        assert parse_generate(MODEL, b'{"text": "a\\n"}\0', 100)[1]["text"].tolist() == [[b"a\n"]]
        assert refused(text="a", parameters=[1]) == "Expected JSON object for keyword: 'parameters'"
        assert refused(text="a", triton_x=1).startswith("parameter keys starting with 'triton_'")
        with pytest.raises(InferError, match="must be a JSON object"):
            parse_generate(MODEL, b"[]", 100)


def test_an_answer_has_its_outputs_by_name_and_single_values_without_brackets() -> None:
    outputs = {"out": np.array([[b"hi"]], np.object_), "m": np.array([[1.5, 2]], np.float32)}

    assert (
        GenerateEncoder(MODEL, "").write(outputs) == b'{"m":[1.5,2.0],"model_name":"m","model_version":"1","out":"hi"}'
    )
    assert json.loads(GenerateEncoder(MODEL, "7").write(outputs))["id"] == "7"


def test_equal_parameters_of_different_types_are_written_with_their_own_types() -> None:
    members, outputs = GenerateEncoder(MODEL, ""), {"out": np.array([b"hi"], np.object_)}
    values: list[Any] = [1, True, 1.0, "1", 1]

    written = [members.write(outputs, {"n": each}) for each in values]

    assert [text.split(b",")[2] for text in written] == [b'"n":1', b'"n":true', b'"n":1.0', b'"n":"1"', b'"n":1']


def test_answers_to_one_request_may_differ_in_names_shapes_and_datatypes() -> None:
    members = GenerateEncoder(MODEL, "7")
    end = b'"model_name":"m","model_version":"1"'
    one, two = np.ones(1, np.float32), np.ones(2, np.int32)

    for _ in range(2):
        assert members.write({"m": one}) == b'{"id":"7","m":1.0,%b}' % end
        assert members.write({"m": one.astype(np.int64)}) == b'{"id":"7","m":1,%b}' % end
        assert members.write({"m": two}) == b'{"id":"7","m":[1,1],%b}' % end
        assert members.write({"z": two, "a": one}) == b'{"a":1.0,"id":"7",%b,"z":[1,1]}' % end
        assert members.write({}) == b'{"id":"7",%b}' % end
        assert members.write({"id": one, "model_name": two}) == b'{"id":"7",%b}' % end


def test_the_first_of_several_outputs_that_cannot_be_written_is_in_the_error() -> None:
    half = np.ones(1, np.float16)

    for outputs in ({"z": half, "a": half}, {"a": half, "z": half}):
        with pytest.raises(InferError, match=f"output '{next(iter(outputs))}'"):
            GenerateEncoder(MODEL, "").write(outputs)


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_no_model_is_held_while_a_request_body_is_being_received(verb: str) -> None:
    engine, held = HeldEngine(), list[int]()
    (model,) = engine.loaded

    async def receive() -> Any:
        held.append(model.hold_count)
        return {"type": "http.request", "body": b'{"x":[1,2,3,4]}', "more_body": False}

    def hooks_of(model: Model) -> Any:
        held.append(model.hold_count)
        raise InferError(Code.NOT_READY, "so far")

    request = Request({"type": "http", "path_params": {"model": "m"}, "headers": []}, receive)
    with pytest.raises(InferError, match="so far"):
        asyncio.run(getattr(Generate(cast(Any, engine), Limits(), hooks_of), verb)(request))

    assert held == [0, 1]


class Streamed:
    """Hooks that give these answers, and the events that were sent, one list per write."""

    def __init__(self, *answers: Answer, error: Exception | None = None) -> None:
        self.has_pre = False
        self.writes: list[list[bytes]] = []
        self.status = 0
        self._answers = answers
        self._error = error

    async def stream(self, *_: Any) -> AsyncIterator[Answer]:
        for each in self._answers:
            yield each
        if self._error is not None:
            raise self._error

    async def send(self, parts: Sequence[bytes]) -> None:
        self.writes.append(list(parts))

    async def answer_bodies(self) -> list[list[bytes]]:
        engine, silent = HeldEngine(), asyncio.Event()
        messages = [{"type": "http.request", "body": b'{"x":[1,2,3,4]}', "more_body": False}]

        async def receive() -> Any:
            return messages.pop() if messages else await silent.wait()

        async def send(message: Any) -> None:
            self.status = message.get("status", self.status)

        scope = {"type": "http", "path_params": {"model": "m"}, "headers": [], "extensions": {PARTS: self}}
        generate = Generate(cast(Any, engine), Limits(), lambda _: cast(Any, self))
        answer = await generate.generate_stream(Request(scope, receive))
        await answer(scope, receive, send)
        assert engine.loaded[0].hold_count == 0
        return self.writes


def y(value: float, *, more: bool = False, count: int = 1) -> Answer:
    return Answer({"y": np.full((1, count), value, np.float32)}, more=more)


def event(value: float) -> bytes:
    return b'data: {"model_name":"m","model_version":"1","y":%.1f}\n\n' % value


class TestEventGrouping:
    def test_events_that_are_available_together_are_written_together(self) -> None:
        streamed = Streamed(y(1), y(2, more=True), y(3, more=True), y(4), y(5))

        assert asyncio.run(streamed.answer_bodies()) == [[event(1)], [event(2), event(3), event(4)], [event(5)]]

    def test_events_already_available_are_written_before_a_later_error(self) -> None:
        late = InferError(Code.INTERNAL, "half-way")
        *events, [last] = asyncio.run(Streamed(y(1), y(2, more=True), error=late).answer_bodies())

        assert events == [[event(1)], [event(2)]]
        assert last == b'data: {"error":"half-way"}\n\n'

    def test_events_already_available_are_written_before_an_answer_that_cannot_be_encoded(self) -> None:
        bad = Answer({"y": np.array([[b"\xff"]], np.object_)})
        *events, [last] = asyncio.run(Streamed(y(1, more=True), y(2, more=True), bad).answer_bodies())

        assert events == [[event(1), event(2)]]
        assert last.startswith(b'data: {"error":"output \'y\' holds bytes that are not UTF-8')

    def test_a_failed_answer_is_grouped_with_its_neighbors_and_the_first_answer_sets_the_status(self) -> None:
        failed = Answer({}, InferError(Code.OVERLOADED, "not today"), more=True)
        text = b'data: {"error":"not today"}\n\n'

        for answers, status in (((failed, y(1)), 503), ((y(1, more=True), failed, y(1)), 200)):
            streamed = Streamed(*answers)
            (together,) = asyncio.run(streamed.answer_bodies())
            assert together[-2:] == [text, event(1)]
            assert streamed.status == status

    def test_a_large_group_of_events_is_written_in_several_pieces(self) -> None:
        writes = asyncio.run(Streamed(*[y(1, more=True, count=4000)] * 20, y(1)).answer_bodies())

        assert sum(map(len, writes)) == 21
        assert max(sum(map(len, texts)) for texts in writes) < 2 * _MAX_GROUP_BYTES

    def test_a_large_event_does_not_delay_the_events_before_it(self) -> None:
        large = y(2, more=True, count=_LARGE_BYTES)
        writes = asyncio.run(Streamed(y(1, more=True), large, y(3)).answer_bodies())

        assert [len(texts) for texts in writes] == [1, 1, 1]
        assert writes[0] == [event(1)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    root: Path = tmp_path_factory.mktemp("repository")
    models.write_examples(root)
    models.write_identity(root, "rows", "")
    with live_server(root) as live, httpx.Client(base_url=live.url) as client:
        yield client


SIMPLE = {"INPUT0": list(range(16)), "INPUT1": [1] * 16}


class TestEndpoints:
    @pytest.mark.parametrize("path", ["/v2/models/simple", "/v2/models/simple/versions/1"])
    def test_generate_returns_one_json_object(self, server: httpx.Client, path: str) -> None:
        answer = server.post(f"{path}/generate", json=SIMPLE)

        assert answer.headers["content-type"] == "application/json"
        assert answer.json() == {
            "model_name": "simple", "model_version": "1", "OUTPUT0": [i + 1 for i in range(16)],
            "OUTPUT1": [i - 1 for i in range(16)],
        }  # fmt: skip

    def test_generate_stream_returns_one_event_for_an_ordinary_model(self, server: httpx.Client) -> None:
        answer = server.post("/v2/models/rows/generate_stream", json={"x": 2.5})

        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.text == 'data: {"model_name":"rows","model_version":"1","y":2.5}\n\n'

    def test_generate_stream_disables_buffering_in_proxies(self, server: httpx.Client) -> None:
        for kind, buffering in (("generate_stream", "no"), ("generate", None)):
            answer = server.post(f"/v2/models/rows/{kind}", json={"x": 2.5})

            assert answer.headers.get("x-accel-buffering") == buffering

    def test_an_error_before_inference_is_returned_as_json(self, server: httpx.Client) -> None:
        for kind in ("generate", "generate_stream"):
            answer = server.post(f"/v2/models/simple/{kind}", json={"INPUT0": 1})
            assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
            assert server.post(f"/v2/models/nobody/{kind}", json={}).status_code == 404
            assert server.get(f"/v2/models/simple/{kind}").status_code == 405
            coded = server.post(f"/v2/models/simple/{kind}", content=b"", headers={"content-encoding": "gzip"})
            assert coded.json() == {"error": "Unsupported content-encoding, only 'identity' is supported."}

    def test_an_input_shape_that_does_not_fit_the_model_is_rejected_as_json(self, server: httpx.Client) -> None:
        for kind in ("generate", "generate_stream"):
            answer = server.post(f"/v2/models/simple/{kind}", json={"INPUT0": [1] * 32, "INPUT1": [1] * 16})
            assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
            assert answer.json() == {"error": "input 'INPUT1' batch size does not match other inputs for 'simple'"}

    def test_an_error_during_inference_is_an_event_of_generate_stream(self, server: httpx.Client) -> None:
        words = {"INPUT0": ["x"] * 16, "INPUT1": ["1"] * 16}

        answer = server.post("/v2/models/simple_string/generate_stream", json=words)
        assert answer.status_code >= 400
        assert answer.text.startswith('data: {"error":')
        assert answer.text.endswith("}\n\n")
        assert server.post("/v2/models/simple_string/generate", json=words).json().keys() == {"error"}
