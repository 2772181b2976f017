"""`deepaas-cli` calls a model's methods in its own process, and prints the result as the original does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.server.cli import main
from penstock.server.deepaas import cli
from penstock.server.deepaas.installed import Installed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the model is written for marshmallow 3

MODEL = """
import io, os, pathlib
from deepaas.model.v2.wrapper import UploadedFile
from webargs import fields, validate

warmed = []

def warm():
    warmed.append(1)

def get_metadata():
    return {"name": "caf\\u00e9"}

def get_predict_args():
    return {
        "text": fields.Str(missing="t", description="100% plain", enum=["t", "u"]),
        "int": fields.Int(missing=1),
        "bool": fields.Bool(missing=True),
        "list": fields.List(fields.Int(), missing=[1]),
        "dict": fields.Dict(missing=dict),
        "a-hyphen": fields.Str(missing="h"),
        "absent": fields.Str(),
        "method": fields.Str(missing="of the model"),
        "file": fields.Field(missing=None, type="file", location="form"),
        "accept": fields.Str(missing="application/json", validate=validate.OneOf(["application/json", "image/png"])),
    }

def predict(**arguments):
    file = arguments.pop("file")
    if arguments["accept"].startswith("image/"):
        return io.BytesIO(b"\\x89PNG")
    if arguments["accept"] == "*/*":
        return "any"
    if arguments["text"] == "fails":
        raise ValueError("predict boom")
    if file is not None:
        assert isinstance(file, UploadedFile)
        content = pathlib.Path(file.filename).read_text()
        arguments["file"] = [file.name, file.content_type, file.original_filename, content]
        os.unlink(file.filename)
    return dict(arguments, warmed=len(warmed))

def get_train_args():
    return {"epochs": fields.Int(required=True), "rate": fields.Float(missing=0.5)}

def train(epochs, rate):
    return {"accuracy": epochs * rate, "warmed": len(warmed)}
