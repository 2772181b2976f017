"""RemoteEngine and EngineService: every submitted request ends exactly once and correctly, whichever process dies."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching import stream
from penstock.batching.engine import Engine
from penstock.batching.request import InferRequest, InSequence
from penstock.batching.running.custom_outputs import CustomOutputs
from penstock.batching.spec import BatchPolicy, HookSpec
from penstock.batching.stream import AnswerStream, StreamedAnswer
from penstock.server.fronts.message_kinds import ANSWER, DONE, FAILED
from penstock.server.fronts.remote_engine import ENGINE_LOST, NO_ENGINE, UNREADABLE_ANSWER, RemoteEngine
from penstock.server.fronts.request_codec import (
    extra_properties,
    pack_outputs,
    read_submit,
    unpack_outputs,
    write_answer,
    write_custom_outputs,
    write_submit,
)
from penstock.server.ipc.wire import Message
from tests.fakes import Gate, ListSink

from .pair import SPEC, EngineSide, FrontSide, joined, pair, request, until


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on its own loop."""

    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class Ledger:
    """A sink that counts each request's ends, and checks the answers."""

    def __init__(self) -> None:
        self.ends: Counter[float] = Counter()
        self.wrong: list[float] = []
        self.codes: Counter[Code | None] = Counter()

    def deliver(self, requests: Sequence[InferRequest]) -> None:
        for each in requests:
            self.ends[each.context] += 1
            self.codes[each.error.code if each.error else None] += 1
            if each.error is None and not _same(each.outputs, each.inputs):
                self.wrong.append(each.context)


def _same(outputs: Sequence[Array | None] | None, inputs: Sequence[Array | None]) -> bool:
    return outputs is not None and np.array_equal(np.asarray(outputs[0]), np.asarray(inputs[0]))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 5), st.sampled_from([1, 4, 5000])),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.sampled_from(["turn", "close the gate", "open the gate"]), st.just(0), st.just(0)),
        st.tuples(st.sampled_from(["engine cuts", "front cuts", "join"]), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(steps=STEPS)
def test_every_submitted_request_ends_exactly_once_whichever_process_dies(steps: list[tuple[str, int, int]]) -> None:
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int, int]]) -> None:
    gate = Gate(list)
    async with pair(gate) as (engine, front):
        play = Play(gate, engine, front)
        for step, number, width in steps:
            await play.step(step, number, width)
        gate.open()
        await until(lambda: not front.engine.inflight and not engine.engine.inflight)
        play.check()
        if front.link is not None and engine.services:
            (link,) = engine.services
            here, there = link, front.link
            await until(lambda: gc.collect() >= 0 and not here.arena.leases and not there.arena.leases)


class Play:
    """The steps that are applied to a pair, and the requests that were sent."""

    def __init__(self, gate: Gate, engine: EngineSide, front: FrontSide) -> None:
        self.engine = engine
        self.front = front
        self.ledger = Ledger()
        self.sent: list[InferRequest] = []
        self.cancelled: set[float] = set()
        self.deeds = {
            "turn": self.turn, "close the gate": gate.close, "open the gate": gate.open,
            "engine cuts": self.cut, "front cuts": front.part,
        }  # fmt: skip
        self.gate = gate

    async def step(self, step: str, number: int, width: int) -> None:
        if step == "submit":
            for _ in range(number):
                self.submit(width)
        elif step == "cancel" and number < len(self.sent):
            self.cancel(self.sent[number])
        elif step == "join" and self.front.link is None:
            self.gate.open()
            await joined(self.engine, self.front)
        elif step in self.deeds:
            self.deeds[step]()
            await asyncio.sleep(0)

    def turn(self) -> None:
        """Let the loop turn."""

    def submit(self, width: int) -> None:
        try:
            infer_request = request(self.front.engine.model("m"), float(len(self.sent) + 1), self.ledger, width)
            self.front.engine.submit(infer_request)
        except InferError as error:
            if error.code is not Code.NOT_READY:
                raise
        else:
            self.sent.append(infer_request)

    def cancel(self, request: InferRequest) -> None:
        if not self.ledger.ends[request.context]:
            self.cancelled.add(request.context)
        self.front.engine.cancel(request)

    def cut(self) -> None:
        for link in list(self.engine.services):
            self.engine.part(link)

    def check(self) -> None:
        """Compare the answers with the requests that were sent, and forget these."""
        ended = {value for value, count in self.ledger.ends.items() if count}
        assert not self.ledger.wrong
        assert ended | self.cancelled == {each.context for each in self.sent}
        assert not ended & self.cancelled
        assert max(self.ledger.ends.values(), default=0) <= 1
        assert set(self.ledger.codes) <= {None, Code.NOT_READY}
        self.sent.clear()


