"""Rescheduled requests of a Python model, in its worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.server.python_models.messages import EXECUTE
from tests.server.python_models.inside_stage import Open, Stage

ITERATIVE: dict[str, Any] = {"sequence_batching": {"iterative_sequence": True}}
DECOUPLED = {**ITERATIVE, "model_transaction_policy": {"decoupled": True}}


def execute(stage: Stage, number: int, value: int, **members: Any) -> Any:
    """Execute one request. Returns: the reply."""
    request = stage.request(number, ["IN"], correlation=1, **members)
    return stage.reply(stage.begin(EXECUTE, {"requests": [request]}, [np.array([value])]))[0]


def test_the_reply_lists_rescheduled_requests(opened: Open) -> None:
    assert execute(opened("rescheduling", ITERATIVE), 3, 1) == {"answers": [None], "rescheduled": [3]}


def test_rescheduling_by_a_model_that_is_not_iterative_fails_with_triton_s_text(opened: Open) -> None:
    answer, _ = opened("rescheduling").execute_one({"IN": np.array([3])})

    assert answer["error"]["code"] == "INVALID"
    assert "released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not" in answer["error"]["message"]


@pytest.mark.parametrize("parameters", [{}, {"keeps": True}])
def test_the_sender_of_any_execution_can_answer_a_rescheduled_request(opened: Open, parameters: dict[str, Any]) -> None:
    stage = opened("iterating", DECOUPLED)

    rescheduled = [execute(stage, 4, 3, parameters=parameters).get("rescheduled", []) for _ in range(3)]

    assert rescheduled == [[4], [4], []]
    answers = stage.answers_to(4)
    assert [int(arrays[0][0]) for _, arrays in answers] == [3, 2, 1]
    assert [each["final"] for each, _ in answers] == [False, False, True]


def test_returning_a_response_for_a_rescheduled_request_is_an_error(opened: Open) -> None:
    answer, _ = opened("rescheduling", ITERATIVE).execute_one({"IN": np.array([3])}, parameters={"answers": True})

    assert "Expected a None object in the execute function return list for reschduled" in answer["error"]["message"]


def test_a_rescheduled_request_cancelled_before_its_next_execution_sends_nothing(opened: Open) -> None:
    stage = opened("iterating", DECOUPLED)
    execute(stage, 4, 3)

    stage.cancel(4)
    execute(stage, 5, 3)

    assert [(whose, answer["final"]) for _, whose, answer, _ in stage.messages] == [(4, False), (5, False)]
