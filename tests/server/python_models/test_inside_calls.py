"""Models that call other models, load them, count in metrics, and write to the log."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from penstock.server.python_models.messages import CANCEL_CALL, EXECUTE, LOG, METRIC
from tests.server.python_models.inside_stage import Open, answer, floats


def streaming(head: dict[str, Any], arrays: list[Any]) -> Any:
    """Answer a decoupled call with each element and then the final mark alone; answer any other call at once."""
    if not head["decoupled"]:
        return [(answer(["OUT"]), arrays)]
    each = [(answer(["OUT"], final=False), [array[None]]) for array in arrays[0]]
    return [*each, (answer(), [])]


def test_a_model_calls_another_model_synchronously(opened: Open) -> None:
    stage = opened("caller")
    stage.on_call = streaming

    _, arrays = stage.execute_one(
        {"IN": floats(1, 2)}, id="a", correlation="s", flags=1, parameters={"do": "exec", "model": "m"}
    )

    assert arrays[0].tolist() == [1, 2]
    ((call, _),) = stage.calls
    assert call == {
        "model": "m", "version": "", "decoupled": False, "trace": 1,
        "request": {
            "id": "a", "number": 0, "inputs": ["IN"], "outputs": ["OUT"], "correlation": "s", "flags": 1,
            "timeout_us": 5_000_000, "priority": 0, "parameters": {"from": "caller"},
        },
    }  # fmt: skip


def test_threads_of_a_model_call_another_model_in_parallel(opened: Open) -> None:
    stage = opened("caller")

    _, arrays = stage.execute_one({"IN": floats(1)}, parameters={"do": "threads", "model": "m"})

    assert arrays[0].tolist() == [1, 1, 1]
    assert len(stage.calls) == 3


def test_answers_of_a_decoupled_call_can_be_iterated_twice(opened: Open) -> None:
    stage = opened("caller")
    stage.on_call = streaming

    _, arrays = stage.execute_one({"IN": floats(1, 2, 3)}, parameters={"do": "streamed", "model": "m"})

    assert arrays[0].tolist() == [1, 2, 3]


def test_dropping_the_response_iterator_cancels_the_call(opened: Open) -> None:
    stage = opened("caller")
    stage.on_call = lambda head, arrays: [(answer(["OUT"], final=False), arrays)]

    _, arrays = stage.execute_one({"IN": floats(7)}, parameters={"do": "first_only", "model": "m"})
    gc.collect()
    stage.until(lambda: bool(stage.bodies_of(CANCEL_CALL)))

    assert arrays[0].tolist() == [7]


def test_several_calls_can_be_awaited_together(opened: Open) -> None:
    stage = opened("caller")
    stage.on_call = streaming

    _, arrays = stage.execute_one({"IN": floats(1, 2)}, parameters={"do": "gathered", "model": "m"})

    assert arrays[0].tolist() == [1, 2, 1, 2]


def test_cancelling_an_awaited_call_cancels_it_at_the_server(opened: Open) -> None:
    stage = opened("caller")
    stage.on_call = lambda head, arrays: []

    number = stage.begin(EXECUTE, {"requests": [stage.request(parameters={"do": "given_up", "model": "m"})]})
    stage.until(lambda: bool(stage.bodies_of(CANCEL_CALL)))

    assert stage.reply(number)[0]["answers"][0]["error"]["message"] == "given up"


def test_an_execute_coroutine_can_await_calls(opened: Open) -> None:
    stage = opened("async_caller")

    answers, arrays = stage.execute([stage.request(1, ["IN"]), stage.request(2, ["IN"])], [floats(1), floats(5)])

    assert [array.tolist() for array in arrays] == [[3], [15]]
    assert [reply["error"] for reply in answers] == [None, None]


@pytest.mark.parametrize("do", ["exec", "streamed", "gathered"])
def test_the_caller_receives_the_error_and_code_of_a_called_model(opened: Open, do: str) -> None:
    stage = opened("caller")
    stage.on_call = lambda head, arrays: [(answer(error={"code": "NOT_FOUND", "message": "no model 'm'"}), [])]

    head, _ = stage.execute_one({"IN": floats(1)}, parameters={"do": do, "model": "m"})

    assert head["error"] == {"code": "NOT_FOUND", "message": "called: no model 'm'"}


def test_a_call_in_initialize_is_rejected(opened: Open) -> None:
    reply, _ = opened("caller").execute_one(parameters={"do": "early", "model": "m"})

    assert reply["error"]["message"] == "BLS is only supported during the 'execute' function."


def test_a_model_can_load_unload_and_query_other_models(opened: Open) -> None:
    calls: list[tuple[dict[str, Any], list[Any]]] = []

    def control(head: dict[str, Any], arrays: list[Any]) -> dict[str, Any]:
        calls.append((head, [array.tobytes() for array in arrays]))
        return {"error": None, "result": head["do"] == "ready" and head["model"] == "m"}

    stage = opened("loader", on_control=control)

    _, loaded = stage.execute_one(parameters={"do": "load", "model": "m", "config": "{}"})
    stage.execute_one(parameters={"do": "unload", "model": "n"})

    load_call = {"version": "", "config": "", "files": [], "dependents": False}
    assert loaded[0].tolist() == [False, True]
    assert calls == [
        (load_call | {"do": "ready", "model": "other", "version": "1"}, []),
        (load_call | {"do": "load", "model": "m", "config": "{}", "files": ["file:1/weights"]}, [b"123"]),
        (load_call | {"do": "ready", "model": "m"}, []),
        (load_call | {"do": "unload", "model": "n", "dependents": True}, []),
        (load_call | {"do": "ready", "model": "n"}, []),
    ]


def test_a_failed_load_raises_the_servers_message(opened: Open) -> None:
    stage = opened("loader")
    stage.on_control = lambda head, arrays: {
        "error": {"code": "NOT_FOUND", "message": "no such model"},
        "result": False,
    }

    head, _ = stage.execute_one(parameters={"do": "load", "model": "m"})

    assert "TritonModelException: no such model\n\nAt:\n" in head["error"]["message"]


def test_metric_changes_are_sent_and_their_values_can_be_read(opened: Open) -> None:
    stage = opened("counting")

    _, arrays = stage.execute_one({"IN": floats(1, 2, 3)})
    _, again = stage.execute_one({"IN": floats(1)})

    assert arrays[0].tolist() == [1, 2]
    assert again[0].tolist() == [2, 0]
    changes = [(change["family"], change["do"], change["value"]) for change in stage.bodies_of(METRIC)]
    assert changes[:7] == [
        ("requests_seen", "make", 0), ("request_size", "make", 0), ("latest_size", "make", 0),
        ("requests_seen", "increment", 1), ("request_size", "observe", 3), ("latest_size", "set", 3),
        ("latest_size", "increment", -1),
    ]  # fmt: skip
    assert stage.bodies_of(METRIC)[0]["labels"] == {"model": "counting"}
    assert stage.bodies_of(METRIC)[1]["buckets"] == [1, 10]


def test_log_lines_have_their_level_file_and_line_number(opened: Open) -> None:
    stage = opened("counting")

    stage.execute_one({"IN": floats(1)})

    lines = stage.bodies_of(LOG)
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "seen one"), ("warning", "with a warning"), ("verbose", "and much more"), ("error", "and an error"),
    ]  # fmt: skip
    assert lines[0]["file"].endswith("counting/1/model.py")
    assert [line["line"] - lines[0]["line"] for line in lines] == [0, 1, 2, 3]


def test_string_tensors_are_forwarded_to_a_called_model(opened: Open) -> None:
    stage = opened("caller")

    _, arrays = stage.execute_one({"IN": np.array([b"a", b"b"], np.object_)}, parameters={"do": "exec", "model": "m"})

    assert arrays[0].tolist() == [b"a", b"b"]
