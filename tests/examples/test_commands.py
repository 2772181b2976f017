"""The three commands that `make serve` prints answer as examples/iris/README.md says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.perf.server_process import Process, penstock

IRIS = Path(__file__).parents[2] / "examples" / "iris"
ADDRESS = "127.0.0.1:8000"
BLOCK = re.search(r"```sh\n(.*?)```", (IRIS / "README.md").read_text("utf-8"), re.DOTALL)
TEXT = BLOCK[1].replace("\\\n", "") if BLOCK else ""
COMMANDS = [shlex.split(command, comments=True) for command in TEXT.split("\n\n")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    with penstock(IRIS) as process:
        yield process


def _as_curl(command: list[str], server: Process) -> object:
    curl, silent, url, flag, body = command
    assert (curl, silent, flag) == ("curl", "-s", "-d")
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl sends with any -d
    return json.loads(server.request("POST", url.partition(ADDRESS)[2], body.encode(), form))


def test_the_predict_command_answers_with_the_flowers_name(server: Process) -> None:
    assert _as_curl(COMMANDS[0], server) == "iris-setosa"


def test_the_infer_command_answers_with_the_classes_of_two_rows(server: Process) -> None:
    answer = _as_curl(COMMANDS[1], server)

    assert isinstance(answer, dict)
    assert [(output["name"], output["shape"]) for output in answer["outputs"]] == [
        ("label", [2]),
        ("probabilities", [2, 3]),
    ]
    assert answer["outputs"][0]["data"] == [0, 2]


def test_the_tritonclient_command_prints_the_classes_of_two_rows(server: Process) -> None:
    python, flag, program = COMMANDS[2]
    assert (python, flag) == (".venv/bin/python", "-c")
    program = program.replace(ADDRESS, f"127.0.0.1:{server.port}")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout == "[0 2]\n"
