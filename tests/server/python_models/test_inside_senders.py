"""Answers sent through a ResponseSender, by decoupled models and others."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from penstock.server.python_models.messages import CANCEL, LOG, PAUSE, RESUME
from tests.server.python_models.inside_stage import Open

DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def test_a_decoupled_model_sends_answers_from_its_thread_until_the_final_flag(opened: Open) -> None:
    stage = opened("repeat", DECOUPLED)

    answers, _ = stage.execute([stage.request(5, ["IN"]), stage.request(6, ["IN"])], [ints(4, 2), ints()])

    assert answers == [None, None]
    messages = stage.answers_to(5)
    assert [[array.tolist() for array in arrays] for _, arrays in messages] == [[[4], [0]], [[2], [1]], []]
    assert [answer["final"] for answer, _ in messages] == [False, False, True]
    assert [answer["outputs"] for answer, _ in stage.answers_to(6)] == [None]


@pytest.mark.parametrize("kind", [RESUME, CANCEL])
def test_a_paused_request_holds_its_answers_without_pausing_other_requests(opened: Open, kind: int) -> None:
    stage = opened("repeat", DECOUPLED)
    stage.server_channel.send(PAUSE, 5)

    stage.execute([stage.request(5, ["IN"]), stage.request(6, ["IN"])], [ints(4, 2), ints(3, 1)])

    assert len(stage.answers_to(6)) == 3
    assert [number for _, number, _, _ in stage.messages if number == 5] == []
    stage.server_channel.send(kind, 5)
    assert len(stage.answers_to(5)) == 3


def test_an_async_decoupled_model_answers_after_execute_returns(opened: Open) -> None:
    stage = opened("square", DECOUPLED)

    assert stage.execute_one({"IN": ints(2)})[0] is None

    assert [(answer["final"], arrays[0].tolist()) for answer, arrays in stage.answers_to(1)] == [
        (False, [2]),
        (True, [2]),
    ]


def test_an_exception_in_an_async_decoupled_model_is_the_last_answer(opened: Open) -> None:
    stage = opened("square", DECOUPLED)

    stage.execute_one({"IN": ints(1001)})

    ((answer, _),) = stage.answers_to(1)
    assert "message: ValueError: too many" in answer["error"]["message"]
    stage.until(lambda: bool(stage.bodies_of(LOG)))


@pytest.mark.parametrize(
    ("do", "message"),
    [("exit", "SystemExit: bye"), ("cancel", "CancelledError: "), ("stop", ""), ("exit in a task", "")],
)
def test_a_coroutine_that_stops_the_event_loop_fails_only_its_own_request(opened: Open, do: str, message: str) -> None:
    stage = opened("async_ending")

    ended, _ = stage.execute_one(parameters={"do": do})

    assert (f"message: {message}" in ended["error"]["message"]) if message else (ended["error"] is None)
    assert stage.execute_one(parameters={"do": "nothing"})[0]["error"] is None


@pytest.mark.parametrize(("do", "message"), [("exit", "SystemExit: bye"), ("cancel", "CancelledError: ")])
def test_a_decoupled_coroutine_that_stops_the_event_loop_gets_a_last_answer(
    opened: Open, do: str, message: str
) -> None:
    stage = opened("async_ending", DECOUPLED)

    stage.execute_one(parameters={"do": do})

    ((ended, _),) = stage.answers_to(1)
    assert f"message: {message}" in ended["error"]["message"]


def test_a_request_dropped_by_a_decoupled_model_is_answered_with_an_error(opened: Open) -> None:
    stage = opened("square", DECOUPLED)

    stage.execute_one({"IN": ints(-1)})
    gc.collect()

    ((answer, _),) = stage.answers_to(1)
    assert answer["error"]["message"] == "The model dropped the request without sending a final response."


def test_a_decoupled_model_must_return_none(opened: Open) -> None:
    answer, _ = opened("identity", DECOUPLED).execute_one({"IN": ints(1)})

    assert answer["error"]["message"].endswith(
        "Python model 'identity_0_0' is using the decoupled mode and the execute function must return None."
    )


@pytest.mark.parametrize("do", ["send", "send in two"])
def test_a_model_can_answer_through_the_response_sender(opened: Open, do: str) -> None:
    stage = opened("sender")

    answer, _ = stage.execute_one(parameters={"do": do})

    assert answer is None
    answers = stage.answers_to(1)
    assert answers[0][1][0].tolist() == [do.encode()]
    assert answers[-1][0]["final"]


def test_a_model_can_return_its_answer_after_getting_the_response_sender(opened: Open) -> None:
    answer, arrays = opened("sender").execute_one(parameters={"do": "return it"})

    assert answer["final"]
    assert arrays[0].tolist() == [b"return it"]


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("final first", "Non-decoupled model cannot send complete final before sending a response."),
        ("nothing", "Inference Response object must be provided when the response flags is set to zero."),
        ("flag", "Unable to send response. Unsupported flag provided."),
    ],
)
def test_an_invalid_send_raises_in_the_model(opened: Open, do: str, text: str) -> None:
    answer, _ = opened("sender").execute_one(parameters={"do": do})

    assert answer["error"]["message"].endswith(text)


def test_a_request_cannot_be_answered_twice(opened: Open) -> None:
    stage = opened("sender")

    answer, _ = stage.execute_one(parameters={"do": "send and return"})

    assert answer is None
    assert [message["final"] for message, _ in stage.answers_to(1)] == [True]
    assert "cannot send more than one response" in stage.bodies_of(LOG)[0]["message"]


def test_a_request_without_a_final_response_is_answered_with_an_error(opened: Open) -> None:
    stage = opened("sender")

    stage.execute_one(parameters={"do": "forget"})
    gc.collect()

    assert stage.answers_to(1)[0][0]["error"]["code"] == "INTERNAL"
