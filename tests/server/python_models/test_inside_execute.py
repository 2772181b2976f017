"""A model.py in its worker: what it sees of a request, which answers are sent, and how its errors are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.errors import Code, InferError
from penstock.server.python_models.messages import LOG
from tests.server.python_models.inside_stage import MODELS, Open, Stage, floats, settings_of

PACKAGED = """
from importlib.resources import files

import numpy as np
import triton_python_backend_utils as pb_utils

from . import ANSWER

WHOLE = ANSWER + int(files(__package__).joinpath("more.txt").read_text())


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([WHOLE]))]) for _ in requests]
"""


def out(name: str) -> dict[str, Any]:
    return {"name": name, "data_type": "TYPE_FP32", "dims": [4]}


def test_a_batch_is_answered_in_order(opened: Open) -> None:
    stage = opened("add_sub", {"output": [out("OUTPUT0"), out("OUTPUT1")]})
    requests = [stage.request(number, ["INPUT0", "INPUT1"]) for number in (7, 8)]

    answers, arrays = stage.execute(requests, [floats(1, 2), floats(3, 4), floats(5), floats(6)])

    assert [answer["outputs"] for answer in answers] == [["OUTPUT0", "OUTPUT1"]] * 2
    assert [answer["final"] for answer in answers] == [True, True]
    assert [array.tolist() for array in arrays] == [[4, 6], [-2, -2], [11], [-1]]


def test_only_requested_outputs_are_sent(opened: Open) -> None:
    stage = opened("add_sub", {"output": [out("OUTPUT0"), out("OUTPUT1")]})

    reply, arrays = stage.execute_one({"INPUT0": floats(1), "INPUT1": floats(3)}, outputs=["OUTPUT1"])

    assert reply["outputs"] == ["OUTPUT1"]
    assert arrays[0].tolist() == [-2]


@pytest.mark.parametrize(
    "array",
    [
        np.array([[True, False]]),
        np.arange(6, dtype=np.int8).reshape(2, 3),
        np.array(7, np.uint64),
        np.zeros((0, 3), np.float16),
        np.arange(10000, dtype=np.float64),
        np.array([b"one", b"", b"\x00\xff"], np.object_),
        np.zeros((2, 0), np.object_),
    ],
    ids=["bool", "int8", "no dimension", "no element", "in the arena", "strings", "no string"],
)
def test_tensors_are_returned_unchanged(opened: Open, array: Any) -> None:
    _, arrays = opened("identity").execute_one({"IN": array})

    assert arrays[0].dtype == array.dtype
    assert arrays[0].shape == array.shape
    assert arrays[0].tolist() == array.tolist()


def test_the_model_can_read_all_properties_of_a_request(opened: Open) -> None:
    stage = opened("telling", {"output": [out("SEEN"), out("OTHER")]})

    reply, arrays = stage.execute_one(
        {"IN": floats(1, 2), "TEXT": np.array([[b"a"]], np.object_)}, id="of mine", correlation="seq-1", flags=3,
        timeout_us=5000, parameters={"a": 1, "b": True, "c": "x"},
    )  # fmt: skip
    properties = json.loads(arrays[0][0])

    assert reply["parameters"] == {"seen": True, "count": 1}
    assert properties == {
        "id": "of mine", "correlation": "seq-1", "flags": 3, "start": True, "end": True, "timeout": 5000,
        "parameters": {"a": 1, "b": True, "c": "x"}, "outputs": ["OTHER", "SEEN"], "cancelled": False, "trace": None,
        "inputs": [["IN", 11, [2], True], ["TEXT", 13, [1, 1], True]], "dir": str(MODELS / "telling" / "1"),
        "args": {
            "model_instance_kind": "CPU", "model_instance_name": "telling_0_0", "model_instance_device_id": "0",
            "model_repository": str(MODELS / "telling"), "model_version": "1", "model_name": "telling",
        },
    }  # fmt: skip


def test_a_request_cancelled_before_it_runs_reports_is_cancelled(opened: Open) -> None:
    stage = opened("telling")
    stage.cancel(1)

    _, arrays = stage.execute_one()

    assert json.loads(arrays[0][0])["cancelled"] is True


@pytest.mark.parametrize(
    ("do", "text"),
    [
        ("raise", "ValueError: a wrong value\n\nAt:\n  {file}(19): execute\n"),
        ("raise ours", "TritonModelException: told so\n\nAt:\n  {file}(21): execute\n"),
        ("exit", "SystemExit: 3\n\nAt:\n  {file}(23): execute\n"),
        ("name", "TritonModelException: Tensor name cannot be an empty string.\n\nAt:\n  {file}(25): execute\n"),
        ("dtype", "TritonModelException: NumPy dtype is not supported.\n\nAt:\n  {file}(27): execute\n"),
        ("text", "TritonModelException: NumPy dtype is not supported.\n\nAt:\n  {file}(29): execute\n"),
        ("surrogate", "ValueError: lone ? one\n\nAt:\n  {file}(37): execute\n"),
        ("tuple", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (
            "strings",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
        ),
        (
            "count",
            (
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:3\n"
            ),
        ),
    ],
)
def test_an_error_in_execute_answers_the_whole_batch_with_tritons_text(opened: Open, do: str, text: str) -> None:
    stage = opened("wrong")

    answers, _ = stage.execute([stage.request(number, parameters={"do": do}) for number in (1, 2)])

    file = MODELS / "wrong" / "1" / "model.py"
    message = "Failed to process the request(s) for model 'wrong_0_0', message: " + text.format(file=file)
    assert [reply["error"] for reply in answers] == [{"code": "INTERNAL", "message": message}] * 2
    assert stage.execute([stage.request(3)])[0][0]["error"] is None
    assert "Failed to process" in stage.bodies_of(LOG)[0]["message"]


def test_an_error_response_has_its_own_code_and_affects_one_request(opened: Open) -> None:
    stage = opened("wrong")
    codes = {
        "UNKNOWN": Code.UNKNOWN, "INTERNAL": Code.INTERNAL, "NOT_FOUND": Code.NOT_FOUND, "INVALID_ARG": Code.INVALID,
        "UNAVAILABLE": Code.NOT_READY, "UNSUPPORTED": Code.UNSUPPORTED, "ALREADY_EXISTS": Code.ALREADY_EXISTS,
        "CANCELLED": Code.CANCELLED, "": None,
    }  # fmt: skip

    answers, _ = stage.execute([stage.request(number, parameters={"do": name}) for number, name in enumerate(codes)])

    assert [reply["error"] and reply["error"]["code"] for reply in answers] == [
        code and code.name for code in codes.values()
    ]
    assert answers[2]["error"]["message"] == "no NOT_FOUND"


def test_an_exception_in_initialize_fails_opening(opened: Open) -> None:
    with pytest.raises(InferError) as refused:
        Stage("wrong", args={**settings_of("wrong")["args"], "model_name": "initialize"})

    file = MODELS / "wrong" / "1" / "model.py"
    assert refused.value.code is Code.INTERNAL
    assert refused.value.message == f"TritonModelException: no such weights\n\nAt:\n  {file}(13): initialize\n"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'\n\nAt:\n"),
        ("def (:\n", "SyntaxError: invalid syntax"),
        ("x = 1\n", "AttributeError: module '1.model' has no attribute 'TritonPythonModel'"),
    ],
)
def test_an_import_error_fails_opening(tmp_path: Path, source: str, text: str) -> None:
    file = tmp_path / "1" / "model.py"
    file.parent.mkdir()
    file.write_text(source)

    with pytest.raises(InferError) as refused:
        Stage("broken", file=file)

    assert refused.value.message.startswith(text)


def test_a_model_without_execute_is_not_loaded(opened: Open, tmp_path: Path) -> None:
    file = tmp_path / "1" / "model.py"
    file.parent.mkdir()
    file.write_text("class TritonPythonModel:\n    pass\n")

    with pytest.raises(InferError, match=f"Python model {file} does not implement `execute` method."):
        opened("idle", file=file)


def test_an_exception_in_finalize_is_logged(opened: Open) -> None:
    stage = opened("wrong")

    stage.finalize()

    assert stage.bodies_of(LOG)[-1]["message"].endswith("ValueError: cannot end\n")
    assert stage.bodies_of(LOG)[-1]["file"] == str(MODELS / "wrong" / "1" / "model.py")
    assert stage.bodies_of(LOG)[-1]["line"] == 46


def test_files_beside_the_model_can_be_imported(opened: Open) -> None:
    _, arrays = opened("several_files").execute_one()

    assert arrays[0].tolist() == [42]


def test_the_version_folder_is_imported_as_a_package_with_its_init(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "__init__.py").write_text("ANSWER = 40\n")
    (tmp_path / "1" / "more.txt").write_text("2")
    (tmp_path / "1" / "model.py").write_text(PACKAGED)

    _, arrays = opened("packaged", file=tmp_path / "1" / "model.py").execute_one()

    assert arrays[0].tolist() == [42]


def test_a_version_folder_without_init_is_a_package_with_resources(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "more.txt").write_text("2")
    (tmp_path / "1" / "model.py").write_text(PACKAGED.replace("from . import ANSWER", "ANSWER = 40"))

    _, arrays = opened("packaged", file=tmp_path / "1" / "model.py").execute_one()

    assert arrays[0].tolist() == [42]


def test_auto_complete_config_completes_the_configuration(opened: Open) -> None:
    known = {"name": "completing", "max_batch_size": 0, "input": [], "output": []}

    stage = opened("completing", complete=known)

    assert stage.opened == {
        "config": {
            "name": "completing", "max_batch_size": 4,
            "input": [{"name": "IN", "data_type": "TYPE_FP32", "dims": [4], "optional": True}],
            "output": [{"name": "OUT", "data_type": "TYPE_FP32", "dims": [4]}],
            "dynamic_batching": {}, "model_transaction_policy": {"decoupled": False},
        }
    }  # fmt: skip


def test_a_completion_that_contradicts_the_configuration_is_rejected() -> None:
    known = {"name": "completing", "input": [{"name": "IN", "data_type": "TYPE_INT32", "dims": [4]}]}

    with pytest.raises(InferError, match="configuration expects datatype TYPE_INT32 for input 'IN', model provides"):
        Stage("completing", complete=known)


def test_a_bf16_input_cannot_be_read_as_numpy(opened: Open) -> None:
    stage = opened("identity", {"input": [{"name": "IN", "data_type": "TYPE_BF16", "dims": [2]}]})

    reply, _ = stage.execute_one({"IN": np.array([0x3F80, 0], np.uint16)})

    assert "Tensor dtype is BF16 and cannot be converted to NumPy." in reply["error"]["message"]
