"""The model.py files of tests/server/python_models/models, unchanged, as tritonclient meets them over HTTP and gRPC."""

from __future__ import annotations

import json
import queue
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.live import Live, live_server
from tests.server.python_models.inside_stage import MODELS
from tests.server.python_models.repositories import left_behind

pytestmark = pytest.mark.slow

SERVED = (
    "add_sub", "identity", "strings", "telling", "wrong", "repeat", "square", "sender", "caller", "async_caller",
    "counting", "several_files", "completing", "dlpack", "recursive", "cancelling",
)  # fmt: skip
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    root = tmp_path_factory.mktemp("models")
    for name in SERVED:
        shutil.copytree(MODELS / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "identity" / "penstock.toml").write_text("[batching]\nallow_timeout_override = true\n")  # below 10 ms, too
    before = left_behind()
    with live_server(root) as server:
        yield server
    assert left_behind() == before


def inputs_of(client: Any, tensors: dict[str, Any]) -> list[Any]:
    inputs = []
    for name, array in tensors.items():
        tensor = client.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@pytest.fixture(params=["http", "grpc"])
def ask(request: pytest.FixtureRequest, live: Live) -> Iterator[Ask]:
    """Infer once: `ask(model, {"IN": array}, **terms)`."""
    module = triton_http if request.param == "http" else triton_grpc
    address = live.address if request.param == "http" else live.grpc_address
    with module.InferenceServerClient(address) as client:
        yield lambda model, tensors, **terms: client.infer(model, inputs_of(module, tensors), **terms)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def streamed(live: Live, model: str, tensors: dict[str, Any]) -> list[Any]:
    """Return all answers of a decoupled model, each an output's values or an error's text."""
    came: queue.Queue[Any] = queue.Queue()
    answers: list[Any] = []
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer(model, inputs_of(triton_grpc, tensors), enable_empty_final_response=True)
        while True:
            answer = came.get(timeout=30)
            if isinstance(answer, InferenceServerException):
                return [*answers, answer.message()]
            if answer.get_response().outputs:
                answers.append(answer.as_numpy("OUT").tolist())
            if answer.get_response().parameters["triton_final_response"].bool_param:
                return answers


def test_add_sub_returns_sums_and_differences(ask: Ask) -> None:
    result = ask("add_sub", {"INPUT0": floats(1, 2, 3, 4)[None], "INPUT1": floats(4, 3, 2, 1)[None]})

    assert result.as_numpy("OUTPUT0").tolist() == [[5, 5, 5, 5]]
    assert result.as_numpy("OUTPUT1").tolist() == [[-3, -1, 1, 3]]


@pytest.mark.parametrize("size", [0, 1, 3000, 200_000], ids=["none", "one", "inline", "in the arena"])
def test_an_array_of_any_size_is_returned_unchanged(ask: Ask, size: int) -> None:
    array = np.arange(size, dtype=np.float32)

    assert np.array_equal(ask("identity", {"IN": array}).as_numpy("OUT"), array)


def test_strings_are_returned_unchanged(ask: Ask) -> None:
    strings = np.array([[b"", "zwölf".encode(), b"\xff\x00", b"x" * 20_000]], np.object_)

    assert ask("strings", {"IN": strings}).as_numpy("OUT").tolist() == strings.tolist()


def test_a_request_exposes_its_id_parameters_and_inputs(ask: Ask) -> None:
    result = ask(
        "telling", {"IN": floats(1)}, request_id="mine", parameters={"a": 1, "b": "x", "c": True}, timeout=3_000_000
    )
    properties = json.loads(result.as_numpy("SEEN")[0])

    assert (properties["id"], properties["parameters"], properties["inputs"]) == (
        "mine", {"a": 1, "b": "x", "c": True}, [["IN", 11, [1], True]],
    )  # fmt: skip
    assert properties["args"]["model_instance_name"] == "telling_0_0"


@pytest.mark.parametrize("correlation", [5, "five"])
def test_a_request_exposes_its_sequence_id_and_flags(ask: Ask, correlation: int | str) -> None:
    result = ask("telling", {}, sequence_id=correlation, sequence_start=True, sequence_end=True)
    properties = json.loads(result.as_numpy("SEEN")[0])

    assert (properties["correlation"], properties["flags"]) == (correlation, 3)