@on_a_loop
async def test_answers_received_in_one_wake_up_are_delivered_together() -> None:
    async with pair() as (_, front):
        sink, model = ListSink(), front.engine.model("m")
        for value in range(8):
            front.engine.submit(request(model, value, sink))
        await sink.holds(8)

        assert [len(each) for each in sink.deliveries] == [8]


@on_a_loop
async def test_the_properties_of_a_request_reach_the_engine() -> None:
    async with pair() as (engine, front):
        requests_received: list[InferRequest] = []
        submit = engine.engine.submit

        def record(request: InferRequest) -> None:
            requests_received.append(request)
            submit(request)

        engine.engine.submit = record  # type: ignore[method-assign]
        sink = ListSink()
        sent = request(front.engine.model("m"), 1, sink, rows=2)
        sent.id, sent.priority, sent.sequence = "täg\ud800", 1 << 40, InSequence("s", start=True)
        sent.deadline_ns, sent.target_ns, sent.start_ns = 1 << 80, (1 << 63) + 1, 5
        front.engine.submit(sent)
        await sink.holds(1)

        (there,) = requests_received
        assert (there.id, there.priority, there.sequence) == (sent.id, 1 << 40, InSequence("s", start=True))
        assert (there.deadline_ns, there.target_ns, there.start_ns) == ((1 << 64) - 1, (1 << 63) + 1, 5)
        assert (there.rows, there.key, there.output_positions) == (2, ((4,),), (0,))


@on_a_loop
async def test_requests_go_to_the_right_model_after_others_are_loaded_and_replaced() -> None:
    async with pair() as (engine, front):
        names: list[str] = []
        submit = engine.engine.submit

        def record(request: InferRequest) -> None:
            names.append(request.model.name)
            submit(request)

        engine.engine.submit_soon = record
        sink = ListSink()
        await engine.load(replace(SPEC, name="other"))
        calls = [("m", 4), ("m", 5), ("other", 4), ("", 0), ("m", 6), ("m", 7), ("other", 4), ("m", 7)]
        for name, width in calls:
            if not name:
                await engine.load(replace(SPEC, version=2))
                await until(lambda: len(front.engine.numbers) == 2)
                continue
            front.engine.submit(request(front.engine.model(name), width, sink, width))
        await sink.holds(7)

        assert names == [name for name, _ in calls if name]
        assert all(each.error is None for each in sink.requests)


@on_a_loop
async def test_an_error_in_the_engine_is_returned_with_its_code_and_message() -> None:
    async with pair() as (engine, front):
        await engine.load(replace(SPEC, version=2, policy=BatchPolicy(8, max_queue_requests=1, executor="thread")))
        engine.engine.stopping = True
        sink = ListSink()
        front.engine.submit(request(front.engine.model("m"), 1, sink))
        (ended,) = await sink.holds(1)
        engine.engine.stopping = False

        assert ended.error is not None
        assert ended.error.code is Code.NOT_READY
        assert ended.error.message.startswith("Server is stopping, scheduler for model")


@on_a_loop
@pytest.mark.parametrize(("kind", "body"), [(DONE, b"{"), (DONE, b'[{"array": 7}]'), (FAILED, b"[]"), (ANSWER, b"{}")])
async def test_an_unreadable_answer_fails_only_its_own_request(kind: int, body: bytes) -> None:
    async with pair() as (_, front):
        sink, model = ListSink(), front.engine.model("m")
        spoiled, sound = request(model, 1, sink), request(model, 2, sink)
        for each in (spoiled, sound):
            front.engine.submit(each)
        unreadable: Message = (kind, spoiled.remote_id, body, [], [])
        readable: Message = (DONE, sound.remote_id, b"", list(sound.inputs), [])

        assert front.engine.receive([unreadable, readable]) == []

        assert [each.error and each.error.message for each in (spoiled, sound)] == [UNREADABLE_ANSWER, None]
        assert len(sink.requests) == 2
        assert front.engine.inflight == 0


