"""The command of examples/python_model/README.md is answered as the README states."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from penstock.perf.server_process import penstock

FOLDER = Path(__file__).parents[2] / "examples" / "python_model"


@pytest.mark.slow
def test_the_python_model_answers_with_the_similarities_stated_in_its_readme() -> None:
    text = (FOLDER / "README.md").read_text("utf-8")
    (block,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    *_, url, _, body = shlex.split(block.replace("\\\n", ""), comments=True)
    ratios = [float(number) for number in re.findall(r"answered with ([\d.]+\d), the second with ([\d.]+\d)", text)[0]]

    with penstock(FOLDER) as server:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        path = url.partition("127.0.0.1:8000")[2]
        answer = json.loads(server.request("POST", path, body.encode(), form))

    assert [round(ratio, 2) for ratio in answer["outputs"][0]["data"]] == ratios