@pytest.mark.parametrize(
    ("do", "text"),
    [
        (
            "raise",
            "Failed to process the request(s) for model 'wrong_0_0', message: ValueError: a wrong value\n\nAt:\n  ",
        ),
        ("exit", "Failed to process the request(s) for model 'wrong_0_0', message: SystemExit: 3\n\nAt:\n  "),
        ("tuple", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        ("count", "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2"),
        ("NOT_FOUND", "no NOT_FOUND"),
    ],
)
def test_an_error_of_the_model_is_reported_in_tritons_words(ask: Ask, do: str, text: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        ask("wrong", {}, parameters={"do": do})

    assert text in refused.value.message()
    assert ask("wrong", {}).as_numpy("OUT").tolist() == [0]


@pytest.mark.parametrize(
    ("code", "http", "grpc"),
    [
        ("INTERNAL", "500", "INTERNAL"), ("NOT_FOUND", "404", "NOT_FOUND"), ("INVALID_ARG", "400", "INVALID_ARGUMENT"),
        ("UNAVAILABLE", "503", "UNAVAILABLE"), ("UNSUPPORTED", "501", "UNIMPLEMENTED"),
        ("ALREADY_EXISTS", "400", "ALREADY_EXISTS"), ("CANCELLED", "400", "CANCELLED"),
    ],
)  # fmt: skip
def test_a_model_error_code_becomes_the_status(ask: Ask, code: str, http: str, grpc: str) -> None:
    with pytest.raises(InferenceServerException) as refused:
        ask("wrong", {}, parameters={"do": code})

    assert refused.value.status() in {http, f"StatusCode.{grpc}"}


@pytest.mark.parametrize("do", ["send", "send in two", "return it"])
def test_a_model_may_answer_through_its_response_sender(ask: Ask, do: str) -> None:
    assert ask("sender", {}, parameters={"do": do}).as_numpy("OUT").tolist() == [do.encode()]


def test_only_the_first_answer_of_a_model_that_is_not_decoupled_is_returned(ask: Ask) -> None:
    assert ask("sender", {}, parameters={"do": "send twice"}).as_numpy("OUT").tolist() == [b"send twice"]


def test_a_request_that_the_model_drops_is_answered_with_an_error(ask: Ask) -> None:
    with pytest.raises(InferenceServerException, match="dropped the request"):
        ask("sender", {}, parameters={"do": "forget"})


def test_a_decoupled_model_streams_until_its_final_flag(live: Live) -> None:
    assert streamed(live, "repeat", {"IN": ints(4, 2, 0)}) == [[4], [2], [0]]
    assert streamed(live, "repeat", {"IN": ints()}) == []
    assert streamed(live, "square", {"IN": ints(3)}) == [[3], [3], [3]]
    assert streamed(live, "square", {"IN": ints(0)}) == []


def test_an_error_of_a_decoupled_model_is_returned(live: Live) -> None:
    (text,) = streamed(live, "square", {"IN": ints(1001)})
    (forgotten,) = streamed(live, "square", {"IN": ints(-1)})

    assert "ValueError: too many" in text
    assert "dropped the request" in forgotten


@pytest.mark.parametrize("do", ["exec", "threads"])
def test_a_model_can_call_another_model(ask: Ask, do: str) -> None:
    result = ask("caller", {"IN": floats(1, 2)}, parameters={"do": do, "model": "identity"})

    assert result.as_numpy("OUT").tolist() == [1, 2] * (3 if do == "threads" else 1)


@pytest.mark.parametrize("do", ["streamed", "gathered"])
def test_a_model_can_iterate_over_the_answers_of_another_model(ask: Ask, do: str) -> None:
    result = ask("caller", {"IN": floats(1, 2)}, parameters={"do": do, "model": "identity"})

    assert result.as_numpy("OUT").tolist() == [1, 2] * (2 if do == "gathered" else 1)


def test_a_coroutine_can_call_three_models_in_parallel(ask: Ask) -> None:
    assert ask("async_caller", {"IN": floats(2, 5)}).as_numpy("OUT").tolist() == [6, 15]


def test_a_model_receives_the_error_of_a_model_that_it_calls(ask: Ask) -> None:
    with pytest.raises(InferenceServerException, match=r"called: .*nobody"):
        ask("caller", {"IN": floats(1)}, parameters={"do": "exec", "model": "nobody"})


def test_a_call_that_exceeds_its_timeout_is_an_error(ask: Ask) -> None:
    with pytest.raises(InferenceServerException, match="called: Request timeout expired"):
        ask("caller", {"IN": floats(1)}, parameters={"do": "exec", "model": "identity", "within_us": 1})


def test_a_model_can_call_its_own_other_instances(ask: Ask) -> None:
    assert ask("recursive", {"IN": ints(2)}).as_numpy("OUT").tolist() == [2]


def test_a_model_can_detect_that_its_client_has_canceled(live: Live) -> None:
    came: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(live.grpc_address) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer("cancelling", inputs_of(triton_grpc, {"IN": ints(0)}))
        came.get(timeout=30)
        client.stop_stream(cancel_requests=True)

    assert streamed(live, "cancelling", {"IN": ints(1)}) == [[1]]


def test_custom_metrics_of_a_model_are_on_the_metrics_page(ask: Ask, live: Live) -> None:
    before = int(ask("counting", {"IN": floats(1, 2)}).as_numpy("COUNTED")[0])

    after = ask("counting", {"IN": floats(1, 2)}).as_numpy("COUNTED").tolist()
    with urllib.request.urlopen(f"http://127.0.0.1:{live.metrics_port}/metrics") as page:
        text = page.read().decode()

    assert after == [before + 1, 1]
    assert f'requests_seen{{model="counting"}} {before + 1}' in text
    assert f"request_size_count {before + 1}" in text
    assert "latest_size 1" in text


def test_a_model_can_import_its_other_files(ask: Ask) -> None:
    assert ask("several_files", {}).as_numpy("OUT").tolist() == [42]


def test_bf16_is_passed_through_dlpack(ask: Ask) -> None:
    array = np.array([1.5, -2], ml_dtypes.bfloat16)

    result = ask("dlpack", {"IN": array})

    assert result.as_numpy("OUT").tolist() == result.as_numpy("AGAIN").tolist() == [1.5, -2]


def test_a_model_can_complete_its_own_configuration(ask: Ask) -> None:
    result = ask("completing", {"IN": floats(1, 2, 3, 4)[None]})

    assert result.as_numpy("OUT").tolist() == [[1, 2, 3, 4]]


def test_a_model_can_load_and_unload_other_models(tmp_path: Path) -> None:
    for name in ("loader", "identity"):
        shutil.copytree(MODELS / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (
        live_server(tmp_path, model_control_mode="explicit", load_model=("loader",)) as server,
        triton_http.InferenceServerClient(server.address) as client,
    ):

        def ready(do: str) -> list[bool]:
            parameters = {"do": do, "model": "identity"}
            return client.infer("loader", [], parameters=parameters).as_numpy("READY").tolist()[1]  # type: ignore[no-any-return]

        found = [ready("ask"), ready("load"), client.is_model_ready("identity"), ready("unload")]

    assert found == [False, True, True, False]