@on_a_loop
async def test_unread_streamed_answers_are_freed_with_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_UNREAD_BYTES", 1)
    gc.collect()
    gc.disable()  # the collector runs rarely, and until then the answers would keep the engine's shared memory
    try:
        async with pair() as (_, front):
            sent, sink = request(front.engine.model("m"), 1, ListSink()), ref(answers := AnswerStream())
            sent.answer_sink = sent.sink = answers
            front.engine.submit(sent)
            head, arrays = write_answer(StreamedAnswer({"y": np.ones(3, np.float32)}))
            assert front.engine.receive([(ANSWER, sent.remote_id, head, arrays, []) for _ in range(2)]) == []
            assert sent.error is not None
            assert sent.error.code is Code.OVERLOADED

            del sent, answers

            assert sink() is None
    finally:
        gc.enable()


@on_a_loop
async def test_a_canceled_request_with_several_answers_is_canceled_in_the_engine_and_sends_no_more() -> None:
    gate = Gate(list)
    async with pair(gate) as (engine, front):
        model = await engine.load(replace(SPEC, version=2, declared_config="{}", decoupled=True))
        await until(lambda: front.engine.model("m").spec == model.spec)
        submitted, canceled, received = record_calls(engine.engine, front.engine)
        gate.close()
        streamed, answers, sink = request(front.engine.model("m"), 1, ListSink()), AnswerStream(), ListSink()
        streamed.answer_sink = streamed.sink = answers
        front.engine.submit(streamed)
        await gate.entered()
        (there,) = submitted
        answer = StreamedAnswer({"y": np.ones(3, np.float32)})
        there.answer_sink.send(answer)
        assert (await answers.next()) is not None

        front.engine.cancel(streamed)
        await until(lambda: canceled)
        assert there.answer_sink.send(answer) is None
        gate.open()
        front.engine.submit(request(front.engine.model("m"), 2, sink))
        await sink.holds(1)

        assert canceled == [there]
        assert [kind for kind in received if kind in {ANSWER, DONE, FAILED}] == [ANSWER, DONE]


def record_calls(engine: Engine, front: RemoteEngine) -> tuple[list[InferRequest], list[InferRequest], list[int]]:
    """Record the requests submitted to and canceled in the engine, and the kinds of messages that a front end gets."""
    submitted: list[InferRequest] = []
    canceled: list[InferRequest] = []
    received: list[int] = []
    submit, cancel, receive = engine.submit_soon, engine.cancel, front.receive

    def submit_soon(request: InferRequest) -> None:
        submitted.append(request)
        submit(request)

    def record_cancel(request: InferRequest) -> None:
        canceled.append(request)
        cancel(request)

    def record_messages(messages: list[Message]) -> list[Message]:
        received.extend(kind for kind, *_ in messages)
        return receive(messages)

    engine.submit_soon = submit_soon
    engine.cancel = record_cancel  # type: ignore[method-assign]
    front.receive = record_messages  # type: ignore[method-assign]
    return submitted, canceled, received


@on_a_loop
async def test_a_request_without_an_engine_is_rejected_with_a_retry_delay() -> None:
    async with pair() as (_, front):
        model = front.engine.model("m")
        generation = front.engine.generation
        front.part()

        for refused in (lambda: front.engine.model("m"), lambda: front.engine.submit(request(model, 1, ListSink()))):
            with pytest.raises(InferError, match=NO_ENGINE) as caught:
                refused()
            assert caught.value.code is Code.NOT_READY
            assert caught.value.retry_after_ns > 0
        assert front.engine.early_rejection(model) is not None
        assert front.engine.generation > generation


@on_a_loop
async def test_requests_in_flight_fail_at_once_when_the_engine_disconnects() -> None:
    gate = Gate(list)
    async with pair(gate) as (engine, front):
        gate.close()
        sink = ListSink()
        front.engine.submit(request(front.engine.model("m"), 1, sink))
        await gate.entered()
        for link in list(engine.services):
            engine.part(link)
        (ended,) = await sink.holds(1)

        assert ended.error is not None
        assert (ended.error.code, ended.error.message) == (Code.NOT_READY, ENGINE_LOST)
        gate.open()