"""
DEFAULTS = {
    "text": "t", "int": 1, "bool": True, "list": [1], "dict": {}, "a-hyphen": "h", "method": "of the model",
    "accept": "application/json", "warmed": 1,
}  # fmt: skip
_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \d+ ([A-Z]+) deepaas\.cmd\.cli \[-\] (.*)")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("called", "deepaas", "deepaas.model", "deepaas.model.v2", "deepaas.model.v2.wrapper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "called.py").write_text(MODEL)
    return tmp_path


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Any:
    """Return the lines that a command line prints."""

    def of(*words: str, status: int = 0) -> list[str]:
        assert main(["deepaas-cli", *words]) == status
        found = [_LINE.fullmatch(line) for line in capsys.readouterr().out.splitlines()]
        return [line[2] for line in found if line is not None]

    return of


def returned(lines: list[str]) -> Any:
    return lines[-1].removeprefix("return: ")


def test_metadata_is_printed_as_json_on_request_and_without_a_method(run_cli: Any) -> None:
    assert run_cli("m=called", "get_metadata") == ["get_metadata was called.", 'return: {"name": "caf\\u00e9"}']
    assert run_cli("m=called") == [
        "None was called.",
        "No Method was requested! Return get_metadata()",
        'return: {"name": "caf\\u00e9"}',
    ]


def test_warm_reports_when_it_has_finished(run_cli: Any) -> None:
    assert run_cli("m=called", "warm") == ["warm was called.", "return: Finished warm() method"]


def test_predict_is_called_with_defaults_after_warm(run_cli: Any) -> None:
    assert eval(returned(run_cli("m=called", "predict"))) == DEFAULTS


def test_arguments_are_parsed_by_their_fields_including_names_with_hyphens(run_cli: Any) -> None:
    words = ["--text", "x y", "--int=5", "--bool", "no", "--list", "[1, 2]", "--dict", "{'b': [1]}", "--a-hyphen", "hh"]

    assert eval(returned(run_cli("m=called", "predict", *words, "--absent", "a", "--method", "train"))) == {
        **DEFAULTS, "text": "x y", "int": 5, "bool": False, "list": [1, 2], "dict": {"b": [1]}, "a-hyphen": "hh",
        "absent": "a", "method": "train",
    }  # fmt: skip


def test_a_file_argument_is_an_upload_of_a_copy(run_cli: Any, folder: Path) -> None:
    (folder / "f.txt").write_text("of the file")
    found = eval(returned(run_cli("m=called", "predict", "--file", "f.txt")))

    assert found["file"] == ["data", "text/plain", "f.txt", "of the file"]
    assert (folder / "f.txt").exists()


def test_a_model_is_not_warmed_with_the_nowarm_flag(run_cli: Any) -> None:
    assert eval(returned(run_cli("m=called", "--nowarm", "predict")))["warmed"] == 0


def test_the_result_of_predict_is_stored_with_the_extension_of_its_type(run_cli: Any, folder: Path) -> None:
    assert (
        returned(run_cli("m=called", "--deepaas_method_output", "out/y.json", "predict"))
        == "Output is saved in out/y.json"
    )
    assert json.loads((folder / "out" / "y.json").read_text()) == DEFAULTS
    lines = run_cli("m=called", "--deepaas_method_output", "y.bin", "predict", "--accept", "image/png")
    assert lines[1] == "You are trying to store .png type data in the file with .bin extension!"
    assert (folder / "y.bin.png").read_bytes() == b"\x89PNG"


@pytest.mark.parametrize(("accept", "content"), [("image/*", b"\x89PNG"), ("*/*", b'"any"')])
def test_the_result_of_predict_is_stored_if_its_type_has_no_extension(
    run_cli: Any, folder: Path, accept: str, content: bytes
) -> None:
    lines = run_cli("m=called", "--deepaas_method_output", "y", "predict", "--accept", accept)

    assert (returned(lines), (folder / "y").read_bytes()) == ("Output is saved in y", content)


def test_train_prints_a_record(run_cli: Any) -> None:
    record = json.loads(returned(run_cli("m=called", "train", "--epochs", "2")))

    assert (list(record), list(record["result"])) == (
        ["date", "args", "status", "uuid", "result"],
        ["finish_date", "duration", "output"],
    )
    assert (record["args"], record["status"]) == ({"epochs": 2, "rate": 0.5}, "done")
    assert (record["result"]["output"], len(record["uuid"])) == ({"accuracy": 1.0, "warmed": 1}, 32)


USAGE = "deepaas-cli [NAME=package.module[:attr]] [--FLAG VALUE ...] METHOD [--ARGUMENT VALUE ...]"


@pytest.mark.parametrize(
    ("words", "last"),
    [
        (["predict", "--int", "x"], "deepaas-cli predict: error: argument --int: invalid int value: 'x'"),
        (
            ["predict", "--list", "[x]"],
            "argument --list: '[x]' is not a Python list or dict: malformed node or string on line 1",
        ),
        (["train"], "deepaas-cli train: error: the following arguments are required: --epochs"),
        (["predict", "--nonsense", "1"], "deepaas-cli: error: unrecognized arguments: --nonsense 1"),
        (["predict", "--deepaas_method_output", "y"], "error: unrecognized arguments: --deepaas_method_output y"),
        (
            ["--deepaas_method_output", "y", "m=called", "predict"],
            f"error: argument methods: 'm=called' names a model, and the model must come first: {USAGE}",
        ),
        (["explain"], "(choose from 'get_metadata', 'warm', 'predict', 'train')"),
    ],
    ids=["no number", "no list", "missing", "unknown", "after the method", "a model after flags", "no method"],
)
def test_a_wrong_command_line_ends_with_status_2(
    words: list[str], last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["deepaas-cli", "m=called", *words])

    assert exit_info.value.code == 2
    assert capsys.readouterr().err.strip().replace("get_metadata, warm", "'get_metadata', 'warm'").endswith(last)


def test_an_exception_of_a_model_exits_with_status_1_and_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepaas-cli", "m=called", "predict", "--text", "fails"]) == 1
    assert capsys.readouterr().err.endswith("ValueError: predict boom\n")


def test_a_result_of_train_that_is_not_json_is_shown_as_text(run_cli: Any, folder: Path) -> None:
    (folder / "giving.py").write_text("def train(): return {'saved in m'}\n")
    record = json.loads(returned(run_cli("m=giving", "train")))
    assert (record["status"], record["result"]["output"]) == ("done", "{'saved in m'}")


def test_train_arguments_that_cannot_be_read_do_not_prevent_predict(run_cli: Any, folder: Path) -> None:
    (folder / "halved.py").write_text("def get_train_args(): raise ValueError\ndef predict(): return 5\n")

    assert returned(run_cli("m=halved", "predict")) == "5"
    assert run_cli("m=halved", "get_metadata")[-1] == 'return: {"name": "m"}'


def test_one_of_several_installed_models_must_be_selected(
    run_cli: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = Installed([("m", "called"), ("n", "no_such_module")], "3.26.2")
    monkeypatch.setattr(cli, "installed_in", lambda: there)

    run_cli(status=1)
    assert returned(run_cli("--model-name", "m", "get_metadata")) == '{"name": "caf\\u00e9"}'
    monkeypatch.setenv("DEEPAAS_V2_MODEL", "m")
    assert returned(run_cli("get_metadata")) == '{"name": "caf\\u00e9"}'
    assert main(["deepaas-cli", "--model-name", "x", "get_metadata"]) == 1
    assert capsys.readouterr().err.endswith("Available models: ['m', 'n']\n")
