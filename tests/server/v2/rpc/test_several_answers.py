"""ModelStreamInfer and ModelInfer with a model that gives several answers, over a fake call and fake hooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.batching.model import Model
from penstock.server.grpc.method import Status
from penstock.server.hooks.generator_call import Answer
from penstock.server.v2.rpc import stream, ticker
from tests.fakes import fake_model
from tests.server.v2.rpc.calls import FakeCall, FakeHooks, Services, pb, request, settled, turns

EMPTY: dict[str, Any] = {"triton_enable_empty_final_response": {"bool_param": True}}


class Yielding(FakeHooks):
    """Hooks that yield what the test puts: outputs, an error to yield or raise, an Answer, or None for the end."""

    def __init__(self) -> None:
        super().__init__(dict)
        self.decoupled = self._answers
        self.puts: asyncio.Queue[Any] = asyncio.Queue()
        self.begun = 0
        self.message_count = 0
        self.closed = 0

    async def _answers(self, inputs: Mapping[str, Array]) -> AsyncGenerator[Answer, None]:
        self.begun += 1
        try:
            while (put := await self.puts.get()) is not None:
                self.message_count += 1
                if isinstance(put, RuntimeError):
                    raise InferError(Code.INVALID, str(put))
                if isinstance(put, InferError):
                    put = Answer({}, put)
                yield put if isinstance(put, Answer) else Answer({"y": put})
        finally:
            self.closed += 1

    def put(self, *each: Any) -> None:
        for one in each:
            self.puts.put_nowait(one)


def decoupled(name: str = "d") -> Model:
    model = fake_model(name)
    model.spec = replace(model.spec, decoupled=True)
    return model


def row(number: float) -> Array:
    return np.full((1, 4), number, np.float32)


def sent(call: FakeCall) -> list[tuple[str, str, float | None, bool]]:
    """Return the answers sent: error text, id, first number and whether each is final."""
    found = []
    for message in call.sent:
        each = pb.ModelStreamInferResponse.FromString(message)
        answer = each.infer_response
        numbers = np.frombuffer(b"".join(answer.raw_output_contents), np.float32)
        final = answer.parameters["triton_final_response"]
        assert final.HasField("bool_param")
        found.append((each.error_message, answer.id, float(numbers[0]) if len(numbers) else None, final.bool_param))
    return found


class Scene:
    """A stream to a model whose hooks yield, and to a plain model without hooks."""

    def __init__(self, **how: Any) -> None:
        self.hooks = Yielding()
        self.services = Services(decoupled(), fake_model(), hooks=self.hooks)
        self.call, self.reader = self.services.open(**how)

    def ask(self, request_id: str, model: str = "d", **parameters: Any) -> None:
        if model == "m":
            parameters["hooks"] = {"bool_param": False}
        message = request(id=request_id, model_name=model, parameters=parameters)
        self.reader.on_message(message.SerializeToString())

    async def has_sent(self, count: int) -> list[tuple[str, str, float | None, bool]]:
        while len(self.call.sent) < count:
            await turns(1)
        return sent(self.call)


def run(main: Any) -> None:
    async def guarded() -> None:
        async with asyncio.timeout(10):
            await main()

    asyncio.run(guarded())


def test_decoupled_answers_are_sent_immediately_while_plain_answers_keep_their_order() -> None:
    async def main() -> None:
        scene = Scene()
        scene.ask("plain", "m")
        scene.ask("several", **EMPTY)
        scene.ask("next", "m")
        scene.hooks.put(row(1))
        assert await scene.has_sent(1) == [("", "several", 1.0, False)]
        scene.services.engine.let_go()
        assert (await scene.has_sent(3))[1:] == [("", "plain", 1.0, True), ("", "next", 1.0, True)]
        scene.reader.on_half_close()
        scene.hooks.put(row(2), None)
        await settled()
        assert sent(scene.call)[3:] == [("", "several", 2.0, False), ("", "several", None, True)]
        assert scene.call.status is Status.OK

    run(main)


def test_a_final_error_is_marked_as_the_final_answer() -> None:
    async def main() -> None:
        scene = Scene()
        scene.ask("a", **EMPTY)
        scene.reader.on_half_close()
        scene.hooks.put(row(1), Answer({}, InferError(Code.INVALID, "wrong"), final=True), None)
        await settled()
        assert sent(scene.call) == [("", "a", 1.0, False), ("wrong", "a", None, True)]
        assert scene.call.status is Status.OK

    run(main)


def test_no_empty_final_answer_is_sent_unless_it_is_requested() -> None:
    async def main() -> None:
        scene = Scene()
        scene.ask("a")
        scene.reader.on_half_close()
        assert not scene.call.ended
        scene.hooks.put(None)
        await settled()
        assert (scene.call.sent, scene.call.status) == ([], Status.OK)

    run(main)


def test_the_next_answer_waits_until_the_client_has_read() -> None:
    async def main() -> None:
        scene = Scene()
        scene.ask("a")
        await turns()
        scene.call.writable = False
        scene.hooks.put(*[row(number) for number in range(5)])
        await turns()
        assert (scene.call.sent, scene.hooks.message_count) == ([], 1)
        scene.call.writable = True
        scene.call.reads.set()
        assert [each[2] for each in await scene.has_sent(5)] == [0, 1, 2, 3, 4]
        scene.call.lose()
        await settled()

    run(main)


def test_no_request_is_started_while_the_client_does_not_read() -> None:
    async def main() -> None:
        scene = Scene()
        scene.call.writable = False
        scene.hooks.put(row(1), None)
        scene.ask("a")
        await turns()
        assert scene.hooks.message_count == 0
        scene.call.writable = True
        scene.call.reads.set()
        assert [each[2] for each in await scene.has_sent(1)] == [1]
        await settled()

    run(main)


@pytest.mark.parametrize("pad", [0, 300_000])
def test_a_model_is_held_for_a_request_that_waits_until_the_client_reads(pad: int) -> None:
    async def main() -> None:
        scene = Scene()
        model = scene.services.engine.loaded[0]
        scene.call.writable = False
        scene.call.reads.set()
        scene.ask("a", pad={"string_param": "x" * pad})
        while scene.call.reads.is_set():
            await turns(1)
        await turns()
        assert (model.hold_count, scene.hooks.begun) == (1, 0)
        scene.call.lose()
        await settled()
        assert model.hold_count == 0

    run(main)


def test_the_number_of_decoupled_requests_in_progress_per_stream_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(stream, "MAX_ANSWERING", 2)
        scene = Scene()
        for name in "abc":
            scene.ask(name, **EMPTY)
        await turns()
        assert scene.hooks.begun == 2
        scene.hooks.put(None, None, None)
        await settled()
        assert (scene.hooks.begun, [each[1] for each in sent(scene.call)]) == (3, ["a", "b", "c"])

    run(main)


def test_a_failed_answer_is_followed_by_others_and_a_raised_error_is_the_last_answer() -> None:
    async def main() -> None:
        scene = Scene()
        scene.ask("a", **EMPTY)
        scene.hooks.put(InferError(Code.INVALID, "this one"), row(1), RuntimeError("all of it"))
        await settled()
        assert sent(scene.call) == [
            ("this one", "a", None, False),
            ("", "a", 1.0, False),
            ("all of it", "a", None, True),
        ]
        answer = pb.ModelStreamInferResponse.FromString(scene.call.sent[0]).infer_response
        assert (answer.model_name, answer.model_version) == ("d", "1")
        assert not scene.call.ended

    run(main)


@pytest.mark.parametrize("error", [InferError(Code.INVALID, "no"), RuntimeError("no")])
def test_an_error_ends_the_stream_and_closes_its_other_requests_if_the_client_requests_grpc_errors(
    error: Exception,
) -> None:
    async def main() -> None:
        scene = Scene(metadata={"triton_grpc_error": "true"})
        scene.ask("a")
        scene.ask("b")
        scene.ask("plain", "m")
        await turns()
        scene.hooks.put(error)
        await settled()
        assert (scene.call.status, scene.call.text, scene.hooks.closed) == (Status.INVALID_ARGUMENT, "no", 2)
        assert scene.services.engine.cancelled == scene.services.engine.held

    run(main)


def test_a_stream_that_is_lost_closes_its_generators() -> None:
    async def main() -> None:
        scene = Scene()
        scene.ask("a")
        scene.hooks.put(row(1))
        await scene.has_sent(1)
        scene.call.lose()
        await settled()
        assert scene.hooks.closed == 1
        assert all(not model.hold_count for model in scene.services.engine.loaded)

    run(main)


def test_a_call_without_hooks_has_one_final_answer_and_does_not_wait_for_its_turn() -> None:
    async def main() -> None:
        scene = Scene()
        scene.ask("first", "m")
        scene.ask("loose", hooks={"bool_param": False}, **EMPTY)
        first, loose = scene.services.engine.held
        scene.services.engine.held = [loose]
        scene.services.engine.let_go()
        assert sent(scene.call) == [("", "loose", 1.0, True)]
        scene.services.engine.held = [first]
        scene.services.engine.let_go()
        assert [each[1] for each in sent(scene.call)] == ["loose", "first"]
        scene.ask("refused", hooks={"bool_param": False})
        scene.services.engine.fail(InferError(Code.EXPIRED, "late"))
        assert sent(scene.call)[2] == ("late", "refused", None, True)

    run(main)


def test_a_large_decoupled_message_leaves_the_order_after_it_is_decoded() -> None:
    async def main() -> None:
        scene = Scene()
        # from then on the server knows that the model has no sequences
        scene.ask("known", hooks={"bool_param": False})
        scene.services.engine.let_go()
        scene.call.sent.clear()
        scene.ask("large", pad={"string_param": "x" * 300_000})
        scene.ask("plain", "m")
        scene.services.engine.let_go()
        assert scene.call.sent == []
        assert [each[1] for each in await scene.has_sent(1)] == ["plain"]
        scene.hooks.put(row(1), None)
        scene.reader.on_half_close()
        await settled()
        assert [each[1] for each in sent(scene.call)] == ["plain", "large"]

    run(main)


def test_decoupled_requests_count_toward_the_streams_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(stream, "MAX_IN_FLIGHT", 2)
        scene = Scene()
        for name in "abc":
            scene.ask(name)
        assert sent(scene.call) == [("Exceeds maximum queue size", "c", None, True)]
        scene.call.lose()
        await settled()

    run(main)


def test_a_draining_server_does_not_end_a_stream_that_still_has_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(ticker, "INTERVAL_S", 0)
        scene = Scene()
        scene.ask("a")
        scene.services.health.disconnecting = True
        await turns()
        assert not scene.call.ended
        scene.hooks.put(row(1), None)
        await scene.has_sent(1)
        await turns()
        assert scene.call.status is Status.UNAVAILABLE

    run(main)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("pad", ["", "x" * 300_000])
def test_unary_model_infer_is_rejected_for_a_decoupled_model(pad: str, again: bool) -> None:
    async def main() -> None:
        services = Services(decoupled())
        wrong = request(id="1", model_name="d", datatype="INT8", parameters={"pad": {"string_param": pad}})
        if again:
            # the server has cached the layout of such a message from a stream
            wrong.inputs[0].datatype = "FP32"
            _, reader = services.open()
            reader.on_message(wrong.SerializeToString())
            await turns()
        call = services.call("ModelInfer", wrong)
        while not call.ended:
            await turns(1)
        text = "ModelInfer RPC doesn't support models with decoupled transaction policy"
        assert (call.status, call.text) == (Status.UNIMPLEMENTED, text)

    run(main)