@on_a_loop
async def test_a_replaced_model_serves_until_no_front_end_holds_it() -> None:
    async with pair() as (engine, front):
        old = front.engine.model("m")
        front.engine.hold(old)
        opened = await engine.published.open(SPEC)
        retirement = engine.published.publish("m", [opened])
        await until(lambda: front.engine.model("m") is not old)
        async with asyncio.timeout(10):
            await engine.published.wait_applied()
        for _ in range(20):
            await asyncio.sleep(0)  # enough turns for the old model to be closed
        sink = ListSink()
        front.engine.submit(request(old, 3, sink))
        (ended,) = await sink.holds(1)
        assert ended.error is None
        assert not retirement.done()

        front.engine.release(old)
        async with asyncio.timeout(10):
            await retirement
        assert list(engine.published.models.values()) == [opened]


@on_a_loop
async def test_a_model_load_fails_when_a_front_end_cannot_load_its_hooks(tmp_path: Any) -> None:
    (tmp_path / "hooks.py").write_text("raise ValueError('no')")
    async with pair() as (engine, front):
        with pytest.raises(InferError, match="no"):
            await engine.published.open(replace(SPEC, name="hooked", hooks=HookSpec(tmp_path / "hooks.py")))
        with pytest.raises(InferError, match="unknown model"):
            front.engine.model("hooked")


@on_a_loop
async def test_a_model_without_hooks_is_announced_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (engine, front):
        messages: list[int] = []
        model_table = front.model_table
        assert model_table is not None
        take = model_table.receive

        def counted(number: int, body: bytes) -> None:
            messages.append(number)
            take(number, body)

        monkeypatch.setattr(model_table, "receive", counted)
        model = await engine.published.open(replace(SPEC, name="more"))
        await engine.published.publish("more", [model])

        assert front.engine.model("more").name == "more"
        assert len(messages) == 1


@on_a_loop
async def test_missing_models_and_versions_have_the_same_errors_as_in_the_engine() -> None:
    async with pair() as (engine, front):
        engine.published.publish("m", (), ["7"])
        await until(lambda: not front.engine.models())
        for name, version in (("m", ""), ("m", "1"), ("m", "7"), ("m", "9"), ("x", "")):
            texts = []
            for side in (engine.engine, front.engine):
                with pytest.raises(InferError) as caught:
                    side.model(name, version)
                texts.append((caught.value.code, caught.value.message))
            assert texts[0] == texts[1]


@on_a_loop
async def test_parameters_and_timeout_of_a_request_reach_user_code() -> None:
    async with pair() as (engine, _):
        sent, come = (request(engine.engine.model("m"), 1, ListSink()) for _ in range(2))
        sent.parameters, sent.timeout_us = {"mine": 3}, 11_000_000_000

        read_submit(come, write_submit(sent, 0, extra_properties(sent, takes_parameters=True, forwards_trace=False)))

    assert (come.parameters, come.timeout_us) == ({"mine": 3}, 11_000_000_000)


def test_parameters_and_errors_set_by_user_code_are_returned_with_outputs() -> None:
    outputs = CustomOutputs([np.ones(2), None], {"number": 3, "yes": True}, "lacks one")

    there = unpack_outputs(write_custom_outputs(outputs), list(outputs))

    assert isinstance(there, CustomOutputs)
    assert (there[1], there.parameters, there.mismatch) == (None, {"number": 3, "yes": True}, "lacks one")


def test_outputs_that_are_not_tensors_are_returned_unchanged() -> None:
    outputs = [np.ones(2, np.float32), [{1: 0.5, "b": np.float32(2)}, {}], [np.arange(3)], (b"x", None, True)]

    body, arrays = pack_outputs(outputs)
    there = unpack_outputs(body, arrays)

    assert there[1] == [{1: 0.5, "b": 2.0}, {}]
    assert there[2][0].tolist() == [0, 1, 2]
    assert there[3] == [b"x", None, True]
