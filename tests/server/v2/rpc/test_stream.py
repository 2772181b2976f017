"""ModelStreamInfer over a fake call and an Engine that answers on demand."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Mapping

import numpy as np
import pytest

from penstock.backends.backend import Array
from penstock.backends.errors import Code, InferError
from penstock.server.grpc.method import Status
from penstock.server.grpc.request import SHUTTING_DOWN
from penstock.server.v2.rpc import stream, ticker
from tests.server.v2.held_engine import ROW
from tests.server.v2.rpc.calls import FakeCall, FakeHooks, Services, request, settled, stream_answers, turns

DATA = ROW.tobytes()


def sent(call: FakeCall) -> list[tuple[str, str, bytes]]:
    return stream_answers(call)


def run(main: object) -> None:
    asyncio.run(main())  # type: ignore[operator]


def test_answers_are_sent_in_the_order_of_the_requests() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        for name in "abc":
            reader.on_message(request(id=name).SerializeToString())
        first, *others = services.engine.held
        services.engine.held = others
        services.engine.let_go()
        assert sent(call) == []
        services.engine.held = [first]
        services.engine.let_go()
        assert sent(call) == [("", name, DATA) for name in "abc"]
        assert not call.ended

    run(main)


def test_an_invalid_request_is_answered_in_its_turn_and_the_stream_continues() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        reader.on_message(request(id="good").SerializeToString())
        reader.on_message(request(id="bad", model_name="no").SerializeToString())
        reader.on_message(b"\xff")
        assert sent(call) == []
        services.engine.let_go()
        reader.on_message(request(id="next").SerializeToString())
        services.engine.fail(InferError(Code.EXPIRED, "Request timeout expired"))
        texts = ["", "Request for unknown model: 'no' is not found", "failed to parse", "Request timeout expired"]
        for (text, *_), expected in zip(sent(call), texts, strict=True):
            assert text.startswith(expected)
        assert [each[1] for each in sent(call)] == ["good", "bad", "", "next"]
        assert call.errors == [Status.NOT_FOUND, Status.INVALID_ARGUMENT, Status.UNAVAILABLE]
        assert not call.ended

    run(main)


def test_an_error_ends_the_stream_with_its_status_if_the_client_requests_grpc_errors() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open(metadata={"triton_grpc_error": "true"})
        reader.on_message(request().SerializeToString())
        reader.on_message(request(model_name="no").SerializeToString())
        reader.on_message(request().SerializeToString())
        first, last = services.engine.held
        services.engine.held = [first]
        services.engine.let_go()
        assert len(call.sent) == 1
        assert (call.status, call.text) == (Status.NOT_FOUND, "Request for unknown model: 'no' is not found")
        assert services.engine.cancelled == [last]
        reader.on_message(request().SerializeToString())
        assert services.engine.held == []

    run(main)


def test_a_half_closed_stream_ends_after_the_last_answer() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        reader.on_message(request().SerializeToString())
        reader.on_half_close()
        assert not call.ended
        services.engine.let_go()
        assert (len(call.sent), call.status) == (1, Status.OK)

    run(main)


def test_a_stream_without_requests_ends_immediately() -> None:
    async def main() -> None:
        call, reader = Services().open()
        reader.on_half_close()
        assert call.status is Status.OK

    run(main)


def test_a_stream_that_is_lost_cancels_all_its_requests() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        for _ in range(3):
            reader.on_message(request().SerializeToString())
        call.lose()
        assert services.engine.cancelled == services.engine.held
        services.engine.let_go()
        assert call.sent == []

    run(main)


def test_requests_beyond_the_streams_limit_are_rejected_individually(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(stream, "MAX_IN_FLIGHT", 2)
        services = Services()
        call, reader = services.open()
        for name in "abc":
            reader.on_message(request(id=name).SerializeToString())
        assert len(services.engine.held) == 2
        services.engine.let_go()
        assert [each[:2] for each in sent(call)] == [("", "a"), ("", "b"), ("Exceeds maximum queue size", "c")]

    run(main)


def test_large_messages_and_requests_with_hooks_are_answered_in_their_turn() -> None:
    def post(inputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": inputs["x"] + 1}

    async def main() -> None:
        services = Services(hooks=FakeHooks(post))
        call, reader = services.open()
        message = request(id="plain", parameters={"hooks": {"bool_param": False}})
        reader.on_message(request(id="hooked").SerializeToString())
        reader.on_message(request(id="large", parameters={"pad": {"string_param": "x" * 300_000}}).SerializeToString())
        reader.on_message(message.SerializeToString())
        services.engine.let_go()
        reader.on_half_close()
        await settled()
        more = (ROW + 1).tobytes()
        assert sent(call) == [("", "hooked", more), ("", "large", more), ("", "plain", DATA)]
        assert call.status is Status.OK

    run(main)


def test_a_large_invalid_message_is_answered_with_its_id() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        wrong = request(np.zeros((1, 80_000), np.float32), id="large", datatype="INT8")
        reader.on_message(wrong.SerializeToString())
        await settled()
        ((text, request_id, _),) = sent(call)
        assert (request_id, "data-type is 'INT8'" in text) == ("large", True)

    run(main)


def test_an_internal_error_after_decoding_on_a_thread_is_answered_in_its_turn() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        services.engine.failure = RuntimeError("broken")
        reader.on_message(request(id="large", parameters={"pad": {"string_param": "x" * 300_000}}).SerializeToString())
        reader.on_half_close()
        await settled()
        ((text, request_id, _),) = sent(call)
        assert (request_id, text.startswith("internal error")) == ("large", True)
        assert call.status is Status.OK

    run(main)


def test_idle_streams_end_and_busy_streams_take_no_more_requests_when_the_server_exits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        monkeypatch.setattr(ticker, "INTERVAL_S", 0)
        services = Services()
        idle, _ = services.open()
        busy, reader = services.open()
        reader.on_message(request().SerializeToString())
        services.health.draining = True
        await turns()
        assert not idle.ended
        services.health.disconnecting = True
        await turns()
        assert idle.status is Status.UNAVAILABLE
        assert not busy.ended
        reader.on_message(request(id="late").SerializeToString())
        assert len(services.engine.held) == 1
        services.engine.let_go()
        assert [each[:2] for each in sent(busy)] == [("", ""), (SHUTTING_DOWN, "late")]
        reader.on_half_close()

    run(main)


def test_the_parameter_for_empty_final_responses_is_accepted() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        named = {"triton_enable_empty_final_response": {"bool_param": True}}
        reader.on_message(request(parameters=named).SerializeToString())
        services.engine.let_go()
        assert sent(call) == [("", "", DATA)]

    run(main)


@pytest.mark.parametrize("ending", ["finished", "lost"])
def test_a_finished_stream_is_freed_without_garbage_collection(ending: str) -> None:
    async def main() -> None:
        services = Services()
        gc.collect()
        gc.disable()
        try:
            call, reader = services.open()
            reader.on_message(request().SerializeToString())
            if ending == "finished":
                services.engine.let_go()
                reader.on_half_close()
            else:
                call.lose()
                services.engine.held.clear()
                services.engine.cancelled.clear()
            call_ref = weakref.ref(call)
            del call, reader
            assert call_ref() is None
        finally:
            gc.enable()

    run(main)


def test_a_stream_that_is_lost_during_hooks_is_freed_without_garbage_collection() -> None:
    class Waiting(FakeHooks):
        async def infer(self, *arguments: object) -> dict[str, Array]:
            await asyncio.Event().wait()
            return {}

    async def main() -> None:
        services = Services(hooks=Waiting(dict))
        gc.collect()
        gc.disable()
        try:
            call, reader = services.open()
            reader.on_message(request().SerializeToString())
            await turns()
            call.lose()
            await settled()
            call_ref = weakref.ref(call)
            del call, reader
            assert call_ref() is None
        finally:
            gc.enable()

    run(main)


def test_requests_that_may_share_a_sequence_wait_for_an_earlier_large_message() -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        reader.on_message(request(id="large", parameters={"pad": {"string_param": "x" * 300_000}}).SerializeToString())
        for name in "abc":
            reader.on_message(request(id=name).SerializeToString())
        assert services.engine.held == []
        await settled()
        assert [each.id for each in services.engine.held] == ["large", "a", "b", "c"]
        services.engine.let_go()
        # the server now knows that the model has no sequences
        reader.on_message(request(id="large", parameters={"pad": {"string_param": "x" * 300_000}}).SerializeToString())
        reader.on_message(request(id="d").SerializeToString())
        await settled()
        assert [each.id for each in services.engine.held] == ["d", "large"]
        services.engine.let_go()
        assert [each[1] for each in sent(call)] == ["large", "a", "b", "c", "large", "d"]

    run(main)


@pytest.mark.parametrize("large", [0, 1, 2])
def test_requests_behind_an_invalid_large_message_are_answered(large: int) -> None:
    async def main() -> None:
        services = Services()
        call, reader = services.open()
        wrong = request(np.zeros((1, 80_000), np.float32), id="wrong", datatype="INT8")
        for _ in range(large):
            reader.on_message(wrong.SerializeToString())
        reader.on_message(request(id="good").SerializeToString())
        reader.on_half_close()
        await settled()
        services.engine.let_go()
        await turns()
        assert [each[1] for each in sent(call)] == ["wrong"] * large + ["good"]
        assert call.status is Status.OK

    run(main)
